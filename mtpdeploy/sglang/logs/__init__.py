"""Reads SGLang's log: `Parser` turns bytes into events, `Fold` turns events into a `Summary` or, live, into `Progress`."""

from __future__ import annotations

from mtpdeploy.sglang.logs.fold import Fold, summarise
from mtpdeploy.sglang.logs.parser import Parser
from mtpdeploy.sglang.logs.summary import LAUNCH, Phase, Progress, Summary

__all__ = ["LAUNCH", "Fold", "Parser", "Phase", "Progress", "Summary", "summarise"]
