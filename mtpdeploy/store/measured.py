"""Reads a benchmark run's folder into the values that the analysis works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.analysis.samples import Load, Measured, Pass, Sample
from mtpdeploy.errors import ConfigError, UsageError
from mtpdeploy.store.launches import document
from mtpdeploy.store.store import Run


def measured(run: Run, arm: str | None = None) -> Measured:
    """points.json with the requests of records.jsonl behind it; of one arm, where the run measured several interleaved.

    A run without points, of several arms with none named, or without the named arm is refused with what it does hold.
    Damaged lines of records.jsonl are passed over: the figures stand in points.json anyhow.
    """
    points = _points(run)
    arms = arms_of(run)
    if arm is not None and arm not in arms:
        raise UsageError(f"run {run.id} has no arm {arm!r}; it has {', '.join(arms) or 'only one, without a name'}")
    if arm is None and len(arms) > 1:
        choices = " or ".join(f"{run.id}:{name}" for name in arms)
        raise UsageError(f"run {run.id} measured {len(arms)} arms: say which, as {choices}")
    samples = _samples(run)
    passes = []
    for number, point in enumerate(points):
        if arm is not None and point.get("arm") != arm:
            continue
        index = point.get("index", number)
        passes.append(
            Pass(
                load=_load(point),
                figures=point,
                samples=tuple(samples.get(index, ())) if isinstance(index, int) else (),
                valid=point.get("valid") is not False,
                invalid_because=tuple(str(reason) for reason in _list(point.get("invalid_because"))),
            )
        )
    plan = run.read_json("plan.json")
    memory = plan.get("memory") if isinstance(plan, Mapping) else None
    return Measured(
        run_id=run.id if arm is None or len(arms) < 2 else f"{run.id}:{arm}",
        created_utc=run.created_utc,
        provenance=_provenance(run, arm),
        passes=tuple(passes),
        memory=memory if isinstance(memory, Mapping) else {},
    )


def arms_of(run: Run) -> tuple[str, ...]:
    """The names of the arms in the order in which they were first measured; () for a run without named arms."""
    return tuple(dict.fromkeys(str(point["arm"]) for point in _points(run) if point.get("arm") is not None))


def _points(run: Run) -> list[Mapping[str, Any]]:
    held = run.read_json("points.json")
    if isinstance(held, Mapping):
        held = held.get("points")
    if not isinstance(held, list):
        raise UsageError(
            f"run {run.id} ({run.kind}, {run.status}) has no points to read: it measured nothing, or was cut off",
            next_commands=["mtpdeploy runs --kind bench", f"mtpdeploy runs show {run.id}"],
        )
    if not all(isinstance(point, Mapping) for point in held):
        raise ConfigError(f"{run.file('points.json')}: points: should be a list of objects")
    return held


def _provenance(run: Run, arm: str | None) -> Provenance:
    own = run.provenance.as_json()
    arms = run.meta.get("arms")
    of_arm = arms.get(arm) if isinstance(arms, Mapping) and arm is not None else None
    if isinstance(of_arm, Mapping):
        own |= {key: value for key, value in of_arm.items() if value is not None}
    if arm is not None:
        named = of_arm.get("profile") if isinstance(of_arm, Mapping) else None
        own |= {"arm": arm, "session": own.get("session") or run.id, "profile": named or arm}
    meta = run.meta
    for key in ("host", "profile", "workload", "simulated"):
        own[key] = own.get(key) if own.get(key) is not None else meta.get(key)
    own["capacity"] = _capacity(run, own.get("capacity"))
    return Provenance.from_json(own)


def _capacity(run: Run, given: object) -> dict[str, object]:
    """Effective figures of the server; what the provenance lacks is taken from the server's answer after the last point."""
    known = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    after = document(run, "server_after.json")
    for ours, theirs in (
        ("max_running_requests", "effective_max_running_requests"),
        ("kv_tokens", "max_total_num_tokens"),
    ):
        if ours not in known and isinstance(after.get(theirs), int):
            known[ours] = after[theirs]
    return known


def _load(point: Mapping[str, Any]) -> Load:
    concurrency, rate = point.get("concurrency"), point.get("rate")
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < 1e6:
        return Load(rate=float(rate))
    known = isinstance(concurrency, int) and not isinstance(concurrency, bool) and 0 < concurrency < 1e6
    return Load(concurrency=concurrency if known else None)


def _samples(run: Run) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    outputs = {place: line for line in run.read_jsonl("outputs.jsonl") if (place := _place(line))}
    for line in run.read_jsonl("records.jsonl"):
        place = _place(line)
        sample = _sample(line, outputs.get(place, {})) if place else None
        if place and sample is not None:
            found.setdefault(place[0], []).append(sample)
    return found


def _place(line: Mapping[str, Any]) -> tuple[int, int] | None:
    """(point, index) of a line; None where it is damaged."""
    point, index = line.get("point"), line.get("index")
    return (point, index) if isinstance(point, int) and isinstance(index, int) else None


def _sample(line: Mapping[str, Any], output: Mapping[str, Any]) -> Sample | None:
    """None for a failed request, or one whose length the server did not tell."""
    try:
        if line.get("error") is not None or line.get("output_tokens") is None or line.get("end_us") is None:
            return None
        n, times, tokens = int(line["output_tokens"]), list(line.get("times_us") or ()), line.get("tokens")
        if n <= 0 or int(line["end_us"]) <= 0:
            return None
        verify, correct = line.get("spec_verify"), line.get("spec_correct")
        accept = None
        if verify:
            accept = 1 + correct / verify if correct is not None else n / verify
        decode_tokens = n - tokens[0] if tokens else None
        decode_s = (times[-1] - times[0]) / 1e6 if len(times) > 1 else None
        if not decode_tokens or decode_tokens <= 0 or not decode_s or decode_s <= 0:
            decode_tokens = decode_s = None
        return Sample(
            prompt=str(line.get("prompt_id", line.get("index"))),
            output_tokens=n,
            e2e_s=(times[-1] if times else int(line["end_us"])) / 1e6,
            ttft_s=times[0] / 1e6 if times else None,
            decode_tokens=decode_tokens,
            decode_s=decode_s,
            input_tokens=line.get("input_tokens"),
            accept_length=accept,
            verify_steps=verify,
            category=line.get("prompt_class"),
            output=_output(output),
            sent=said if isinstance(said := output.get("sent"), str) else None,
        )
    except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError):
        return None  # a damaged line


def _output(line: Mapping[str, Any]) -> tuple[int, ...] | str | None:
    ids = line.get("token_ids")
    if isinstance(ids, list) and all(isinstance(item, int) for item in ids):
        return tuple(ids)
    text = line.get("text")
    return text if isinstance(text, str) else None


def _list(value: object) -> Iterable[object]:
    return value if isinstance(value, (list, tuple)) else ()
