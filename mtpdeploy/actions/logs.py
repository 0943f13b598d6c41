"""`logs`: a host's live log as one stream that survives cuts, or with --file a log that lies here.

The place in a log is (launch, inode, offset), so a stream that was cut goes on with the next byte: nothing lost, nothing
twice. Lines of several hosts are marked with their host; a slow reader slows the stream and fills no memory.
"""

from __future__ import annotations

import base64
import json as json_module
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from mtpdeploy.actions.logfile import Answer, event_json, logfile
from mtpdeploy.actions.reach import Target, again_after_cuts, targets
from mtpdeploy.agent.protocol import TailRequest
from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import on_hosts
from mtpdeploy.inventory.values import Host
from mtpdeploy.progress import Talk
from mtpdeploy.sglang.logs import Parser
from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.masking import mask

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_HEADER = re.compile(r"^# mtpdeploy launch (\S+) boot (\d+) utc (\S+)")
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ALL = 1 << 40  # lines, with --since


def logs(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    inventory: Sequence[str],
    out: Callable[[str], None],
    json: bool = False,
    follow: bool = False,
    lines: int = 100,
    since: str | None = None,
    grep: str | None = None,
    launch: str | None = None,
    events: bool = False,
    file: Sequence[str] = (),
    series: str | None = None,
) -> Answer | None:
    """Writes lines to `out` as they come; with `json` each as {host, launch_id, boot, line} (or the event).

    Raises NotFound (no such launch), UsageError; a cut line is taken up again.
    """
    if file:
        if host or follow or launch or since or grep:
            raise UsageError(
                "--file reads a log that lies here; --host, --follow, --launch, --since and --grep are for hosts"
            )
        return logfile(talk=talk, file=file, series=series, events=events, out=out, json=json, home=home)
    if series:
        raise UsageError("--series needs --file")
    if lines < 0:
        raise UsageError(f"--lines: {lines} is less than 0")
    pattern = _pattern(grep)
    begin = _moment(since)
    chosen = {target.name: target for target in targets(home, host, inventory)}
    gate = threading.Lock()

    def one(each: Host) -> _Done:
        printer = _Printer(
            each.name if len(chosen) > 1 else None,
            each.name,
            out,
            gate,
            json=json,
            events=events,
            pattern=pattern,
            since=begin,
        )
        _stream(chosen[each.name], printer, talk, launch=launch, lines=_ALL if begin else lines, follow=follow)
        return _Done()

    answer = on_hosts([target.host for target in chosen.values()], one)
    failed = [said for said in getattr(answer, "by_host", {}).values() if isinstance(said, MtpError)]
    for error in failed:
        talk.note(error.message)
    if failed and len(failed) == len(chosen):
        raise failed[0]
    return None


class _Done:
    """All of it is written already."""

    def as_json(self) -> dict[str, Any]:
        return {}


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep else None
    except re.error as wrong:
        raise UsageError(f"--grep: {grep!r} is no regular expression: {wrong}") from None


