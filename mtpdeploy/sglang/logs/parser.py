"""Bytes in, events out, in any chunks: the same events whatever the chunk size, with memory bounded by one record.

What it puts together before it reads a record: hard-wrapped lines, tracebacks (also around lines of other ranks that fell
between), progress bars with records glued to them. User text inside request logs is never searched for records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from mtpdeploy.sglang.logs import events as ev
from mtpdeploy.sglang.logs.arguments import balanced, server_args
from mtpdeploy.sglang.logs.records import known_start, raw_line, record
from mtpdeploy.sglang.logs.signs import message_sign, plain_sign
from mtpdeploy.sglang.logs.text import Line, bars, is_bar, take_apart
from mtpdeploy.sglang.masking import mask

_MAX_LINE = 1 << 20  # a longer physical line is cut: no record is that long
_MAX_RECORD = 1 << 18
_MAX_MESSAGES = 60

# Records of an undisturbed server under load, whole lines, of ranks already met. The look-ahead proves the last one is not wrapped.
_STEADY = (
    rb"(?:\[20..-..-.. ..:..:..(?:\.\d{1,6})?(?:%s)\] "
    rb'(?:Decode batch, #|Prefill batch, #|INFO:     [\d.]{7,15}:\d{1,5} - "POST /(?:generate|v1/(?:chat/)?completions) HTTP/1.1" 200 OK)'
    rb"[^\n]*\n){4,}(?=\[20\d\d-)"
)
_DECODE = b"] Decode batch, #"
_STEADY_ACCEPT = re.compile(rb"accept len: ([\d.]+),")
_MAX_RANKS = 256
_TERMINATOR = re.compile(rb"[\r\n]")

_TRACE_START = "Traceback (most recent call last):"
_OWNER = re.compile(
    r"(?:(\w+) hit an exception|Initialization failed\. (warmup) error|(Error in request)|(?:^|\b)([\w ]{1,40}?)):? ?$"
)
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)(?:, in (\S+))?')
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault|Warning|OutOfResources|NotFound|Timeout)\b(?=[:(]|$)"
)
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_RANK_MARK = re.compile(r"\[(?:rank|default)?\d{1,4}\]: ?(?!\[)")
_REQUEST_LOG = re.compile(
    r"(?:Receive|Finish|Received|Finished)\b.{0,40}(?:obj=|request|rid=|text=|in=)|\{\s*[\"']|Receive: |Finish: |in=\{|out=\{"
)
_WATCHDOG = re.compile(r"(?:\w+ )?[Ww]atchdog timeout \(self\.watchdog_timeout=")
_CONTINUES = re.compile(r"[\w #().,:/%=+-]{1,300}$")
_HELD = (
    "Load weight end",
    "KV Cache is allocated",
    "Post-capture KV",
    "Mamba Cache is allocated",
    "max_total_num_tokens=",
    "max_running_requests is",
    "Capture ",
    "SWAKVPool",
    "server_args=",
    "Decode batch",
    "Prefill batch",
)
_WEIGHTS_DONE = re.compile(r"mem usage=-?\d+\.\d+ ?GB\.?\s*$")
_BATCH_DONE = re.compile(r"#queue-req: ?\d+(?:, ?(?:#cache_miss: ?\d+)?)?\s*$")


class Parser:
    """`for event in parser.feed(chunk): …` and, at the end, `for event in parser.close(): …`.

    totals_only: undisturbed stretches of batch records arrive as one SteadyRun; a fold gives the same summary, many times faster.
    """

    def __init__(self, *, totals_only: bool = False) -> None:
        self._tail = b""
        self._parts: list[bytes] = []
        self._waiting = 0  # bytes in _parts
        self._held: Line | None = None
        self._trace: _OpenTrace | None = None
        self._wraps = 0
        self._ranks: set[str] = set()
        self._steady = re.compile(_STEADY % b"") if totals_only else None

    def feed(self, data: bytes) -> Iterator[ev.Event]:
        if b"\n" not in data and b"\r" not in data:
            if self._waiting < _MAX_LINE:  # what is longer is cut anyway
                self._parts.append(data)
                self._waiting += len(data)
            return
        if self._parts:
            data = b"".join((self._tail, *self._parts, data))
            self._parts, self._waiting = [], 0
        elif self._tail:
            data = self._tail + data
        self._tail = b""
        yield from self._lines(data)

    def close(self) -> Iterator[ev.Event]:
        """What is left, when no more text will come. A last record without a line's end may be cut: its last value is doubted."""
        rest = b"".join((self._tail, *self._parts))
        self._tail, self._parts, self._waiting = b"", [], 0
        if rest:
            yield from self._line(_undoubtful(rest[:_MAX_LINE]))
        yield from self._release()
        yield from self._end_trace()

    def _lines(self, data: bytes) -> Iterator[ev.Event]:
        position, end = 0, max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        unusual = -1  # where the next bar or colour code is; a steady stretch ends before it
        while position < end:
            if self._steady is not None and unusual < position:
                unusual = _next_unusual(data, position, end)
            if self._steady is not None and (run := self._steady.match(data, position, unusual)):
                # What was held or open ends here: a steady line continues nothing.
                yield from self._release()
                yield from self._end_trace()
                yield _totals(data, position, run.end())
                position = run.end()
                continue
            terminator = _TERMINATOR.search(data, position)
            stop = terminator.start() if terminator else end
            if stop > position:
                yield from self._line(data[position : min(stop, position + _MAX_LINE)])
            position = stop + 1
        self._tail = data[end:]

    def _line(self, raw: bytes) -> Iterator[ev.Event]:
        line = take_apart(raw)
        if not line.body.strip() and not line.before:
            return
        if line.stamped:
            if line.rank and line.rank not in self._ranks and len(self._ranks) < _MAX_RANKS:
                self._ranks.add(line.rank)
                if self._steady is not None:
                    labels = b"|".join(re.escape(f" {rank}".encode()) for rank in sorted(self._ranks))
                    self._steady = re.compile(_STEADY % (b"|" + labels))
            yield from self._release()
            for what, done, total in bars(line.before):
                yield _bar(line, what, done, total)
            yield from self._stamped(line)
            return
        if self._held is not None and (joined := self._join(self._held, line.body)) is not None:
            self._held = joined
            return
        yield from self._release()
        yield from self._unstamped(line)

    def _stamped(self, line: Line) -> Iterator[ev.Event]:
        body = line.body
        if _TRACE_START in body and not _REQUEST_LOG.match(body):
            yield from self._end_trace()
            before = body[: body.index(_TRACE_START)].strip()
            m = _OWNER.search(before)
            owner = next((g for g in m.groups() if g), None) if m else None
            self._trace = _OpenTrace(line.time, line.rank, owner or before[:60] or None, mask(before))
            return
        if self._trace is not None and self._trace.messages:
            yield from self._end_trace()
        if body.startswith(_HELD) or (len(body) < 40 and any(start.startswith(body) for start in _HELD)):
            self._held = line
            return
        yield self._event(line)

    def _event(self, line: Line) -> ev.Event:
        body = line.body
        if body.startswith("server_args="):
            return ev.ServerArgsLine(line.time, line.rank, mask(body), server_args(body[len("server_args=") :]))
        event = record(line.time, line.rank, body)
        if event is not None:
            return event if isinstance(event, (ev.Decode, ev.Prefill)) else _masked(event)
        if not _REQUEST_LOG.match(body):
            if _WATCHDOG.match(body) and "self.soft=True" not in body:
                return ev.Sign(line.time, line.rank, mask(body), "watchdog_hang")
            if cause := plain_sign(body):
                return ev.Sign(line.time, line.rank, mask(body), cause)
        return ev.Note(line.time, line.rank, mask(body[:4000]))

    def _unstamped(self, line: Line) -> Iterator[ev.Event]:
        body = line.body
        if self._trace is None and known_start(body):
            yield self._event(line)
            return
        plain = _RANK_MARK.sub("", body, count=1) if body.startswith("[") else body
        if self._trace is not None:
            if self._trace.take(plain):
                return
            yield from self._end_trace()
        if is_bar(body):
            for what, done, total in bars(body):
                yield _bar(line, what, done, total)
            if "resource_tracker: There appear" not in body:
                return
        elif plain.startswith(_TRACE_START) or (plain.endswith(_TRACE_START) and "'" not in plain and '"' not in plain):
            self._trace = _OpenTrace(None, line.rank, None, "")
            return
        elif _FRAME.match(plain) or (_EXCEPTION.match(plain) and len(plain) < 4000):
            self._trace = _OpenTrace(None, line.rank, None, "")
            self._trace.take(plain)
            return
        if known_start(body):
            yield self._event(line)
        elif body.startswith(("INFO:", "ERROR:")):
            event = record(line.time, line.rank, body)
            cause = plain_sign(body)
            yield event or (ev.Sign(None, None, mask(body), cause) if cause else ev.Raw(None, None, mask(body[:4000])))
        elif cause := plain_sign(body):
            yield ev.Sign(line.time, line.rank, mask(body[:4000].strip()), cause)
        else:
            yield raw_line(body) or ev.Raw(line.time, line.rank, mask(body[:4000]))

    def _end_trace(self) -> Iterator[ev.Event]:
        trace, self._trace = self._trace, None
        if trace is not None:
            yield trace.event()

    def _release(self) -> Iterator[ev.Event]:
        held, self._held = self._held, None
        if held is not None:
            yield self._event(held)

    def _join(self, held: Line, more: str) -> Line | None:
        """`held` with a wrapped continuation, or None if `more` is something of its own."""
        body = held.body
        if body.startswith("server_args="):
            if balanced(body[len("server_args=") :]) or len(body) > _MAX_RECORD:
                return None
            return dataclasses.replace(held, body=body + more)
        text = more.strip() if more.startswith("  ") else more
        if not _CONTINUES.match(text) or len(body) > 4000 or known_start(text):
            return None
        if body.startswith(("Decode batch", "Prefill batch")):
            done = _BATCH_DONE.search(body)
            digits = re.match(r"\d{1,6}\s*(?:,|$)", text)
            if done and not (digits or text.startswith(",")):
                return None
            if done and digits and body[-1:].isdigit() and not self._wraps:
                # Wrapped inside the last number, or a foreign line of digits? Nobody can tell: the number is dropped.
                return dataclasses.replace(held, body=body[: body.rindex(":")])
            if not done and ":" not in text and len(text) > 40:
                return None
        elif _complete(body) and not text.startswith((",", " GB", "GB")):
            return None
        self._wraps += 1
        return dataclasses.replace(held, body=body + text)


