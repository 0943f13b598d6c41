"""What the deploys of this home left behind about a launch."""

from __future__ import annotations

from collections.abc import Mapping

from mtpdeploy.errors import MtpError
from mtpdeploy.store.store import Run, Store


def deploys_of(store: Store, launch_ids: set[str]) -> tuple[Run, ...]:
    """The deploy runs that made these launches, newest first; unreadable ones are passed over."""
    found = (readable(store, row.id) for row in store.runs(kind="deploy", limit=500)) if launch_ids else ()
    return tuple(
        run
        for run in found
        if run is not None and ({run.meta.get("launch_id"), run.summary.get("launch_id")} & launch_ids)
    )


def memory_of(store: Store, launch_id: str | None) -> Mapping[str, object]:
    """The memory budget that the launch was planned with; {} where it is not known here."""
    for run in deploys_of(store, {launch_id} if launch_id else set()):
        plan = document(run, "plan.json")
        memory = plan.get("memory")
        if isinstance(memory, Mapping):
            return memory
    return {}


def readable(store: Store, name: str) -> Run | None:
    """None for a run that was deleted or damaged meanwhile."""
    try:
        return store.run(name)
    except MtpError:
        return None


def document(run: Run, name: str) -> Mapping[str, object]:
    """A JSON object of the folder; {} where it is missing, damaged or something else."""
    try:
        held = run.read_json(name)
    except MtpError:
        return {}
    return held if isinstance(held, Mapping) else {}
