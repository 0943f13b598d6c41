"""Reads one HTTP/1.1 answer with a stream of server-sent events: bytes with arrival times in, chunks with token counts out.

Pure: no socket and no clock. `Answer.feed(ns, data)` may be called long after the bytes came, with their own times, so the
client parses when it has time and not when a token arrives.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from mtpdeploy.bench.values import Api

COUNT = b'"completion_tokens"'  # cannot match inside a JSON string: a quote there is escaped
NUMBER = re.compile(rb"\s*:\s*(\d+)")
NEAR_END = 200  # bytes
ENDS = re.compile(rb'"finish_reason"\s*:\s*"|"choices"\s*:\s*\[\s*\]')
ERROR_TEXT = 400  # characters of a server's error that are kept
EVENT_END = b"}\n\n\r\n"  # of a read that is one HTTP chunk with one event
ERRORS = (b'{"error"', b'{"object":"error"')
ERROR_FIRSTS = {one[2] for one in ERRORS}  # the first letters of their names
NEWLINE, COLON = b"\n:"
TAIL = 4  # events from the end that are kept for what they tell of the whole answer
LENGTHS = 8192  # lengths whose start is remembered
_STARTS: dict[int, bytes] = {}  # how such a read begins, by its length


class BadAnswer(ValueError):
    """The bytes are no HTTP/1.1 answer."""


def count_of(payload: bytes) -> int | None:
    """The last `"completion_tokens": N` of an event, found on bytes; null counts as none."""
    at = payload.rfind(COUNT, len(payload) - NEAR_END)  # where it nearly always stands
    if at < 0:
        at = payload.rfind(COUNT)
        if at < 0:
            return None
    found = NUMBER.match(payload, at + len(COUNT))
    return int(found[1]) if found else None


def start_of(size: int) -> bytes:
    """How a read of `size` bytes begins if it is one HTTP chunk: the chunk's length, and the start of an event."""
    start = _STARTS.get(size)
    if start is None:
        digits = next((n for n in range(1, 9) if len(b"%x" % max(size - n - 4, 0)) == n), 0)
        start = b"%x\r\ndata: {" % max(size - digits - 4, 0)
        if size < LENGTHS:
            _STARTS[size] = start
    return start


def event_of(data: bytes) -> bytes:
    """The JSON of a read that is one HTTP chunk with one event."""
    return data[len(start_of(len(data))) - 1 : -len(EVENT_END) + 1]


