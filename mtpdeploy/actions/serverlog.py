"""What the server's own log says over time, kept beside a benchmark: its decode records, and when each phase of the start began."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from mtpdeploy.agent.protocol import TailRequest
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.sglang.logs import Fold, Parser
from mtpdeploy.sglang.logs.events import Decode
from mtpdeploy.store import Run

MOST_DECODES = 20_000  # SGLang prints one each 40 steps: hours of load
KEPT = ("running_req", "queue_req", "gen_throughput", "accept_len", "accept_rate", "token_usage", "mamba_usage")


class Series:
    """Takes the log as it comes; `decodes` and `phases` are the last boot's."""

    def __init__(self) -> None:
        self._parser, self._fold = Parser(), Fold()
        self._boot: object = None
        self.decodes: list[dict[str, object]] = []
        self.phases: list[dict[str, object]] = []

    def feed(self, data: bytes) -> None:
        for event in self._parser.feed(data):
            self._take(event)

    def close(self) -> None:
        for event in self._parser.close():
            self._take(event)

    def _take(self, event: Any) -> None:
        self._fold.extend((event,))
        boot = self._fold.boot
        if boot is not self._boot:
            self._boot, self.decodes, self.phases = boot, [], []
        phase = boot.current or boot.phase
        if event.time and phase and (not self.phases or self.phases[-1]["phase"] != phase):
            self.phases.append({"phase": phase, "at": event.time})
        if isinstance(event, Decode) and event.time and len(self.decodes) < MOST_DECODES:
            values = {name: event.values[name] for name in KEPT if name in event.values}
            self.decodes.append({"at": event.time, "rank": event.rank, **values})


def keep(client: AgentClient, run: Run, arm: str | None = None) -> None:
    """Writes decode.jsonl and, for the page, startup.jsonl into the run's folder. What the log lacks leaves no file."""
    series = Series()

    def take(event: Mapping[str, Any]) -> None:
        if event.get("event") == "log":
            series.feed(base64.b64decode(event["data"]))

    client.call("tail", TailRequest(offset=0, follow=False), on_event=take)
    series.close()
    named = {"arm": arm} if arm is not None else {}
    for name, rows in (("decode.jsonl", series.decodes), ("startup.jsonl", series.phases)):
        if rows:
            run.append_jsonl(name, [{**named, **row} for row in rows])
