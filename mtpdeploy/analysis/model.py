"""A model of the decode step, fitted to few runs, that predicts settings not yet run, with error bars.

    step time = c0·W + c1·s·H + c2·[s > 0] + c3·b·2S + c4·b·d·S + c5·b·d + c6·b·k·C

    W weights, H draft layer and head, S recurrent state of a request, C KV cache of a token (all in GiB: what a step moves);
    b running requests, s draft steps, d = s + 1 tokens verified per request (1 without MTP), k context in tokens.

With one speed for all bytes this is the roofline of a memory-bound step; that is the prior. The coefficients are then
fitted by non-negative least squares on relative errors, drawn towards the prior scaled to this machine, so that a single
run already predicts, and many runs leave little of the prior. tok/s of a request = accept length / step time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from mtpdeploy.analysis.samples import Measured

Array = NDArray[np.float64]

Z95 = 1.96  # half a 95 % interval, in standard deviations
NOISE = 0.02  # spread of a repeated measurement: four starts of one setting on an H200
TTFT_NOISE = 0.1  # of a time to first token: which prompts meet in one prefill is luck
PRIOR_SPREAD = 1.5  # of each coefficient around its prior: the roofline knows neither kernels nor launch gaps
# What speculation costs a step whatever the number of drafts (verification's own kernels and gaps), as if it were bytes.
# On an H200 two, three and four verified tokens took 3.4, 4.7 and 5.3 ms more than one: 2.5 ms and 1 ms a draft.
SPECULATION_GB = 8.0
COMPUTE_GB = (
    0.3  # what one verified token costs in arithmetic, as if it were bytes moved (27B on Hopper: 2·27e9 / 0.8e15 s)
)


ASSUMED_ACCEPTANCE = 0.5  # deviation of the tokens that draft positions nobody measured are said to add
KINDS = ("weights", "draft layers", "speculation", "state", "verified states", "arithmetic", "KV cache")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model on one GPU, GiB: from the memory budget, else the defaults of Qwen3.6-27B in bf16."""

    weights_gb: float = 51.1
    draft_step_gb: float = 3.3  # one MTP layer and the head, read once a draft step
    state_gb: float = 0.1434  # recurrent state of one request at 4 bytes an element
    kv_gb_per_token: float = 6.5e-5

    @classmethod
    def from_memory(cls, memory: Mapping[str, object]) -> Shape:
        """From the budget's `memory`; what it lacks keeps its default."""
        usual = cls()

        def known(key: str, scale: float, default: float) -> float:
            value = memory.get(key)
            return float(value) * scale if isinstance(value, (int, float)) and value > 0 else default

        return cls(
            weights_gb=known("weights_gb", 1.0, usual.weights_gb),
            draft_step_gb=known("draft_weights_gb", 0.6, usual.draft_step_gb),  # its embedding is hardly read
            state_gb=known("state_bytes_per_slot", 2.0**-30, usual.state_gb),
            kv_gb_per_token=known("kv_bytes_per_token", 2.0**-30, usual.kv_gb_per_token),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What of a configuration the step time depends on. draft_tokens: verified per request and step; 1 is no MTP.

    running: requests that the server runs at once, None for unlimited. state_bytes: width of the recurrent state.
    kv_width: bytes of a cached token as a share of the shape's (0.5 for a KV cache of 8 bits under a model of 16).
    """

    draft_tokens: int = 1
    state_bytes: int = 4
    running: int | None = None
    kv_width: float = 1.0

    @property
    def draft_steps(self) -> int:
        return self.draft_tokens - 1


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured load of one setting. `name` tells settings apart (repeats of one share it)."""

    name: str
    setting: Setting
    concurrency: int
    input_tokens: float
    output_tokens: float
    tpot_ms: float
    ttft_ms: float | None = None
    output_tok_s: float | None = None
    accept_length: float | None = None

    @property
    def running(self) -> int:
        return min(self.concurrency, self.setting.running or self.concurrency)

    @property
    def step_ms(self) -> float:
        return self.tpot_ms * (self.accept_length or 1.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, deviation: float) -> Estimate:
        """deviation: of its logarithm."""
        factor = math.exp(Z95 * min(deviation, 50.0))
        return cls(value, value / factor, value * factor)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def as_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a closed loop would show, with 95 % intervals from the fit, the acceptance and the noise.

    running: requests that are served at once; what is above it waits, which ttft_ms and e2e_ms hold.
    extrapolated: what lies outside of what was measured, in words.
    """

    concurrency: int
    running: int
    accept_length: float
    step_ms: Estimate
    tpot_ms: Estimate
    ttft_ms: Estimate | None
    e2e_ms: Estimate
    output_tok_s: Estimate
    extrapolated: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "concurrency": self.concurrency,
            "running": self.running,
            "accept_length": self.accept_length,
            "step_ms": self.step_ms.as_json(),
            "tpot_ms": self.tpot_ms.as_json(),
            "ttft_ms": self.ttft_ms.as_json() if self.ttft_ms else None,
            "e2e_ms": self.e2e_ms.as_json(),
            "output_tok_s": self.output_tok_s.as_json(),
            "extrapolated": list(self.extrapolated),
        }


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """Relative errors of settings that the fit had not seen, one setting left out at a time.

    errors: figure → an error a point. covered: share of points whose output tok/s fell inside its 95 % interval.
    """

    errors: Mapping[str, tuple[float, ...]]
    by_setting: Mapping[str, float]
    covered: float | None

    def as_json(self) -> dict[str, object]:
        told: dict[str, object] = {"settings": len(self.by_setting), "points": len(self.errors["step"])}
        for name, values in self.errors.items():
            told |= {f"{name}_median_error": _median(values), f"{name}_p90_error": _p90(values)}
        return {**told, "output_tok_s_within_interval": self.covered, "by_setting": dict(self.by_setting)}


@dataclass(frozen=True, slots=True)
class Coefficient:
    """What a kind of work costs. speed_gb_s: GiB that it moves a second, None where the fit gives it no time at all."""

    name: str
    ms_per_gb: float
    deviation: float

    def as_json(self) -> dict[str, object]:
        speed = 1e3 / self.ms_per_gb if self.ms_per_gb > 0 else None
        return {"name": self.name, "ms_per_gb": self.ms_per_gb, "deviation": self.deviation, "speed_gb_s": speed}


class Acceptance:
    """Expected tokens a verify step for any number of draft steps, from what was seen with some number of them."""

    def __init__(self, by_position: Sequence[float]) -> None:
        """by_position[i]: share of verify steps in which draft i + 1 was accepted; falls with i."""
        self.by_position = tuple(by_position)

    @classmethod
    def from_length(cls, length: float, draft_steps: int) -> Acceptance:
        """From the mean alone: the same conditional chance p at every position, 1 + p + … + p^s = length."""
        length = min(max(length, 1.0), draft_steps + 1.0)
        if draft_steps < 1 or length <= 1.0:
            return cls([0.0] * max(draft_steps, 1))
        if length >= draft_steps + 1.0:
            return cls([1.0] * draft_steps)
        chance = float(optimize.brentq(lambda p: sum(p**i for i in range(draft_steps + 1)) - length, 0.0, 1.0))
        return cls([chance**i for i in range(1, draft_steps + 1)])

    def length(self, draft_steps: int) -> float:
        """Beyond the positions seen, each further draft is accepted as the last was, given the one before it."""
        known = list(self.by_position[:draft_steps])
        if draft_steps > len(known) and self.by_position:
            last = self.by_position[-1]
            before = self.by_position[-2] if len(self.by_position) > 1 else 1.0
            chance = min(1.0, last / before) if before > 0 else 0.0
            while len(known) < draft_steps:
                last *= chance
                known.append(last)
        return 1.0 + sum(known)

    def doubt(self, draft_steps: int) -> float:
        """Relative deviation of `length`: none within the positions seen, half of what was assumed beyond them."""
        length = self.length(draft_steps)
        return ASSUMED_ACCEPTANCE * max(0.0, length - self.length(min(draft_steps, self.seen_steps))) / length

    @property
    def seen_steps(self) -> int:
        return len(self.by_position)


class StepModel:
    """The fitted model. Made by `fit`; `predict` needs nothing else."""

    def __init__(
        self, shape: Shape, theta: Array, covariance: Array, spread: float, ttft: tuple[float, float, float] | None,
        acceptance: Acceptance | None, seen: Sequence[Observation],
    ) -> None:  # fmt: skip
        self.shape = shape
        self.theta = theta
        self.covariance = covariance
        self.spread = spread
        self.ttft = ttft
        self.acceptance = acceptance
        self.seen = tuple(seen)
        self.waves = 0.0
        self.waves = self._waves()

    def _waves(self) -> float:
        """Relative spread of measured output tok/s around the prediction from each one's own acceptance.

        A prompt's prefill holds up the answers that run, and the last wave is not full: neither is in the step time.
        """
        ratios = [
            math.log(one.output_tok_s / said.output_tok_s.value)
            for one in self.seen
            if one.output_tok_s and one.output_tokens > 0
            for said in [
                self.predict(
                    one.setting, one.concurrency, input_tokens=one.input_tokens, output_tokens=one.output_tokens,
                    accept_length=one.accept_length,
                )
            ]
            if said.output_tok_s.value > 0
        ]  # fmt: skip
        return math.sqrt(statistics.fmean(ratio**2 for ratio in ratios)) if ratios else 0.0

    def step_ms(self, setting: Setting, running: int, context: float) -> tuple[float, float]:
        """Milliseconds and their standard deviation."""
        row = _features(self.shape, setting, running, context)
        value = float(row @ self.theta)
        variance = float(row @ self.covariance @ row) + (self.spread * value) ** 2
        return value, math.sqrt(max(variance, 0.0))

    def doubt(self, setting: Setting, running: int, context: float) -> float:
        """Relative deviation of the time a token from the coefficients and the acceptance: what a measurement would remove."""
        row = _features(self.shape, setting, running, context)
        step = math.sqrt(max(float(row @ self.covariance @ row), 0.0)) / float(row @ self.theta)
        accepted = self.acceptance.doubt(setting.draft_steps) if self.acceptance and setting.draft_steps else 0.0
        return math.hypot(step, accepted)

    def doubt_between(self, one: Setting, other: Setting, load: int, context: float) -> float:
        """Relative deviation of the ratio of the two settings' times a token at that load."""
        shares = []
        for setting in (one, other):
            row = _features(self.shape, setting, min(load, setting.running or load), context)
            shares.append(row / float(row @ self.theta))
        apart = shares[0] - shares[1]
        steps = {setting.draft_steps for setting in (one, other)}
        accepted = max(self.acceptance.doubt(n) for n in steps) if self.acceptance and len(steps) > 1 else 0.0
        return math.hypot(math.sqrt(max(float(apart @ self.covariance @ apart), 0.0)), accepted)

    def coefficients(self) -> tuple[Coefficient, ...]:
        deviations = np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return tuple(
            Coefficient(name, float(value), float(deviation))
            for name, value, deviation in zip(KINDS, self.theta, deviations, strict=True)
        )

    def predict(
        self, setting: Setting, concurrency: int, *, input_tokens: float, output_tokens: float,
        accept_length: float | None = None,
    ) -> Prediction:  # fmt: skip
        """What a closed loop of `concurrency` would show. accept_length: where it is known better than by the fit."""
        running = min(concurrency, setting.running or concurrency)
        step, deviation = self.step_ms(setting, running, input_tokens + output_tokens / 2)
        spread = deviation / step if step > 0 else math.inf
        length, accepted = accept_length, 0.0
        if length is None:
            length = self.acceptance.length(setting.draft_steps) if setting.draft_steps and self.acceptance else 1.0
            accepted = self.acceptance.doubt(setting.draft_steps) if setting.draft_steps and self.acceptance else 0.0
        tpot, each = step / length, math.hypot(spread, accepted)
        first, first_spread = 0.0, 0.0
        if self.ttft is not None:
            first, first_spread = self.ttft[0] + self.ttft[1] * running * input_tokens, self.ttft[2]
        decode = max(output_tokens - 1, 1) * tpot
        alone = first + decode
        whole = math.hypot(decode / alone * each, first / alone * first_spread, self.waves)
        # Little's law: what is above the requests that run waits for its turn.
        e2e = alone * concurrency / running
        waiting = e2e - decode
        queued = math.hypot(first_spread * first, whole * (e2e - alone)) / waiting if waiting > 0 else 0.0
        return Prediction(
            concurrency=concurrency,
            running=running,
            accept_length=length,
            step_ms=Estimate.around(step, spread),
            tpot_ms=Estimate.around(tpot, each),
            ttft_ms=None if self.ttft is None else Estimate.around(waiting, queued),
            e2e_ms=Estimate.around(e2e, whole),
            output_tok_s=Estimate.around(running * output_tokens / alone * 1e3, whole),
            extrapolated=self._beyond(setting, running, accept_length),
        )

    def _beyond(self, setting: Setting, running: int, accept_length: float | None) -> tuple[str, ...]:
        found = []
        if setting.draft_steps and accept_length is None:
            if self.acceptance is None:
                found.append("no acceptance was measured: taken as 1")
            elif setting.draft_steps > self.acceptance.seen_steps:
                found.append(f"acceptance beyond {self.acceptance.seen_steps} draft steps was not measured")
        most = max(one.running for one in self.seen)
        if running > most:
            found.append(f"more than {most} running requests were not measured")
        return tuple(found)


def fit(
    observations: Sequence[Observation], *, shape: Shape | None = None, acceptance: Acceptance | None = None
) -> StepModel:
    """From one observation or more; ValueError without any. acceptance: per position, where a run measured it."""
    seen = [one for one in observations if one.tpot_ms > 0]
    if not seen:
        raise ValueError("nothing was measured that a model could be fitted to")
    shape = shape or Shape()
    rows = np.array([_features(shape, one.setting, one.running, _context(one)) for one in seen])
    times = np.array([one.step_ms for one in seen])
    prior = np.ones(rows.shape[1])  # all features are GiB moved: one speed for all of them
    scale = float(np.exp(np.mean(np.log(times / (rows @ prior)))))
    start = prior * scale
    weighted = rows / times[:, None]
    pull = np.diag(NOISE / (PRIOR_SPREAD * start))
    theta, _ = optimize.nnls(np.vstack([weighted, pull]), np.concatenate([np.ones(len(seen)), pull @ start]))
    residuals = weighted @ theta - 1
    spread = max(NOISE, float(np.sqrt(np.mean(residuals**2))))
    precision = weighted.T @ weighted / spread**2 + np.diag(1 / (PRIOR_SPREAD * start) ** 2)
    return StepModel(shape, theta, np.linalg.inv(precision), spread, _ttft(seen), acceptance or _acceptance(seen), seen)


def leave_one_out(observations: Sequence[Observation], *, shape: Shape | None = None) -> CrossValidation | None:
    """None with fewer than three settings: two leave nothing to learn from."""
    names = list(dict.fromkeys(one.name for one in observations))
    if len(names) < 3:
        return None
    errors: dict[str, list[float]] = {"step": [], "tpot": [], "ttft": [], "output_tok_s": []}
    by_setting: dict[str, float] = {}
    inside: list[bool] = []
    for name in names:
        model = fit([one for one in observations if one.name != name], shape=shape)
        own: list[float] = []
        for one in observations:
            if one.name != name:
                continue
            said = model.predict(
                one.setting, one.concurrency, input_tokens=one.input_tokens, output_tokens=one.output_tokens
            )
            errors["step"].append(abs(said.step_ms.value / one.step_ms - 1))
            errors["tpot"].append(abs(said.tpot_ms.value / one.tpot_ms - 1))
            if one.ttft_ms and said.ttft_ms:
                errors["ttft"].append(abs(said.ttft_ms.value / one.ttft_ms - 1))
            if one.output_tok_s:
                own.append(abs(said.output_tok_s.value / one.output_tok_s - 1))
                inside.append(one.output_tok_s in said.output_tok_s)
        errors["output_tok_s"] += own
        if own:
            by_setting[name] = statistics.median(own)
    covered = sum(inside) / len(inside) if inside else None
    return CrossValidation({name: tuple(values) for name, values in errors.items()}, by_setting, covered)


def observations(measurements: Sequence[Measured]) -> tuple[Observation, ...]:
    """Every valid closed-loop pass that has a TPOT. Acceptance per position stays with `positions`."""
    found = []
    for run in measurements:
        setting = setting_of(run)
        for one in run.passes:
            tpot = one.number("tpot_ms", "p50")
            done, sent = one.number("completed"), one.number("output_tokens")
            given = one.number("input_tokens")
            if not one.counts_for_speed or one.load.concurrency is None or not tpot or not done or not sent:
                continue
            found.append(
                Observation(
                    name=run.label,
                    setting=setting,
                    concurrency=one.load.concurrency,
                    input_tokens=(given or 0.0) / done,
                    output_tokens=sent / done,
                    tpot_ms=tpot,
                    ttft_ms=one.number("ttft_ms", "p50"),
                    output_tok_s=one.number("output_tok_s"),
                    accept_length=one.number("accept_length") if setting.draft_steps else None,
                )
            )
    return tuple(found)


def setting_of(run: Measured) -> Setting:
    """From the recorded arguments, and the running requests that the server allowed."""
    args = run.provenance.args
    steps, tokens = args.get("speculative_num_steps"), args.get("speculative_num_draft_tokens")
    drafts = 1
    if args.get("speculative_algorithm") or isinstance(steps, int):
        drafts = tokens if isinstance(tokens, int) and tokens > 0 else (steps + 1 if isinstance(steps, int) else 4)
    width = 2 if args.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4
    narrow = str(args.get("kv_cache_dtype") or "").startswith(("fp8", "mxfp8"))
    running = run.provenance.capacity.get("max_running_requests", run.memory.get("max_running_requests"))
    return Setting(drafts, width, running if isinstance(running, int) and running > 0 else None, 0.5 if narrow else 1.0)


def positions(measurements: Sequence[Measured]) -> Acceptance | None:
    """The longest acceptance per position that any run measured."""
    found: list[float] = []
    for run in measurements:
        for one in run.passes:
            held = one.figures.get("acceptance_by_position")
            if isinstance(held, (list, tuple)) and len(held) > len(found):
                values = [float(value) for value in held if isinstance(value, (int, float)) and 0 <= value <= 1]
                if len(values) == len(held):
                    found = values
    return Acceptance(found) if found else None


def _features(shape: Shape, setting: Setting, running: int, context: float) -> Array:
    """GiB that a step moves, by kind; arithmetic counted as if it were bytes."""
    tokens, state = setting.draft_tokens, shape.state_gb * setting.state_bytes / 4
    verified = running * tokens * state if setting.draft_steps else 0.0
    return np.array(
        [
            shape.weights_gb,
            setting.draft_steps * shape.draft_step_gb,
            SPECULATION_GB if setting.draft_steps else 0.0,
            2 * running * state,
            verified,
            running * tokens * COMPUTE_GB,
            running * context * shape.kv_gb_per_token * setting.kv_width,
        ]
    )


def _context(one: Observation) -> float:
    return one.input_tokens + one.output_tokens / 2


def _ttft(seen: Sequence[Observation]) -> tuple[float, float, float] | None:
    """(constant, per token of all prompts that arrive together, relative spread), ms; only loads without a queue."""
    told = [
        (one.running * one.input_tokens, one.ttft_ms) for one in seen if one.ttft_ms and one.concurrency == one.running
    ]
    if not told or any(time <= 0 for _, time in told):
        return None
    tokens, times = np.array([one for one, _ in told]), np.array([one for _, one in told])
    rows = np.column_stack([np.ones(len(told)), tokens]) / times[:, None]
    solved, _ = optimize.nnls(rows, np.ones(len(told)))
    spread = max(TTFT_NOISE, float(np.sqrt(np.mean((rows @ solved - 1) ** 2))))
    return float(solved[0]), float(solved[1]), spread


def _acceptance(seen: Sequence[Observation]) -> Acceptance | None:
    lengths: dict[int, list[float]] = {}
    for one in seen:
        if one.setting.draft_steps and one.accept_length:
            lengths.setdefault(one.setting.draft_steps, []).append(one.accept_length)
    if not lengths:
        return None
    most = max(lengths)
    return Acceptance.from_length(statistics.fmean(lengths[most]), most)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _p90(values: Sequence[float]) -> float | None:
    return float(np.quantile(values, 0.9)) if values else None
