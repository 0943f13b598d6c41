"""Reads `server_args=ServerArgs(a=1, …)` (≤0.5.18) and `server_args={'a': 1, …}` (≥0.5.19).

Both are Python reprs of 200 to 450 values on one line, some of them no literals (`CudaGraphConfig(…)`, `<Enum.X: 1>`). A value
cut off by the line's end is left out: half a value would be a wrong one.
"""

from __future__ import annotations

import ast
import math
import re

from mtpdeploy.sglang.masking import mask_values

_NAME = re.compile(r"\s*(?:['\"]([A-Za-z_]\w*)['\"]\s*:|([A-Za-z_]\w*)\s*=)\s*")
_HEX_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _end_of_value(text: str, start: int) -> tuple[int, bool]:
    """Where the value that begins at `start` ends (exclusive), and whether it really ended (a comma or closing bracket follows)."""
    depth, i, n = 0, start, len(text)
    while i < n:
        c = text[i]
        if c in "'\"":
            i += 1
            while i < n and text[i] != c:
                i += 2 if text[i] == "\\" else 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            if depth == 0:
                return i, True
            depth -= 1
        elif c == "," and depth == 0:
            return i, True
        i += 1
    return n, False


def balanced(text: str) -> bool:
    """Whether `text` begins with `ServerArgs(` or `{` and its bracket is closed."""
    start = text.find("(") if not text.startswith("{") else 0
    if start < 0:
        return False
    i = start + 1
    while True:
        i, ended = _end_of_value(text, i)
        if not ended:
            return False
        if text[i] != ",":
            return True
        i += 1


def value(text: str) -> object:
    """A JSON-able value of a Python repr; what is no literal stays text, without memory addresses."""
    text = text.strip()
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _HEX_ADDRESS.sub("", text)
    return _plain(found)


def _plain(found: object) -> object:
    if found is None or isinstance(found, (bool, int, str)):
        return found
    if isinstance(found, float):
        return found if math.isfinite(found) else str(found)
    if isinstance(found, dict):
        return {str(k): _plain(v) for k, v in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(v) for v in found]
    if isinstance(found, (set, frozenset)):
        return sorted((_plain(v) for v in found), key=str)
    return repr(found)


def server_args(text: str) -> dict[str, object]:
    """Name → value of the repr behind `server_args=`; secrets masked, a cut last value left out."""
    start = 1 if text.startswith("{") else text.find("(") + 1
    if start <= 0:
        return {}
    values: dict[str, object] = {}
    i = start
    while m := _NAME.match(text, i):
        end, ended = _end_of_value(text, m.end())
        if not ended:
            break
        values[m[1] or m[2]] = value(text[m.end() : end])
        if text[end] != ",":
            break
        i = end + 1
    return mask_values(values)