def _totals(data: bytes, start: int, end: int) -> ev.SteadyRun:
    """The steady lines of data[start:end] as one event."""
    first = last = None
    first_at = data.find(_DECODE, start, end)
    if first_at >= 0:
        first, last = _batch_at(data, first_at), _batch_at(data, data.rfind(_DECODE, start, end))
    lengths = [value for value in map(_float, set(_STEADY_ACCEPT.findall(data, start, end))) if value is not None]
    decodes = data.count(_DECODE, start, end)
    return ev.SteadyRun(
        None,
        None,
        "",
        decodes,
        first,
        last,
        min(lengths, default=None),
        max(lengths, default=None),
        *_posts(data, start, end),
    )


def _next_unusual(data: bytes, start: int, end: int) -> int:
    found = [at for mark in (b"\r", b"\x1b") if (at := data.find(mark, start, end)) >= 0]
    return min(found, default=len(data))


def _posts(data: bytes, start: int, end: int) -> tuple[int, bool]:
    """(requests that were answered, counted to three: more tell nothing more; whether those came from this host)."""
    count, local = 0, True
    while count < 3 and (at := data.find(b'" 200 OK', start, end)) >= 0:
        count += 1
        local = local and data.startswith(b"127.", data.rfind(b"INFO:     ", start, at) + 10)
        start = at + 1
    return count, local


