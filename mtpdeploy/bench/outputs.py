"""What the answers said, from the events that the client kept: token ids where the route gives them, else text. Pure.

Only beginnings are kept, of so many answers a point, and only where they can be compared: with greedy sampling the same request
should give the same answer under any settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mtpdeploy.bench.values import Api, Message

ANSWERS = 64  # a point: each prompt's first answer, in the order of sending
EVENT_BYTES = 96 * 1024  # of an answer's events, where each holds only what is new
IDS, CHARACTERS = 1024, 4096  # of an answer, in the store


def read(api: Api, events: Sequence[bytes], *, incremental: bool) -> dict[str, Any] | None:
    """`{"token_ids": […]}` or `{"text": …}`, cut to IDS or CHARACTERS; None where the events don't say.

    events: the first ones (none for /generate without incremental streaming), then once more the answer's last one.
    incremental: every event holds only what is new, as on the OpenAI routes always.
    """
    parsed = [event for payload in (events[:-1] if incremental else events[-1:]) if (event := _event(payload))]
    if api == "sglang":
        ids = [item for event in parsed for item in _ids(event)]
        counted = _count(_event(events[-1])) if events else None
        # Releases differ in whether a stream's events carry the ids; part of them would be another answer.
        if ids and (len(ids) == counted or incremental):
            return {"token_ids": ids[:IDS]}
        text = "".join(str(event.get("text") or "") for event in parsed)
    else:
        text = "".join(map(_piece, parsed))
    return {"text": text[:CHARACTERS]} if text else None


def sent(messages: Sequence[Message], output_tokens: int) -> str:
    """A digest of a request, salt and cap included: only answers to the same request can be compared."""
    told = json.dumps([output_tokens, *([one.role, one.content] for one in messages)], ensure_ascii=False)
    return hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:16]


def _event(payload: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(payload)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ids(event: dict[str, Any]) -> list[int]:
    ids = event.get("output_ids")
    return ids if isinstance(ids, list) and all(type(item) is int for item in ids) else []


def _count(event: dict[str, Any] | None) -> int | None:
    meta = event.get("meta_info") if event else None
    count = meta.get("completion_tokens") if isinstance(meta, dict) else None
    return count if isinstance(count, int) else None


def _piece(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = choice.get("delta")
    part = delta if isinstance(delta, dict) else choice
    said = [part.get(name) for name in ("reasoning_content", "reasoning", "content", "text")]
    return "".join(piece for piece in said if isinstance(piece, str))
