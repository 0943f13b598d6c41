"""How long a step takes and how many drafts are accepted. Pure; seconds and tokens.

Step times are fitted to one decode step of a 27B hybrid in bf16 on an H200 (SGLang 0.5.17, dummy weights):
no MTP 14.4 / 15.2 / 15.9 / 16.7 ms at 1/4/8/16 requests, with 4 draft tokens 19.7 / 21.0 / 24.2 / 29.7. How far off they are
up to 64 requests stands in docs/simulator.md.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """draft_tokens: D, 0 without speculation. wide_state: float32 state that every step writes, which costs more bandwidth than
    16 bit or replayed drafts."""

    draft_tokens: int
    wide_state: bool = True

    def decode_s(self, batch: int, context_tokens: int = 0) -> float:
        """One decode (or verify) step of `batch` requests that hold `context_tokens` tokens in all."""
        context = context_tokens * 1.2e-8
        if not self.draft_tokens:
            return (14.4 + 0.4 * math.log2(batch) + 0.044 * (batch - 1)) / 1e3 + context
        first = 14.9 + 1.2 * self.draft_tokens
        slope = 0.165 * self.draft_tokens * (1.0 if self.wide_state else 0.85)
        return (first + slope * (batch - 1)) / 1e3 + context

    def prefill_s(self, tokens: int) -> float:
        """One prefill batch."""
        return 0.045 + tokens / 11_400


def per_position(accept_length: float, drafts: int) -> float:
    """The probability p of each draft, given that those before it were accepted, with 1 + p + p² + … = accept_length.

    `accept_length` is meant at 3 drafts (4 draft tokens); fewer or more drafts keep p.
    """
    if drafts <= 0 or accept_length <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        if 1 + p + p * p + p**3 < accept_length:
            low = p
        else:
            high = p
    return low


class Acceptance:
    """Draws how many tokens one request emits in one verify step: 1 (the bonus token) to steps + 1."""

    def __init__(self, steps: int, accept_length: float, forced: float | None = None, seed: int = 0) -> None:
        self._steps, self._forced = steps, forced
        self._p = per_position(accept_length, steps)
        self._random = random.Random(seed)

    def for_batch(self) -> int | None:
        """With SGLANG_SIMULATE_ACC_LEN one draw serves the whole batch (match-expected); None: each request draws."""
        if self._forced is None or not self._steps:
            return None
        wanted = min(max(self._forced, 1.0), self._steps + 1.0)
        below = math.floor(wanted)
        return below + (self._random.random() < wanted - below)

    def tokens(self, ease: float) -> int:
        """`ease` moves this prompt's probability: code is easier to draft than prose."""
        p = min(max(self._p + ease, 0.0), 0.98) if self._p else 0.0
        accepted = 0
        while accepted < self._steps and self._random.random() < p:
            accepted += 1
        return accepted + 1


@dataclass(frozen=True, slots=True)
class Text:
    """What the simulated model says to a prompt: the same at every start and with or without drafts."""

    seed: int
    natural_tokens: int
    ease: float

    @classmethod
    def of(cls, prompt: str, temperature: float, salt: int) -> Text:
        """temperature 0: a function of the prompt alone. The first 64 characters are left out: they may be a salt."""
        body = prompt[64:] or prompt
        digest = hashlib.sha256(
            body.encode(errors="replace") + (b"" if temperature == 0 else salt.to_bytes(8, "big"))
        ).digest()
        return cls(
            int.from_bytes(digest[:8], "big"),
            64 + int.from_bytes(digest[8:10], "big") % 700,
            (digest[10] / 255 - 0.5) * 0.14,
        )

    def token_id(self, position: int) -> int:
        return (self.seed ^ (position * 0x9E3779B97F4A7C15)) % 248_000

    def token(self, position: int) -> str:
        return f" w{self.token_id(position) % 9973}"