def _moment(since: str | None) -> datetime | None:
    """`10m` ago, or a UTC time. The log's own stamps are taken as UTC, which servers keep."""
    if since is None:
        return None
    if ago := _AGO.match(since):
        return datetime.now(timezone.utc) - timedelta(seconds=float(ago.group(1)) * _SECONDS[ago.group(2)])
    try:
        moment = datetime.fromisoformat(since.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(
            f"--since: {since!r} is neither a time such as 2026-01-31T12:00 nor an age such as 10m"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _stream(target: Target, printer: _Printer, talk: Talk, *, launch: str | None, lines: int, follow: bool) -> None:
    place: dict[str, Any] = {}

    def take(event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "log":
                data = base64.b64decode(event["data"])
                place.update(inode=event["inode"], offset=event["offset"] + len(data), launch_id=event["launch_id"])
                printer.data(event["launch_id"], event["boot"], data)
            case "log-gap":
                place.update(inode=event["inode"], offset=event["offset"], launch_id=event["launch_id"])
                printer.flush()
                talk.note(f"{target.name}: {event['why']}")
            case "note":
                printer.flush()
                talk.note(f"{target.name}: {event['text']}")

    def ask(client: AgentClient) -> None:
        request = TailRequest(lines=lines, follow=follow, launch_id=launch)
        if place:
            # What was followed as the current launch may have been replaced while the line was cut: its rest comes first.
            request.update(TailRequest(inode=place["inode"], offset=place["offset"]))
            if launch is None and follow and _moved_on(client, place["launch_id"]):
                rest = TailRequest(
                    launch_id=place["launch_id"], inode=place["inode"], offset=place["offset"], follow=False
                )
                client.call("tail", rest, on_event=take)
                printer.flush()
                place.clear()
                request = TailRequest(offset=0, follow=True)
        client.call("tail", request, on_event=take)

    again_after_cuts(ask, target, lambda text: talk.note(f"{target.name}: {text}"))
    printer.flush()


def _moved_on(client: AgentClient, launch_id: str) -> bool:
    return client.call("status").get("launch_id") not in (None, launch_id)


class _Printer:
    """Bytes of one host's log to lines on stdout: masked, filtered, marked with the host where there are several."""

    def __init__(
        self,
        prefix: str | None,
        host: str,
        out: Callable[[str], None],
        gate: threading.Lock,
        *,
        json: bool,
        events: bool,
        pattern: re.Pattern[str] | None,
        since: datetime | None,
    ) -> None:
        self.prefix, self.host, self.out, self.gate = prefix, host, out, gate
        self.json, self.events, self.pattern, self.since = json, events, pattern, since
        self.carry = b""
        self.launch_id, self.boot = "", 0
        self.parser = Parser() if events else None
        self.late_enough = since is None

    def data(self, launch_id: str, boot: int, data: bytes) -> None:
        if launch_id != self.launch_id:
            self.flush()
        self.launch_id, self.boot = launch_id, boot
        if self.parser is not None:
            for event in self.parser.feed(data):
                self._event(event)
            return
        # tqdm redraws with \r: only what stands at the end of a line was meant to stay.
        *whole, self.carry = (self.carry + data).split(b"\n")
        for line in whole:
            self._line(line)

    def flush(self) -> None:
        """The unfinished last line, when nothing follows it."""
        if self.parser is not None:
            for event in self.parser.close():
                self._event(event)
            self.parser = Parser()
        if self.carry:
            line, self.carry = self.carry, b""
            self._line(line)

    def _line(self, raw: bytes) -> None:
        text = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if self.since is not None and not self._is_late_enough(text):
            return
        text = mask(text)
        if self.pattern is not None and not self.pattern.search(text):
            return
        if self.json:
            self._write(
                json_module.dumps(
                    {"host": self.host, "launch_id": self.launch_id, "boot": self.boot, "line": text},
                    ensure_ascii=False,
                )
            )
        else:
            self._write(f"{self.prefix} | {text}" if self.prefix else text)

    def _is_late_enough(self, text: str) -> bool:
        """Lines without a time go with the line before them."""
        if found := _STAMP.match(text):
            moment = datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
            self.late_enough = self.since is None or moment >= self.since
        elif found := _HEADER.match(text):
            moment = datetime.fromisoformat(found.group(3).replace("Z", "+00:00"))
            self.late_enough = self.since is None or moment >= self.since
        return self.late_enough

    def _event(self, event: ev.Event) -> None:
        if isinstance(event, (ev.Raw, ev.Note, ev.Bar)):
            return
        if self.pattern is not None and not self.pattern.search(event.text):
            return
        if self.json:
            told = {"host": self.host, "launch_id": self.launch_id, "boot": self.boot, **event_json(event)}
            self._write(json_module.dumps(told, ensure_ascii=False))
        else:
            where = f" {event.rank}" if event.rank else ""
            text = f"{event.time or '-'}{where} {event.kind}: {mask(event.text)}"
            self._write(f"{self.prefix} | {text}" if self.prefix else text)

    def _write(self, line: str) -> None:
        with self.gate:
            self.out(line)