class Chunks:
    """Arrivals of the chunks that carried tokens, and the cumulative count at each where the server counts them."""

    __slots__ = (
        "_counted_last",
        "_room",
        "_tail",
        "api",
        "counted",
        "done",
        "error",
        "error_kind",
        "events",
        "kept",
        "times",
        "tokens",
    )

    def __init__(self, api: Api, keep_bytes: int = 0) -> None:
        self.api = api
        self.kept: list[bytes] = []  # the first events, up to keep_bytes: the answer's text is read from them later
        self._room = keep_bytes
        self.times: list[int] = []
        self.tokens: list[int] = []
        self.counted: bool | None = None  # None: not known before the first chunk that carries something
        self.events = 0
        self.done = False
        self.error: str | None = None
        self.error_kind: str | None = None
        self._counted_last = b""  # the event that was counted last
        self._tail: deque[bytes] = deque(maxlen=TAIL)  # the answer's end: finish reason, usage, acceptance

    def take(self, ns: int, payload: bytes) -> None:
        """One event's data."""
        if payload == b"[DONE]":
            self.done = True
            return
        self.events += 1
        self._tail.append(payload)
        if self._room > 0:
            self.kept.append(payload)
            self._room -= len(payload)
        if payload.startswith(ERRORS):
            self._fail(payload)
            return
        total = count_of(payload)
        if self.api == "sglang":
            if total is not None and total > (self.tokens[-1] if self.tokens else 0):
                self.counted = True
                self.times.append(ns)
                self.tokens.append(total)
            return
        if total is not None and self.counted is not False:
            if total > (self.tokens[-1] if self.tokens else 0):
                if self.counted is None and ENDS.search(payload):
                    # usage for the first time in the last chunk, or after it: a sum, not a count per chunk
                    if _carries_text(payload):
                        self.times.append(ns)
                    self.counted = False
                    return
                self.counted = True
                self._counted_last = payload
                self.times.append(ns)
                self.tokens.append(total)
            return
        if _carries_text(payload):
            self.counted = False
            self.times.append(ns)

    def take_paced(self, reads: Sequence[tuple[int, bytes]], place: int) -> int:
        """Takes reads from `place` on that are one HTTP chunk with one counted event each; gives the place after the last of them.

        Does what `take` does, in one loop: nearly all reads of a benchmark's streams come through here. Call it only where `counted` is
        true and nothing is half read.
        """
        if self._room > 0:
            return place
        times, tokens, tail, starts = self.times.append, self.tokens.append, self._tail, _STARTS.get
        near, skip = NEAR_END + len(EVENT_END), len(COUNT) + 1
        total, counted, taken = self.tokens[-1], -1, place
        width = len(str(total))
        for taken in range(place, len(reads)):
            ns, data = reads[taken]
            size = len(data)
            start = starts(size) or start_of(size)
            edge = len(start)
            at = data.rfind(COUNT, size - near) + skip  # of the number
            end = at + width
            if (
                at <= edge + skip
                or not data.startswith(start)
                or data.find(b"\n", edge) != size - 4
                or data[size - 3] != NEWLINE
                or data[edge + 1] in ERROR_FIRSTS
                or data[at - 1] != COLON
            ):
                break
            try:
                if 48 <= data[end] <= 57:  # the number has a digit more than the one before
                    end += 1
                    count = int(data[at:end])
                    width += 1
                    if 48 <= data[end] <= 57:
                        break
                else:
                    count = int(data[at:end])
            except ValueError:
                break
            if count > total:
                total, counted = count, taken
                times(ns)
                tokens(count)
        else:
            taken = len(reads)
        self.events += taken - place
        for one in range(max(place, taken - TAIL), taken):
            payload = event_of(reads[one][1])
            tail.append(payload)
            if one == counted:
                self._counted_last = payload
        return taken

    def _fail(self, payload: bytes) -> None:
        self.error = error_text(payload)
        self.error_kind = "stream error"

    @property
    def last(self) -> bytes:
        """The last event that was no [DONE]; empty before the first."""
        return self._tail[-1] if self._tail else b""

    def result(self) -> dict[str, Any]:
        """What the answer's last events say, by the names of Record's fields; absent where the server doesn't tell."""
        told: dict[str, Any] = {}
        for payload in self._tail:
            try:
                event = json.loads(payload)
            except ValueError:
                continue
            if isinstance(event, dict):
                if event.get("choices") == [] and payload is self._counted_last:
                    # the sum after the last chunk is more than the chunks told: it came with no token of its own
                    self.times.pop()
                    self.tokens.pop()
                    self._counted_last = b""
                _from_generate(event, told) if self.api == "sglang" else _from_openai(event, told)
        return told


