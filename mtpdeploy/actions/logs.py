"""`logs`: a host's live log as one stream that survives cuts, or with --file a log that lies here.

The place in a log is (launch, inode, offset), so a stream that was cut goes on with the next byte: nothing lost, nothing
twice. Lines of several hosts are one stream by time, marked with their host; a slow reader slows it and fills no memory.
"""

from __future__ import annotations

import base64
import json as json_module
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from mtpdeploy.actions.logfile import Answer, event_json, logfile
from mtpdeploy.actions.merging import Merge
from mtpdeploy.actions.reach import Target, again_after_cuts, targets
from mtpdeploy.agent.protocol import TailRequest
from mtpdeploy.errors import MtpError, UsageError
from mtpdeploy.hosts.agentclient import AgentClient
from mtpdeploy.hosts.fanout import Outcomes, on_hosts
from mtpdeploy.inventory.values import Host
from mtpdeploy.progress import Talk
from mtpdeploy.sglang.logs import Parser
from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.logs.level import Level, LevelGuess, at_least
from mtpdeploy.sglang.masking import mask

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_HEADER = re.compile(r"^# mtpdeploy launch (\S+) boot (\d+) utc (\S+)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ALL = 1 << 40  # lines, with --since
_LONGEST = 8 << 20  # bytes of a line without an end, which is then shown as one


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
    level_guess: Level | None = None,
    events: bool = False,
    colour: bool = False,
    file: Sequence[str] = (),
    series: str | None = None,
) -> Answer | None:
    """Writes lines to `out` as they come; with `json` each as {host, launch_id, boot, line} (or the event).

    colour: hosts are told apart by colour too. Raises NotFound (no such launch), UsageError; a cut line is taken up again.
    """
    if file:
        if host or follow or launch or since or grep or level_guess:
            raise UsageError(
                "--file reads a log that lies here; --host, --follow, --launch, --since, --grep and --level-guess are for hosts"
            )
        return logfile(talk=talk, file=file, series=series, events=events, out=out, json=json, home=home)
    if series:
        raise UsageError("--series needs --file")
    if lines < 0:
        raise UsageError(f"--lines: {lines} is less than 0")
    pattern = _pattern(grep)
    begin = _moment(since)
    chosen = {target.name: target for target in targets(home, host, inventory)}
    filters = _Filters(json=json, events=events, pattern=pattern, since=begin, level=level_guess)
    fetch = _Fetch(launch=launch, lines=_ALL if begin else lines, follow=follow, since=begin)
    if len(chosen) == 1:
        (target,) = chosen.values()
        _stream(target, _Printer(target.name, lambda line: out(line.text), filters), talk, fetch)
        return None
    answer = _together(list(chosen.values()), talk, out, filters, fetch, _marks(chosen, json=json, colour=colour))
    failed = [said for said in answer.by_host.values() if isinstance(said, MtpError)]
    for error in failed:
        talk.note(error.message)
    if failed and len(failed) == len(chosen):
        raise failed[0]
    return None


def _together(
    chosen: Sequence[Target],
    talk: Talk,
    out: Callable[[str], None],
    filters: _Filters,
    fetch: _Fetch,
    marks: Mapping[str, str],
) -> Outcomes[_Done]:
    """Several hosts at once, their lines merged in this thread: an interrupt and a reader that has gone end it at once."""
    by_name = {target.name: target for target in chosen}
    merge = Merge(by_name, follow=fetch.follow)

    def one(each: Host) -> _Done:
        def put(line: _Line) -> None:
            merge.put(each.name, line.when, line.text, goes_on=line.goes_on)

        try:
            _stream(by_name[each.name], _Printer(each.name, put, filters), talk, fetch, lambda: merge.begun(each.name))
        finally:
            merge.ended(each.name)
        return _Done()

    said: Future[Outcomes[_Done]] = Future()

    def work() -> None:
        try:
            said.set_result(on_hosts([target.host for target in chosen], one))  # type: ignore[arg-type]
        except BaseException as error:
            said.set_exception(error)

    threading.Thread(target=work, name="hosts", daemon=True).start()
    merge.run(lambda name, text: out(marks[name] + text))
    return said.result()


