"""Which prompts a point sends: the shipped classes, a user's file, or random words. Seeded; the files are read once.

A prompt of a given length in tokens is built by characters, because no tokenizer is needed for it; how long it was is then the
server's own count, which the result gives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpdeploy.bench.values import Message, Prompt

CLASSES = ("code", "maths", "chat", "summary", "long", "structured")
MIXED = ("code", "maths", "chat", "summary", "structured")  # `long` sets another prefill load and is asked for by name
CHARACTERS_PER_TOKEN = 4.4  # of English prose under the Qwen tokenizer; only a first guess, see above
RANDOM_WARNING = "random words: acceptance, and so every speed with speculation, says nothing about real work"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@cache
def shipped(kind: str) -> tuple[Prompt, ...]:
    """The prompts of one class, in file order."""
    if kind not in CLASSES:
        raise ValueError(f"no prompt class {kind!r}; the classes are {', '.join(CLASSES)}, and `mixed` and `random`")
    return tuple(Prompt(row["id"], kind, (Message("user", _content(row)),)) for row in _rows(kind))


def _content(row: Mapping[str, Any]) -> str:
    if "messages" in row:
        return str(row["messages"][0]["content"])
    told = _passages()
    texts = "\n\n".join(f"{told[name]['title']}\n\n{told[name]['text']}" for name in row["passages"])
    return f"{texts}\n\n---\n\n{row['question']}"


@lru_cache(maxsize=1)
def _passages() -> Mapping[str, Mapping[str, Any]]:
    return {row["id"]: row for row in _rows("passages")}


def _rows(name: str) -> list[dict[str, Any]]:
    text = (files("mtpdeploy.bench") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def from_file(path: Path) -> tuple[Prompt, ...]:
    """A user's file: JSON lines (or one JSON array) of OpenAI `messages`, ShareGPT `conversations`, or `prompt`.

    An assistant's last turn is left out: that is what the server shall write. ValueError names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    found: list[Prompt] = []
    for where, row in _items(path, text):
        messages = _messages(row)
        while messages and messages[-1].role == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError(
                f"{path}: {where}: no prompt; a line needs `messages` [{{role, content}}], `conversations` "
                "[{from, value}] or `prompt`"
            )
        kind = row.get("class") or row.get("category") or "file"
        found.append(Prompt(str(row.get("id", f"file-{len(found) + 1}")), str(kind), tuple(messages)))
    if not found:
        raise ValueError(f"{path}: no prompt in it")
    return tuple(found)


def _items(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    lines: list[tuple[str, Any]]
    try:
        if text.lstrip().startswith("["):
            lines = [(f"item {number}", item) for number, item in enumerate(json.loads(text), 1)]
        else:
            lines = []
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    lines.append((f"line {number}", json.loads(line)))
    except ValueError as exc:
        raise ValueError(f"{path}: not JSON ({exc}); it should be JSON lines") from exc
    for where, item in lines:
        if not isinstance(item, dict):
            raise ValueError(f"{path}: {where}: an object is needed, not {type(item).__name__}")
        yield where, item


def _messages(row: Mapping[str, Any]) -> list[Message]:
    found: list[Message] = []
    if isinstance(row.get("messages"), list):
        found += [
            Message(str(turn.get("role", "user")), turn["content"])
            for turn in row["messages"]
            if isinstance(turn, dict) and isinstance(turn.get("content"), str)
        ]
    elif isinstance(row.get("conversations"), list):
        for turn in row["conversations"]:
            if isinstance(turn, dict) and isinstance(turn.get("value"), str):
                found.append(Message(ROLES.get(str(turn.get("from")), "user"), turn["value"]))
                if found[-1].role == "user" and len(found) > 1 and found[0].role == "user":
                    break
        found = found[:1] if found and found[0].role == "user" else found[:2]
    elif isinstance(row.get("prompt"), str) and row["prompt"]:
        found.append(Message("user", row["prompt"]))
    return found


def choose(source: str, count: int, *, seed: int = 0, input_tokens: int | None = None) -> tuple[Prompt, ...]:
    """`count` prompts of a class, `mixed`, `random`, or a file's path, in a seeded order; repeated in turn if there are fewer.

    The order depends on seed and source only, so two runs of a comparison send the same prompts.
    """
    draw = random.Random(f"prompts {seed} {source}")
    if source == "random":
        return tuple(_random(draw, place, input_tokens or 512) for place in range(count))
    if source == "mixed":
        pools = [list(shipped(kind)) for kind in MIXED]
        for pool in pools:
            draw.shuffle(pool)
        # one of each class in turn: any stretch of a run has the same mixture
        turns = itertools.cycle([prompt for row in zip(*(pool[:8] for pool in pools), strict=True) for prompt in row])
        picked = [next(turns) for _ in range(count)]
    else:
        pool = list(shipped(source)) if source in CLASSES else list(from_file(Path(source)))
        draw.shuffle(pool)
        turns = itertools.cycle(pool)
        picked = [next(turns) for _ in range(count)]
    if input_tokens is None:
        return tuple(picked)
    return tuple(_lengthened(prompt, input_tokens, place) for place, prompt in enumerate(picked))


def warmup(count: int, *, input_tokens: int | None = None) -> tuple[Prompt, ...]:
    """Prompts of the warm-up: never one that is measured, but as long where the point's length is set."""
    texts = [
        "Name a river and say in which direction it flows.",
        "What does a carpenter use a plane for?",
        "Describe the taste of a fresh pear in one sentence.",
        "Which season do you associate with the smell of leaves?",
    ]
    made = []
    for place in range(count):
        prompt = Prompt(f"warm-up-{place}", "warm-up", (Message("user", texts[place % len(texts)]),))
        made.append(_lengthened(prompt, input_tokens, place + 3) if input_tokens else prompt)
    return tuple(made)


def _lengthened(prompt: Prompt, tokens: int, place: int) -> Prompt:
    """The prompt's question after enough shipped text to reach about `tokens`; a question alone is never cut."""
    *before, last = prompt.messages
    room = int(tokens * CHARACTERS_PER_TOKEN) - sum(len(message.content) for message in prompt.messages)
    if room <= 0:
        return prompt
    texts = [f"{row['title']}\n\n{row['text']}" for row in _passages().values()]
    texts = texts[place % len(texts) :] + texts[: place % len(texts)]
    stuff = "\n\n".join(texts)
    stuff = (stuff + "\n\n") * (room // len(stuff) + 1)
    content = f"{stuff[:room]}\n\n---\n\n{last.content}"
    return Prompt(prompt.id, prompt.kind, (*before, Message(last.role, content)))


def _random(draw: random.Random, place: int, tokens: int) -> Prompt:
    syllables = ("ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "zu", "pra", "ske", "tri", "glo")
    words = []
    length = 0
    while length < tokens * 2.6:  # such words split into short tokens
        words.append("".join(draw.choices(syllables, k=draw.randint(1, 4))))
        length += len(words[-1]) + 1
    return Prompt(f"random-{place:05d}", "random", (Message("user", " ".join(words)),))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the prompts in order, without their salts: equal for two runs that may be compared."""
    told = json.dumps([[one.id, [[m.role, m.content] for m in one.messages]] for one in prompts], ensure_ascii=False)
    return hashlib.sha256(told.encode()).hexdigest()
