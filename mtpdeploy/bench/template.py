"""The model's chat template, for the native route, which takes text: the same text that the chat route would make.

From the model's folder where the client can read it (beside the server), rendered as transformers does. Else ChatML for the
Qwen family, whose special tokens are the same. Else none, and the chat route is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mtpdeploy.bench.values import Message


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`source` is named in the result; `render` gives the text with the opening of the assistant's turn."""

    source: str
    render: Callable[[Sequence[Message]], str]


def chatml(messages: Sequence[Message]) -> str:
    turns = "".join(f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in messages)
    return f"{turns}<|im_start|>assistant\n"


def find(server: Mapping[str, Any]) -> ChatTemplate | None:
    """The template for the server's model: its own file, else ChatML for Qwen, else None."""
    for key in ("tokenizer_path", "model_path"):
        if isinstance(server.get(key), str) and (found := from_folder(Path(server[key]))):
            return found
    if str(server.get("model_type") or "").startswith("qwen"):
        return ChatTemplate("ChatML (the model's own template file cannot be read here)", chatml)
    return None


def from_folder(folder: Path) -> ChatTemplate | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template. None where it is missing or does not render."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        config = {}
    path = folder / "chat_template.jinja"
    text = path.read_text() if path.is_file() else config.get("chat_template") if isinstance(config, dict) else None
    if not isinstance(text, str):
        return None
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = refuse
    env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    special = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }

    def render(messages: Sequence[Message]) -> str:
        turns = [{"role": one.role, "content": one.content} for one in messages]
        return str(template.render(messages=turns, add_generation_prompt=True, **special))

    try:
        template = env.from_string(text)
        render((Message("user", "hello"),))
    except (TemplateError, TypeError, ValueError):
        return None
    return ChatTemplate(f"the model's own ({path if path.is_file() else folder / 'tokenizer_config.json'})", render)