def _carries_text(payload: bytes) -> bool:
    try:
        event = json.loads(payload)
        choice = event["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    part = delta if isinstance(delta, dict) else choice
    return any(part.get(name) for name in ("content", "reasoning_content", "reasoning", "text", "tool_calls"))


def _from_generate(event: dict[str, Any], told: dict[str, Any]) -> None:
    meta = event.get("meta_info")
    if not isinstance(meta, dict):
        return
    _set(told, "input_tokens", meta.get("prompt_tokens"), int)
    _set(told, "output_tokens", meta.get("completion_tokens"), int)
    _set(told, "cached_tokens", meta.get("cached_tokens"), int)
    _set(told, "reasoning_tokens", meta.get("reasoning_tokens"), int)
    _set(told, "retractions", meta.get("num_retractions"), int)
    _set(told, "queue_s", meta.get("queue_time"), float)
    _set(told, "server_e2e_s", meta.get("e2e_latency"), float)
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        told["finish_reason"] = str(reason.get("type"))
        if reason.get("message"):
            told["finish_message"] = str(reason["message"])[:ERROR_TEXT]
    elif isinstance(reason, str):
        told["finish_reason"] = reason
    _acceptance(meta, told)


def _from_openai(event: dict[str, Any], told: dict[str, Any]) -> None:
    usage = event.get("usage")
    if isinstance(usage, dict):
        _set(told, "input_tokens", usage.get("prompt_tokens"), int)
        _set(told, "output_tokens", usage.get("completion_tokens"), int)
        _set(told, "reasoning_tokens", usage.get("reasoning_tokens"), int)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            _set(told, "cached_tokens", details.get("cached_tokens"), int)
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if choice.get("finish_reason"):
        told["finish_reason"] = str(choice["finish_reason"])
    for place in (event, choice, choice.get("delta")):
        extension = place.get("sglext") if isinstance(place, dict) else None
        details = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
        if isinstance(details, list) and details:
            details = details[0]
        if isinstance(details, dict):
            _acceptance(details, told)


# Names by version: 0.5.21+ first, then 0.5.11 to 0.5.20, then up to 0.5.10. Steps and lengths are the same in all.
CORRECT = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def _acceptance(meta: dict[str, Any], told: dict[str, Any]) -> None:
    _set(told, "spec_verify", meta.get("spec_verify_ct"), int)
    for field, names in (("spec_correct", CORRECT), ("spec_proposed", PROPOSED)):
        _set(told, field, next((meta[name] for name in names if meta.get(name) is not None), None), int)
    counts = next((meta[name] for name in HISTOGRAM if isinstance(meta.get(name), list)), None)
    if counts and all(isinstance(count, int) for count in counts):
        told["spec_histogram"] = tuple(counts)


def _set(told: dict[str, Any], name: str, value: object, kind: type) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        told[name] = kind(value)


def error_text(body: bytes) -> str:
    """The message of an error answer of any known shape, shortened."""
    try:
        value = json.loads(body)
    except ValueError:
        return " ".join(body.decode(errors="replace").split())[:ERROR_TEXT] or "no text"
    for _ in range(3):
        if isinstance(value, dict):
            value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None)
    return str(value if value is not None else body.decode(errors="replace"))[:ERROR_TEXT]


