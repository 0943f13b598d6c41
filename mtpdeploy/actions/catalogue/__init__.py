"""The verbs, grouped by the part of the work that they belong to; help shows them in this order."""

from __future__ import annotations

from mtpdeploy.actions.verbs import Verb

CATALOGUE: tuple[Verb, ...] = ()
