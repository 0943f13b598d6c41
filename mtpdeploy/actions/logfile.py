"""`logs --file`: reads a log that lies here, whoever made it. No host is touched.

A file may be `-` for stdin; either may be compressed (gzip, zstd). Memory stays the same however long the log is.
"""

from __future__ import annotations

import io
import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.sglang.failures import Attempt, Diagnosis, diagnose
from mtpdeploy.sglang.logs import Fold, Parser, Summary
from mtpdeploy.sglang.logs import events as ev

_CHUNK = 1 << 20
# The columns of a series; their order is the order of the CSV. Names as in the log summary's `decode`.
COLUMNS = (
    "time", "rank", "running_req", "queue_req", "gen_throughput", "accept_len", "accept_rate",
    "token", "token_usage", "full_token", "full_token_usage", "swa_token", "swa_token_usage", "mamba_num", "mamba_usage", "graph",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogRead:
    """One log: its summary, and a diagnosis where it shows a failure."""

    file: str
    summary: Summary
    diagnosis: Diagnosis | None

    def as_json(self) -> dict[str, object]:
        return self.summary.as_json() | {"diagnosis": self.diagnosis.as_json() if self.diagnosis else None}


@dataclass(frozen=True, slots=True)
class LogsRead:
    """Several logs, each read for itself."""

    logs: tuple[LogRead, ...]

    def as_json(self) -> dict[str, object]:
        return {"files": [{"file": log.file, **log.as_json()} for log in self.logs]}


@dataclass(frozen=True, slots=True)
class Series:
    """Decode records in the log's order, one row each; None where the log does not print a field."""

    file: str
    rows: tuple[dict[str, object], ...]

    def as_json(self) -> dict[str, object]:
        return {"file": self.file, "columns": list(COLUMNS), "rows": list(self.rows)}


Answer = LogRead | LogsRead | Series


def logfile(
    *,
    talk: Talk,
    file: Sequence[str],
    series: str | None = None,
    events: bool = False,
    out: Callable[[str], None],
    json: bool = False,
    home: Path | None = None,
) -> Answer | None:
    """The summary of each file; or their decode records (`series`), or every record (`events`), written line by line.

    Raises NotFound for a file that is not there, UsageError for one that is no log at all (a folder, broken compression).
    """
    if series and events:
        raise UsageError("--series and --events exclude each other: a series holds the decode records only")
    if file.count("-") > 1:
        raise UsageError("stdin can be read only once: give - once")
    if events:
        for name in file:
            _events(name, talk, out, json)
        return None
    if series == "csv" and not json:
        out(",".join(("file", *COLUMNS) if len(file) > 1 else COLUMNS))
        for name in file:
            for row in _rows(name, talk):
                out(",".join(_cell(v) for v in ([name] if len(file) > 1 else []) + [row[c] for c in COLUMNS]))
        return None
    if series == "json" and not json:
        out("[")
        before = None
        for name in file:
            for row in _rows(name, talk):
                if before is not None:
                    out(f"{before},")
                before = json_module.dumps({"file": name, **row} if len(file) > 1 else row, ensure_ascii=False)
        out(f"{before or ''}\n]")
        return None
    if series:
        if len(file) != 1:
            raise UsageError("a plot shows one log: give one --file")
        return Series(file[0], tuple(_rows(file[0], talk)))
    summaries = [(name, read_summary(name, talk)) for name in file]
    read = tuple(_diagnosed(name, summary, [s for n, s in summaries if n != name]) for name, summary in summaries)
    return read[0] if len(read) == 1 else LogsRead(read)


def read_summary(name: str, talk: Talk) -> Summary:
    """The summary of one log file, with progress on long ones."""
    parser, fold = Parser(totals_only=True), Fold()
    for chunk in _chunks(name, talk):
        fold.extend(parser.feed(chunk))
    fold.extend(parser.close())
    return fold.summary()


def _diagnosed(name: str, summary: Summary, others: Sequence[Summary]) -> LogRead:
    """Logs that are read together are attempts at the same server: two that fail in opposite ways leave no value between them."""
    if summary.cause is None and summary.phase not in ("crashed", "hung"):
        return LogRead(name, summary, None)
    attempts = [Attempt(other.server_args or {}, other.cause) for other in others if other.is_sglang]
    return LogRead(name, summary, diagnose(summary, attempts=attempts))


def _rows(name: str, talk: Talk) -> Iterator[dict[str, object]]:
    for event in _all_events(name, talk):
        if isinstance(event, ev.Decode):
            yield {"time": event.time, "rank": event.rank, **{c: event.values.get(c) for c in COLUMNS[2:]}}


def _events(name: str, talk: Talk, out: Callable[[str], None], json: bool) -> None:
    for event in _all_events(name, talk):
        if isinstance(event, (ev.Raw, ev.Note, ev.Bar)):
            continue
        if json:
            out(json_module.dumps(event_json(event), ensure_ascii=False))
        else:
            where = f" {event.rank}" if event.rank else ""
            out(f"{event.time or '-'}{where} {event.kind}: {event.text}")


def event_json(event: ev.Event) -> dict[str, object]:
    """An event as JSON: its kind, and its own fields."""
    fields = {name: getattr(event, name) for cls in type(event).__mro__ for name in getattr(cls, "__slots__", ())}
    return {"kind": event.kind, **{n: _plain(v) for n, v in reversed(list(fields.items()))}}


def _plain(value: object) -> object:
    if isinstance(value, ev.Event):
        return event_json(value)
    if isinstance(value, (tuple, frozenset)):
        return [_plain(v) for v in value]
    return dict(value) if isinstance(value, dict) else value


def _all_events(name: str, talk: Talk) -> Iterator[ev.Event]:
    parser = Parser()
    for chunk in _chunks(name, talk):
        yield from parser.feed(chunk)
    yield from parser.close()


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


def _chunks(name: str, talk: Talk) -> Iterator[bytes]:
    size = None if name == "-" else _size(name)
    key, done, told = f"read {name}", 0, 0
    try:
        with _opened(name) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
                done += len(chunk)
                if done - told >= 64 * _CHUNK:
                    told = done
                    talk.stage(key, f"reading {name}: {done / 2**20:.0f} MiB", min(1.0, done / size) if size else None)
    except (OSError, EOFError) as error:
        raise UsageError(f"{name} cannot be read to its end: {_reason(error)}") from error
    if told:
        talk.done(key, f"read {name}: {done / 2**20:.0f} MiB")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _size(name: str) -> int | None:
    path = Path(name)
    if not path.exists():
        raise NotFound(f"no such log file: {name}", next_commands=("mtpdeploy logs --file -    # reads stdin",))
    if path.is_dir():
        raise UsageError(f"{name} is a folder: give the log files in it, each with --file")
    return None if path.suffix in (".gz", ".zst") else path.stat().st_size


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _opened(name: str) -> Iterator[_Readable]:
    """The log's bytes, unpacked by what they begin with rather than by the file's name."""
    with ExitStack() as open_files:
        if name == "-":
            if sys.stdin is None:
                raise UsageError("stdin is closed, so there is no log to read from it")
            raw = sys.stdin.buffer
        else:
            raw = open_files.enter_context(open(name, "rb"))
        magic = raw.peek(4)[:4] if isinstance(raw, io.BufferedReader) else b""
        if magic.startswith(b"\x1f\x8b"):
            import gzip

            yield gzip.GzipFile(fileobj=raw)
        elif magic == b"\x28\xb5\x2f\xfd":
            yield _Zstd(raw)
        else:
            yield raw


class _Zstd:
    """A .zst file's bytes; several frames after each other too, as rotation by appending leaves them."""

    def __init__(self, raw: _Readable) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._raw, self._frame, self._rest, self._begun = raw, self._new(), b"", False

    def read(self, size: int) -> bytes:
        """The next bytes, as many as one read of the file gives; b"" at the end. Raises OSError where the file is torn."""
        while True:
            packed = self._rest or self._raw.read(size // 8 or 1)
            self._rest = b""
            if not packed:
                if self._begun:
                    raise OSError("the file ends inside a compressed block")
                return b""
            self._begun = True
            try:
                data = bytes(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame, self._begun = self._frame.unused_data, self._new(), False
            if data:
                return data
