"""Which prompts a point sends: the shipped classes, a user's file, or random words. Seeded; the files are read once.

A prompt of a given length in tokens is built by characters, because no tokenizer is needed for it; how long it was is then the
server's own count, which the result gives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections import Counter
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
MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
HALF = re.compile("[\ud800-\udfff]")
SHAPES = "a line needs `messages` [{role, content}], `conversations` [{from, value}] or `prompt`"


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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path}: not UTF-8 text (byte {exc.start}); it should be JSON lines") from exc
    except OSError as exc:
        raise ValueError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    found: list[Prompt] = []
    names: Counter[str] = Counter()
    for where, row in _items(path, text):
        try:
            messages = _messages(row)
        except ValueError as exc:
            raise ValueError(f"{path}: {where}: {exc}") from exc
        kind = row.get("class") or row.get("category") or "file"
        name = str(row.get("id") or f"file-{len(found) + 1}")
        names[name] += 1
        if names[name] > 1:  # comparisons pair requests by this name
            name = f"{name}#{names[name]}"
        found.append(Prompt(name, str(kind), messages))
    if not found:
        raise ValueError(f"{path}: no prompt in it; {SHAPES}")
    return tuple(found)


def _items(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if text.lstrip().startswith("["):
        try:
            lines = [(f"item {number}", item) for number, item in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as exc:
            raise ValueError(f"{path}: not JSON ({exc}); it should be JSON lines, or one JSON array") from exc
    else:
        lines = []
        # not splitlines(): U+2028 and the like may stand inside a JSON string
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    lines.append((f"line {number}", json.loads(line)))
                except (ValueError, RecursionError) as exc:
                    raise ValueError(f"{path}: line {number}: not JSON ({exc}); it should be JSON lines") from exc
    for where, item in lines:
        if not isinstance(item, dict):
            raise ValueError(f"{path}: {where}: an object is needed, not {type(item).__name__}; {SHAPES}")
        yield where, item


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns to send. ValueError says what is wrong with the row."""
    found: list[Message] = []
    if isinstance(row.get("messages"), list):
        for turn in row["messages"]:
            role = turn.get("role", "user") if isinstance(turn, dict) else None
            if role not in MESSAGE_ROLES:
                raise ValueError(f"messages: role {role!r}: should be one of {', '.join(MESSAGE_ROLES)}")
            found.append(Message(str(role), _text_of(turn.get("content"))))
    elif isinstance(row.get("conversations"), list):
        for turn in row["conversations"]:
            if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
                raise ValueError("conversations: each turn should be {from, value} with text as value")
            if str(turn.get("from")) not in ROLES:
                raise ValueError(f"conversations: from {turn.get('from')!r}: should be one of {', '.join(ROLES)}")
            found.append(Message(ROLES[str(turn["from"])], turn["value"]))
        # the first question with what leads to it: the rest was written by another model
        first = next((place for place, one in enumerate(found) if one.role == "user"), None)
        found = found[: first + 1] if first is not None else []
    elif isinstance(row.get("prompt"), str):
        found.append(Message("user", row["prompt"]))
    else:
        raise ValueError(f"no prompt; {SHAPES}")
    while found and found[-1].role == "assistant":
        found.pop()
    if not any(one.content.strip() for one in found):
        raise ValueError("no prompt: no turn of a user with text in it")
    half = next((at for one in found if (at := HALF.search(one.content))), None)
    if half:
        raise ValueError(f"half a character ({half[0]!a}) in {half.string[:30]!a}: it cannot be sent as UTF-8")
    return tuple(found)


def _text_of(content: object) -> str:
    """OpenAI's content: text, or parts of type text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "messages: content should be text, or a list of parts {type: text, text}; only text is measured"
        )
    return "\n".join(str(text) for text in texts)


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
