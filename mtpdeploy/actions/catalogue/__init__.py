"""The verbs, grouped by the part of the work that they belong to; help shows them in this order."""

from __future__ import annotations

import importlib
import importlib.util

from mtpdeploy.actions.verbs import Verb

TOPICS = ("inventory", "planning", "launches", "knowledge", "benchmark", "decision", "rehearsal")


def _catalogue() -> tuple[Verb, ...]:
    found: list[Verb] = []
    for topic in TOPICS:
        name = f"{__name__}.{topic}"
        if importlib.util.find_spec(name):
            found.extend(importlib.import_module(name).VERBS)
    return tuple(found)


CATALOGUE: tuple[Verb, ...] = _catalogue()
