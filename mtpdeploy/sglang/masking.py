"""Takes secrets out of text that SGLang, a shell or a supervisor printed.

SGLang prints `api_key` and `admin_api_key` in clear in its server_args line, in `launch_command` and in /server_info
(0.5.6 to 0.5.23); argv and environment dumps carry tokens as well. What is masked here never reaches a summary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mtpdeploy.secret import MASK

_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:api[_-]?key|admin[_-]?api[_-]?key|password|passwd|passphrase|secret|access[_-]?key|access[_-]?token|"
    r"auth[_-]?token|hf[_-]?token|hub[_-]?token|bearer|authorization|credentials?|private[_-]?key)(?:$|[_-](?:id|value)?$)",
    re.IGNORECASE,
)
_TOKEN_ENV = re.compile(r"^[A-Z0-9_]*(?:_TOKEN|_KEY|_SECRET|_PASSWORD)$")

# What a secret's name ends with; whatever stands in front of it stays. No pattern scans a word from each of its letters.
_NAMES = (
    r"api[_-]?key|password|passphrase|secret(?:[_-](?:access[_-])?key)?|access[_-](?:key|token)(?:[_-]id)?|auth[_-]token|"
    r"hf[_-]token|face[_-]?hub[_-]?token|watermark[_-]key"
)
# Each pattern keeps what stands before the secret in group 1. None backtracks over more than one line.
_PATTERNS = (
    # api_key='…'  "api_key": "…"   (Python reprs, dicts, JSON), then the same escaped inside another string
    re.compile(rf"""((?:{_NAMES})["']?\s*[=:]\s*)(["'])(?:\\.|(?!\2)[^\\\n])*\2""", re.I),
    re.compile(rf"""((?:{_NAMES})\\["']\s*[=:]\s*)\\(["'])[^"'\\\n]*\\\2""", re.I),
    # --api-key VALUE   --api-key=VALUE
    re.compile(rf"""(--[\w-]{{0,40}}?(?:{_NAMES})(?:[ =]|["'],\s*["']))["']?[^\s"',\])}}]+["']?""", re.I),
    # NAME_TOKEN=VALUE in an environment or a shell line
    re.compile(
        r"""(\b[A-Z][A-Z0-9_]{0,60}(?:_TOKEN|_API_KEY|_SECRET|_PASSWORD|_SECRET_KEY|_ACCESS_KEY)\s*=\s*)["']?[^\s"',)]+["']?"""
    ),
    # api_key=VALUE without quotes (not None, not a call)
    re.compile(rf"""((?:{_NAMES})\s*=\s*)(?!None\b|\*\*\*|["'\\])[^\s"',)\]}}]+""", re.I),
    re.compile(
        r"((?:Authorization|X-API-Key)[\"']?\s*[:=]\s*[\"']?(?:(?:Bearer|Basic|Token)\s+)?)(?!Bearer|Basic|Token)[^\s\"',}]+",
        re.I,
    ),
    re.compile(r"(\bBearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.I),
    re.compile(r"(://[^/\s:@'\"]{1,64}:)[^/\s@'\"]{1,256}(?=@)"),
    re.compile(
        r"()\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,}|nvapi-[A-Za-z0-9_-]{8,})"
    ),
)
# One cheap look decides whether the patterns need to run at all.
_MAY_HOLD = re.compile(r"key|token|secret|passw|passphrase|bearer|authoriz|://|hf_|sk-|gh[pousr]_|AKIA", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether an argument or environment variable of that name holds a secret; `max_total_tokens` does not."""
    return bool(_SECRET_NAME.search(name) or _TOKEN_ENV.match(name))


def mask(text: str) -> str:
    """`text` with every secret that can be recognised replaced by `***`. Idempotent."""
    if not _MAY_HOLD.search(text):
        return text
    for pattern in _PATTERNS:
        text = pattern.sub(lambda m: m.group(1) + MASK, text)
    return text


def mask_values(values: Mapping[str, object]) -> dict[str, object]:
    """A copy of `values` (nested mappings and lists too) with secrets by name, and secrets inside strings, masked."""
    return {name: _mask_value(name, value) for name, value in values.items()}


def _mask_value(name: str, value: object) -> object:
    if value is not None and value != "" and is_secret(name) and not isinstance(value, bool):
        return MASK
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return mask_values(value)
    if isinstance(value, (list, tuple)):
        return _mask_list(value)
    return value


def _mask_list(values: list[object] | tuple[object, ...]) -> list[object]:
    """An argv list hides the value that follows a secret option."""
    out: list[object] = []
    previous = ""
    for value in values:
        hidden = previous.startswith("--") and "=" not in previous and is_secret(previous.lstrip("-"))
        out.append(MASK if hidden and isinstance(value, str) else _mask_value("", value))
        previous = value if isinstance(value, str) else ""
    return out
