"""From raw text to records: ANSI codes, wrappers' prefixes, SGLang's own prefix, progress bars glued to records.

SGLang's prefix is `[YYYY-MM-DD HH:MM:SS{.mmm}{ DPi}{ PPi}{ ATTN_CPi}{ MOE_DPi}{ TPi}{ EPi}] ` (utils/common.py and
managers/scheduler.py, 0.5.23); v0.3 had the time alone, v0.2 `[gpu=0]`. No level is printed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|#033\[[0-9;]*m|\x00")

# What a supervisor or a log collector puts in front. Each takes at most one blank behind it: a traceback's indentation stays.
_WRAPPERS = tuple(
    re.compile(p)
    for p in (
        r"[A-Za-z0-9][\w.-]*\s*\| ?",  # docker compose: sglang-1  |
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d) (?:stdout|stderr) [FP] ?",  # CRI
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)[ \t]?",  # docker logs -t, kubectl --timestamps, CI
        r"\((?:[\w.:<>-]+ )?pid=\d+(?:, ip=[\d.:a-fA-F]+)?\) ?",  # Ray
        r"\[pod/[^\]\s]+\] ?",  # kubectl --prefix
        r"\[\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\] ?",  # log viewers
        r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? )?[\w.-]+ [\w./@:-]+\[\d+\]: ?",  # journald, syslog
        r"[A-Z][a-z]{2} \d{1,2}, \d{4} @ \d\d:\d\d:\d\d\.\d+\s{1,4}",  # Kibana
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+ - [\w.]+ - [A-Z]+ - ",  # Python's logging in a launcher
        r"\[1,\d+\]<std(?:out|err)>: ?",  # mpirun --tag-output
        r"\[(?:default|rank)?\d{1,4}\]: ?(?=\[\d)",  # torchrun
        r"\d{1,4}: (?=\[\d)",  # srun --label
    )
)
_STAMP = r"\[(?:(?P<date>(?:\d{4}-)?\d\d-\d\d) )?(?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)(?P<rank>(?: [A-Z][A-Z_]{0,9}\d{1,5}){0,8})\](?: |$)"
_RECORD = re.compile(_STAMP)
_OLD_RECORD = re.compile(r"\[gpu(?:_id)?=(?P<gpu>\d+)\] ")
_RANK_ONLY = re.compile(r"\[(?P<rank>[A-Z][A-Z_]{0,9}\d{1,5}(?: [A-Z][A-Z_]{0,9}\d{1,5}){0,7})\] ")
_LEVEL = re.compile(
    r"\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] "
)  # some change the format so that the level is printed
_CUT_RECORD = re.compile(r"[\d:. -]{0,22}(?P<rank>(?: ?[A-Z][A-Z_]{0,9}\d{1,5}){0,8})\] (?=\S)")
# Text that may stand before a glued record. User text is quoted or part of an assignment; a bar, dots or a host's tag are not.
_NOT_JUNK = re.compile(r"""["'`={}\\]|\btext\b|\bprompt\b|\bcontent\b""")
# Ray's own words behind a record that it shows once for many workers.
_REPEATED = re.compile(r" *\[repeated \d+x across cluster\](?: \(Ray deduplicates logs.*\))? *$")
_BAR = re.compile(r"\d+%\|.{0,300}?\|? ?\b(\d{1,9})/(\d{1,9}) \[|\b(\d{1,3})% Completed \| (\d{1,9})/(\d{1,9}) \[")


@dataclass(frozen=True, slots=True)
class Line:
    """A physical line taken apart. `stamped` is False for a line without SGLang's prefix; `before` is what was glued in front."""

    time: str | None
    rank: str | None
    body: str
    stamped: bool
    before: str


def clean(raw: bytes) -> str:
    """Text of one physical line without ANSI codes; broken UTF-8 becomes U+FFFD."""
    text = raw.decode("utf-8", "replace")
    if text.startswith('{"log":"'):
        text = _docker(text)
    return _ANSI.sub("", text) if "\x1b" in text or "#033" in text or "\x00" in text else text


def _docker(text: str) -> str:
    """The line inside a record of Docker's json-file driver; a record without a line's end goes on in the next one."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    line = found.get("log") if isinstance(found, dict) else None
    return line.rstrip("\r\n") if isinstance(line, str) else text


def unwrap(text: str) -> str:
    """Without the prefixes of up to four wrappers."""
    for _ in range(4):
        if _RECORD.match(text):
            return text
        for wrapper in _WRAPPERS:
            if m := wrapper.match(text):
                text = text[m.end() :]
                break
        else:
            return text
    return text


def take_apart(raw: bytes) -> Line:
    """Finds SGLang's prefix at the line's start, behind wrappers, or behind a glued bar; never inside a record's own text."""
    text = unwrap(clean(raw))
    if " across cluster]" in text[-160:]:
        text = _REPEATED.sub("", text)
    if m := _RECORD.match(text):
        return _stamped(m, text, "")
    if m := _OLD_RECORD.match(text):
        return Line(None, f"gpu={m['gpu']}", text[m.end() :], True, "")
    if m := _RANK_ONLY.match(text):
        return Line(None, m["rank"], text[m.end() :], True, "")
    if "] " in text and not text.startswith(" " * 2):
        m = _RECORD.search(text)
        if m and m["date"]:
            before = text[: m.start()]
            if is_bar(before) or (len(before) <= 120 and not _NOT_JUNK.search(before)):
                return _stamped(m, text, before)
    if m := _CUT_RECORD.match(text):
        return Line(None, (m["rank"] or "").strip() or None, text[m.end() :], False, "")
    return Line(None, None, text, False, "")


def _stamped(m: re.Match[str], text: str, before: str) -> Line:
    stamp = f"{m['date']} {m['time']}" if m["date"] else m["time"]
    body = text[m.end() :]
    if body.startswith("[") and (level := _LEVEL.match(body)):
        body = body[level.end() :]
    return Line(stamp, m["rank"].strip() or None, body, True, before)


def is_bar(text: str) -> bool:
    """Whether text holds a tqdm bar."""
    return "%" in text and _BAR.search(text) is not None


def bars(text: str) -> list[tuple[str, int, int]]:
    """Every bar in text as (label before it, done, total)."""
    found = []
    for m in _BAR.finditer(text):
        done, total = (m[1], m[2]) if m[1] else (m[4], m[5])
        found.append((text[max(0, m.start() - 160) : m.start()], int(done), int(total)))
    return found