_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # of the terminal's own palette


def _marks(names: Iterable[str], *, json: bool, colour: bool) -> dict[str, str]:
    """What stands before a host's lines: its name, padded; nothing before JSON, which says it itself."""
    wide = max(map(len, names))
    plain = {name: "" if json else f"{name:{wide}} | " for name in names}
    if json or not colour:
        return plain
    return {name: f"\x1b[{_COLOURS[n % len(_COLOURS)]}m{mark}\x1b[0m" for n, (name, mark) in enumerate(plain.items())}


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


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Which lines of a host are asked for."""

    launch: str | None
    lines: int
    follow: bool
    since: datetime | None = None


def _stream(
    target: Target, printer: _Printer, talk: Talk, fetch: _Fetch, begun: Callable[[], None] = lambda: None
) -> None:
    """All of one host's lines through `printer`. begun: told when the host has sent something."""
    place: dict[str, Any] = {}
    launch, lines, follow = fetch.launch, fetch.lines, fetch.follow

    def take(event: Mapping[str, Any]) -> None:
        begun()
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
        if fetch.since is not None:
            request.update(TailRequest(since=fetch.since.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")))
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


@dataclass(frozen=True, slots=True)
class _Filters:
    """What is wanted of the lines, and how."""

    json: bool
    events: bool
    pattern: re.Pattern[str] | None
    since: datetime | None
    level: Level | None


@dataclass(frozen=True, slots=True)
class _Line:
    """when: the log's own stamp, or that of the line before it, which it then goes on from."""

    when: str
    goes_on: bool
    text: str


class _Printer:
    """Bytes of one host's log to lines: masked, filtered, and with their time."""

    def __init__(self, host: str, out: Callable[[_Line], None], filters: _Filters) -> None:
        self.host, self.out, self.filters = host, out, filters
        self.carry = b""
        self.launch_id, self.boot = "", 0
        self.parser = Parser() if filters.events else None
        self.late_enough = filters.since is None
        self.when = ""
        self.levels = LevelGuess()

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
        if len(self.carry) > _LONGEST:
            self.flush()

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
        stamp = _STAMP.match(text) or _HEADER.match(text)
        if stamp is not None:
            self.when = stamp.group(stamp.re.groups).replace("T", " ")
            self.late_enough = self.filters.since is None or _utc(self.when) >= self.filters.since
        wanted = self.filters.level
        bad_enough = wanted is None or at_least(self.levels.of(text), wanted)
        if not self.late_enough or not bad_enough:  # lines without a time go with the line before them
            return
        text = mask(text)
        if self.filters.pattern is not None and not self.filters.pattern.search(text):
            return
        if self.filters.json:
            told = {"host": self.host, "launch_id": self.launch_id, "boot": self.boot, "line": text}
            text = json_module.dumps(told, ensure_ascii=False)
        else:  # what a log holds must not steer the terminal that shows it
            text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
        self.out(_Line(self.when, stamp is None and bool(self.when), text))

    def _event(self, event: ev.Event) -> None:
        if isinstance(event, (ev.Raw, ev.Note, ev.Bar)):
            return
        if self.filters.pattern is not None and not self.filters.pattern.search(event.text):
            return
        if self.filters.level is not None and not at_least(self.levels.of(event.text), self.filters.level):
            return
        self.when = str(event.time or self.when)
        if self.filters.json:
            told = {"host": self.host, "launch_id": self.launch_id, "boot": self.boot, **event_json(event)}
            text = json_module.dumps(told, ensure_ascii=False)
        else:
            where = f" {event.rank}" if event.rank else ""
            text = f"{event.time or '-'}{where} {event.kind}: {mask(event.text)}"
        self.out(_Line(self.when, False, text))


def _utc(stamp: str) -> datetime:
    """A stamp of the log, taken as UTC."""
    moment = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