class Answer:
    """One HTTP answer, from its status line to its last byte."""

    __slots__ = (
        "_body",
        "_chunk_left",
        "_head",
        "_line",
        "_raw",
        "_stream",
        "chunked",
        "chunks",
        "complete",
        "headers",
        "keep_alive",
        "last_ns",
        "length",
        "status",
        "unread",
    )

    def __init__(self, api: Api, keep_bytes: int = 0) -> None:
        self.chunks = Chunks(api, keep_bytes)
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunked = False
        self.length: int | None = None
        self.keep_alive = True
        self.complete = False
        self.last_ns: int | None = None
        self._head: bytes | None = b""  # until the blank line
        self._raw = b""  # of the chunked coding, not yet decoded
        self._chunk_left = 0  # bytes of the current HTTP chunk still to come, its CRLF included
        self._line = b""  # of the event stream, not yet a whole line
        self._body: list[bytes] = []  # of an answer that is no event stream
        self._stream = False
        self.unread: list[tuple[int, bytes]] = []  # reads that came and were not yet fed

    def catch_up(self) -> None:
        """Feeds what the client had laid aside. BadAnswer also if the answer is then not complete although its end was seen."""
        unread, self.unread = self.unread, []
        self.feed_all(unread)
        if unread and not self.complete:
            raise BadAnswer("the answer's end came before its parts were complete")

    def feed_all(self, reads: Sequence[tuple[int, bytes]]) -> None:
        """Feeds reads that came one after the other: as `feed` on each, and faster."""
        place = 0
        while place < len(reads):
            paced = self._stream and self.chunks.counted and self._between and not self.complete
            taken = self.chunks.take_paced(reads, place) if paced else place
            if taken > place:
                self.last_ns = reads[taken - 1][0]
                place = taken
            else:
                self.feed(*reads[place])
                place += 1

    @property
    def body(self) -> bytes:
        return b"".join(self._body)

    @property
    def stream(self) -> bool:
        """The answer is an event stream; otherwise `body` has it."""
        return self._stream

    @property
    def _between(self) -> bool:
        """Between two HTTP chunks and two events: nothing is half read."""
        return not self._chunk_left and not self._raw and not self._line and self._head is None and self.chunked

    def feed(self, ns: int, data: bytes) -> None:
        """Bytes that came at `ns`. Bytes after the answer's end are an error of the server's."""
        if self.complete:
            raise BadAnswer("bytes after the end of the answer")
        self.last_ns = ns
        if self._stream and data.endswith(EVENT_END) and self._between:
            # One read, one HTTP chunk, one event: how a paced stream arrives nearly always.
            start = start_of(len(data))
            if data.startswith(start) and data.find(b"\n", len(start)) == len(data) - 4:
                self.chunks.take(ns, event_of(data))
                return
        if self._head is not None:
            self._head += data
            while self._head is not None:
                blank = self._head.find(b"\r\n\r\n")
                if blank < 0:
                    if len(self._head) > 65536:
                        raise BadAnswer("the head of the answer is longer than 64 KiB")
                    return
                data = self._head[blank + 4 :]
                head, self._head = self._head[:blank], None
                self._parse_head(head)
                if self.status is not None and 100 <= self.status < 200:  # an interim answer: the real head follows
                    self._head, self.status = data, None
        if self.chunked:
            self._unchunk(ns, data)
        elif self.length is not None:
            self.length -= len(data)
            self._payload(ns, data)
            self.complete = self.length <= 0
        elif data:
            self._payload(ns, data)

    def end(self) -> None:
        """The connection closed: the end of an answer with neither length nor chunks, a cut for any other."""
        if self._head is None and not self.chunked and self.length is None:
            self.complete = True
        self.keep_alive = False

    def _parse_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise BadAnswer(f"no HTTP/1.1 answer: {lines[0][:80]!r}")
        self.status = int(parts[1])
        self.headers = {
            name.strip().lower(): value.strip()
            for name, colon, value in (line.partition(":") for line in lines[1:])
            if colon
        }
        self.keep_alive = parts[0] != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"
        self.chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if not self.chunked and "content-length" in self.headers:
            try:
                self.length = int(self.headers["content-length"])
            except ValueError as exc:
                raise BadAnswer(f"Content-Length {self.headers['content-length']!r} is no number") from exc
        self._stream = self.status == 200 and "text/event-stream" in self.headers.get("content-type", "")

    def _unchunk(self, ns: int, data: bytes) -> None:
        data = self._raw + data if self._raw else data
        self._raw = b""
        at = 0
        size = len(data)
        while at < size:
            if self._chunk_left > 0:
                piece = data[at : at + self._chunk_left]
                at += len(piece)
                self._chunk_left -= len(piece)
                # the last two bytes of a chunk are its CRLF
                keep = len(piece) - max(0, 2 - self._chunk_left)
                if keep > 0:
                    self._payload(ns, piece[:keep])
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                self._raw = data[at:]
                if len(self._raw) > 4096:
                    raise BadAnswer("the chunked coding is broken")
                return
            if self._chunk_left < 0:  # the trailer after the last chunk
                if line == at:
                    self.complete = True
                    if line + 2 < size:
                        raise BadAnswer("bytes after the end of the answer")
                    return
                at = line + 2
                continue
            try:
                length = int(data[at:line].split(b";", 1)[0], 16)
            except ValueError as exc:
                raise BadAnswer(f"the chunked coding is broken at {data[at : at + 20]!r}") from exc
            at = line + 2
            self._chunk_left = length + 2 if length else -1

    def _payload(self, ns: int, data: bytes) -> None:
        if not self._stream:
            self._body.append(data)
            return
        if b"\n" not in data:
            self._line += data
            return
        lines = (self._line + data).split(b"\n")
        self._line = lines.pop()
        take = self.chunks.take
        for line in lines:
            if line.startswith(b"data:"):
                take(ns, line[5:].strip())
