"""What must hold after every fault, looked at by root and not through the product; and the record of what was seen."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.lab.lab import ROOT, Lab, Person, python

RECORDS = ROOT / "build" / "faults"
_SETTLE_S = 15.0
ORDER = (
    "at most one server on the port",
    "`ready` only for the launch that answers",
    "no half-written file in use",
    "nothing of ours runs unrecorded",
    "the next command works",
)


@dataclass
class Row:
    """One line of the table in docs/reliability.md."""

    fault: str
    did: str
    test: str
    held: list[str] = field(default_factory=list)
    order: bool = False
    began: float = field(default_factory=time.monotonic)

    def holds(self, what: str) -> None:
        """Says what was just shown to hold."""
        self.held.append(what)

    def write(self) -> None:
        """Keeps the row for tools/reliability.py."""
        assert self.order, "the row ends without the check that every row ends with"
        RECORDS.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", self.test.lower()).strip("-")
        record = {"fault": self.fault, "did": self.did, "test": self.test, "held": self.held,
                  "seconds": round(time.monotonic() - self.began, 1)}  # fmt: skip
        (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def until(holds: Callable[[], Any], what: str, limit_s: float = 40, every_s: float = 0.1) -> Any:
    """What `holds` returns once it is true."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"after {limit_s} s still not: {what}"
        time.sleep(every_s)
    return found


def together(*works: Callable[[], Any]) -> list[Any]:
    """All at once; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def look(lab: Lab, name: str, workdir: str) -> Any:
    """The host as root sees it; see look.py."""
    return json.loads(lab.at(name, f"exec {python()} -I -S {ROOT}/tests/lab/look.py '{workdir}'"))


def disorder(seen: Any) -> list[str]:
    """What of the order does not hold in what was seen."""
    wrong = [f"half-written: {text}" for text in seen["broken"]]
    recorded, keepers, known = set(), set(), set()
    for service in seen["services"]:
        for launch_id, launch in service["launches"].items():
            known.add(launch_id)
            state = launch["state"] or {}
            for boot in state.get("boots", []):
                if boot["boot_id"] == seen["boot_id"]:
                    recorded.add((boot["pid"], boot["start_time"]))
            if keeper := state.get("supervising"):
                keepers.add((keeper["pid"], keeper["start_time"]))
    of_launch = {p["pid"]: p for p in seen["processes"] if p["launch"]}
    mains = [p for p in of_launch.values() if "sglang.launch_server" in p["words"]]
    ports: dict[str, list[int]] = {}
    for main in mains:
        ports.setdefault(main["words"][main["words"].index("--port") + 1], []).append(main["pid"])
        if (main["pid"], main["start_time"]) not in recorded:
            wrong.append(f"a server runs that nobody recorded: {main}")
    wrong += [f"several servers for port {port}: {pids}" for port, pids in ports.items() if len(pids) > 1]
    wrong += [f"several listen on port {port}: {pids}" for port, pids in seen["listeners"].items()
              if port in ports and len(set(pids)) > 1]  # fmt: skip
    for process in seen["processes"]:
        identity = (process["pid"], process["start_time"])
        if process in mains or identity in recorded or identity in keepers:
            continue
        above, steps = process, 0
        while above is not None and (above["pid"], above["start_time"]) not in recorded and steps < 9:
            above, steps = of_launch.get(above["parent"]), steps + 1
        if above is None or steps == 9:
            wrong.append(f"left running: {process}")
    return wrong


def in_order(lab: Lab, person: Person, host: str, name: str, workdir: str, row: Row, then: str = "deploy") -> Any:
    """The check that every row ends with; afterwards `mtp` is proven ready there (then=deploy) or nothing runs (then=stop).

    Returns the answer of the next command.
    """
    deadline = time.monotonic() + _SETTLE_S
    while wrong := disorder(look(lab, name, workdir)):
        assert time.monotonic() < deadline, f"{host}: {wrong}"
        time.sleep(0.3)
    status = person.ask("status", "--host", host)
    seen = look(lab, name, workdir)
    if status["word"] == "ready":
        _ready_is_true(status, seen)
    assert not status.get("lock") or status["lock"]["state"] == "stale", status["lock"]
    if then == "stop":
        answer = person.ask("stop", "--host", host, "--abort-requests")
        assert answer["stopped"] is True, answer
    else:
        answer = person.ask("deploy", "--host", host, "--profile", "mtp")
        assert answer["outcome"] in ("ready", "unchanged"), answer
    after = look(lab, name, workdir)
    assert not (wrong := disorder(after)), f"{host}: {wrong}"
    if then == "stop":
        assert [p for p in after["processes"] if p["launch"] and p["launch"] in str(status["launch_id"])] == []
    assert [s["folder"] for s in after["services"] if s["lock"] or s["intent"]] == []
    row.order = True
    return answer


def _ready_is_true(status: Any, seen: Any) -> None:
    """Who listens is the recorded process of the launch that the status names."""
    launch_id = status["launch_id"]
    port = re.search(r":(\d+)$", status["url"])
    assert port
    pids = seen["listeners"].get(port[1]) or seen["listeners"].get(int(port[1])) or []
    (owner,) = [p for p in seen["processes"] if p["pid"] in pids]
    assert owner["launch"] == launch_id, (owner, launch_id)
    (service,) = [s for s in seen["services"] if launch_id in s["launches"]]
    boot = service["launches"][launch_id]["state"]["boots"][-1]
    assert (boot["pid"], boot["boot_id"]) == (owner["pid"], seen["boot_id"])
