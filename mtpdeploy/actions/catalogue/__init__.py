"""The verbs, grouped by the part of the work that they belong to; help shows them in this order."""

from __future__ import annotations

from mtpdeploy.actions.catalogue import benchmark, decision, inventory, knowledge, launches, planning, rehearsal
from mtpdeploy.actions.verbs import Verb

CATALOGUE: tuple[Verb, ...] = (
    *inventory.VERBS,
    *planning.VERBS,
    *launches.VERBS,
    *knowledge.VERBS,
    *benchmark.VERBS,
    *decision.VERBS,
    *rehearsal.VERBS,
)