def _batch_at(data: bytes, at: int) -> ev.Decode | None:
    line = take_apart(data[data.rfind(b"\n", 0, at) + 1 : data.index(b"\n", at)])
    event = record(line.time, line.rank, line.body)
    return event if isinstance(event, ev.Decode) else None


def _complete(body: str) -> bool:
    if body.startswith("Load weight end"):
        return _WEIGHTS_DONE.search(body) is not None or ("avail mem=" in body and body.rstrip(". ").endswith("GB"))
    if body.startswith(("KV Cache", "Post-capture")):
        return (("V size:" in body and "K size:" in body) or "KV size:" in body) and body.rstrip(". ").endswith("GB")
    if body.startswith("Mamba Cache"):
        return "ssm_state size:" in body and body.rstrip().endswith("GB") and body != body.rstrip()
    if body.startswith("max_total_num_tokens="):
        return "available_gpu_mem=" in body and body.rstrip().endswith("GB")
    if body.startswith("Capture "):
        return body.rstrip().endswith(("GB", "GB.", " s", "begin."))
    if body.startswith("SWAKVPool"):
        return "full size:" in body
    return body.rstrip().endswith(".")


class _OpenTrace:
    """A traceback that is being collected. Chained exceptions stay together, the root's message first."""

    def __init__(self, time: str | None, rank: str | None, owner: str | None, opening: str) -> None:
        self.time, self.rank, self.owner, self.opening = time, rank, owner, opening
        self.frames: list[str] = []
        self.messages: list[str] = []
        self._chained = False
        self._source = False  # indented lines are a frame's source, not a part of a message

    def take(self, text: str) -> bool:
        """Whether the line belongs to the traceback."""
        if m := _FRAME.match(text):
            if len(self.frames) < 400:
                self.frames.append(f"{m[1]}:{m[3] or '?'}")
            self._chained, self._source = False, True
            return True
        if text.startswith("# "):
            return False
        if text.startswith(_CHAIN):
            self._chained = True
            return True
        if text.startswith(_TRACE_START):
            return not (self.messages and not self._chained)
        if text[:1] in (" ", "\t"):
            # Source lines, carets, indented parts of a message such as a compiler's excerpt: none decides.
            if (
                self.messages
                and not self._source
                and len(self.messages) < _MAX_MESSAGES
                and not set(text) <= set(" ^~\t")
            ):
                self.messages.append(text.rstrip())
            return True
        self._source = False
        if not self.messages:
            if is_bar(text) or (raw_line(text) is not None and not _EXCEPTION.match(text)):
                return False
            self.messages.append(text.rstrip())
            return True
        if _EXCEPTION.match(text):
            if len(self.messages) < _MAX_MESSAGES:
                self.messages.append(text.rstrip())
            return True
        if is_bar(text) or len(self.messages) >= _MAX_MESSAGES or raw_line(text) is not None or known_start(text):
            return False
        self.messages.append(text.rstrip())
        return True

    def event(self) -> ev.Traceback:
        messages = tuple(mask(m[:2000]) for m in self.messages)
        return ev.Traceback(
            self.time,
            self.rank,
            self.opening or (messages[0] if messages else ""),
            self.owner,
            tuple(self.frames),
            messages,
        )


def trace_cause(trace: ev.Traceback) -> str | None:
    """What a traceback's messages point to; wrapped messages are tried joined as well."""
    return message_sign("\n".join(trace.messages)) or message_sign("".join(trace.messages))


def _masked(event: ev.Event) -> ev.Event:
    masked = mask(event.text)
    return event if masked == event.text else dataclasses.replace(event, text=masked)


def _bar(line: Line, label: str, done: int, total: int) -> ev.Event:
    what: ev.BarKind
    if "Completed" in label or "shards" in label or "Loading" in label:
        what = "weights"
    elif "Capturing" in label:
        what = "graphs"
    elif "Compiling" in label or "ompil" in label:
        what = "compile"
    elif "Fetching" in label or "Downloading" in label:
        what = "download"
    else:
        what = "other"
    return ev.Bar(line.time, line.rank, f"{label[-60:].strip()} {done}/{total}", what, done, total)


def _float(raw: bytes) -> float | None:
    try:
        return float(raw)
    except ValueError:
        return None


def _undoubtful(raw: bytes) -> bytes:
    """The unterminated last line without a value that may be cut in its middle: SGLang prints its fractions with two digits."""
    if m := re.search(rb"[=:] ?-?\d+(?:\.\d?)?$", raw):
        whole = b"." not in m.group() and (b"#queue-req:" in raw[-24:] or b"#cache_miss" in raw[-24:])
        return raw if whole else raw[: m.start()]
    return raw
