"""What differs between two measurements besides the thing compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.analysis.samples import Load, Measured, Pass

# decisive: with this difference the numbers do not answer which settings are faster.
FIELDS: tuple[tuple[str, str, bool], ...] = (
    ("simulated", "one is simulated", True),
    ("simulated_clock", "simulated clock", True),
    ("host", "host", True),
    ("endpoint", "endpoint", False),
    ("gpu", "GPU", True),
    ("gpu_count", "number of GPUs", True),
    ("gpu_memory_gb", "GPU memory in GiB", True),
    ("driver", "driver", False),
    ("model_hash", "model files", True),
    ("model", "model", True),
    ("sglang_version", "SGLang version", False),
    ("workload", "workload", True),
    ("input_tokens", "input tokens", True),
    ("output_tokens", "output tokens", True),
    ("ignore_eos", "ignore_eos", True),
    ("temperature", "temperature", True),
    ("prompts", "prompt set", True),
    ("seed", "seed", False),
    ("client_place", "place of the client", False),
    ("accept_length_source", "source of the accept length", False),
    ("tuned", "tuned for its arm", False),
)
# A missing one of these is worth a note; the others are often unknown without harm.
SHOULD_BE_KNOWN = ("host", "gpu", "model_hash", "sglang_version")
PROMPTS, TIME = "prompts as sent", "measured at another time"
SHIPPED_PROMPTS = {"mixed", "code", "maths", "chat", "summary", "long", "structured"}
CLOSE_IN_TIME_S = 3600.0
MTP_ARGS = ("speculative_", "mamba_", "max_mamba_cache_size", "max_running_requests")


@dataclass(frozen=True, slots=True)
class Difference:
    """`what` differs: `a` here, `b` there. decisive: no verdict on the settings can be drawn across it."""

    what: str
    a: object
    b: object
    decisive: bool
    text: str

    def as_json(self) -> dict[str, object]:
        return {"what": self.what, "a": self.a, "b": self.b, "decisive": self.decisive, "text": self.text}


@dataclass(frozen=True, slots=True)
class Likeness:
    """differences.

    Listed first in every report, decisive ones before the rest. notes: what could not be checked, and cautions.
    """

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    settings: tuple[Difference, ...]  # the SGLang arguments that differ: the thing compared
    settings_text: str
    unlike_loads: frozenset[Load] = frozenset()  # loads at which the arms were sent other prompts

    @property
    def decisive(self) -> bool:
        return any(one.decisive for one in self.differences)


def likeness(a: Sequence[Measured], b: Sequence[Measured]) -> Likeness:
    """Compares every run of one arm with every run of the other; a value that any pair differs in is listed once."""
    found: dict[str, Difference] = {}
    notes: list[str] = []
    for key, text, decisive in FIELDS:
        left, right = _values(a, key), _values(b, key)
        unknown = [name for name, values in (("A", left), ("B", right)) if None in values]
        known_left, known_right = left - {None}, right - {None}
        if known_left and known_right and known_left != known_right:
            found[text] = _difference(text, known_left, known_right, decisive)
        elif unknown and key in SHOULD_BE_KNOWN:
            which = "either arm" if len(unknown) == 2 else unknown[0]
            notes.append(f"{text} not known of {which}, so not compared")
    if "one is simulated" in found:
        found["one is simulated"] = Difference(
            "simulated", None, None, True, "one arm is simulated and the other is not"
        )
    if "model files" in found:
        found.pop("model", None)
    sent = _prompts(a, b)
    if sent.difference is not None:
        found[PROMPTS] = sent.difference
    elif not sent.known:
        notes.append(f"{PROMPTS} not known of both arms, so not compared")
    else:
        found.pop("seed", None)  # another seed that gave the same prompts changes nothing
        if _same_known(a, b, "prompts_sha256"):
            found.pop("prompt set", None)
            found.pop("workload", None)
    if "tuned for its arm" in found:
        found["tuned for its arm"] = Difference(
            "tuned", None, None, False, "one arm has settings found by a search, the other has not been tuned"
        )
    for difference in (*_time(a, b), *_contention(a, b), *_cache(a, b)):
        found[difference.what] = difference
    if TIME not in found:
        notes += _interleaved(a, b)
    settings, text = _settings(a, b)
    # The age of what is compared with stands before all else, then what forbids a verdict.
    ordered = sorted(found.values(), key=lambda one: (one.what != TIME, not one.decisive))
    return Likeness(tuple(ordered), tuple(notes), settings, text, sent.unlike)


def collapsed(pairs: Mapping[tuple[str, str], Sequence[Difference]]) -> tuple[str, ...]:
    """The differences between several arms, a line for each kind: what one pair has stands as it is, the rest by value."""
    by_what: dict[str, list[tuple[tuple[str, str], Difference]]] = {}
    for pair, differences in pairs.items():
        for one in differences:
            by_what.setdefault(one.what, []).append((pair, one))
    ordered = sorted(by_what.items(), key=lambda item: (item[0] != TIME, not any(one.decisive for _, one in item[1])))
    lines = []
    for what, found in ordered:
        if len(pairs) == 1 or len({one.text for _, one in found}) == 1:
            lines.append(found[0][1].text)
            continue
        said: dict[str, dict[str, None]] = {}
        for (a, b), one in found:
            for label, value in ((a, one.a), (b, one.b)):
                if value not in (None, [], ()):
                    said.setdefault(_text(value), {}).setdefault(label)
        told = "; ".join(f"{', '.join(labels)}: {value}" for value, labels in said.items())
        lines.append(f"{what}: {told}" if told else found[0][1].text)
    return tuple(lines)


def _text(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Whether the arms were sent the same prompts, by load. known: False where neither digest nor records say it."""

    known: bool
    unlike: frozenset[Load] = frozenset()
    difference: Difference | None = None


def _prompts(a: Sequence[Measured], b: Sequence[Measured]) -> _Sent:
    """By each load that both measured: runs of other loads send other numbers of prompts, which is no difference."""
    digests = [_values(arm, "prompts_sha256") for arm in (a, b)]
    left, right = (digest - {None} for digest in digests)
    if None not in digests[0] | digests[1] and left == right and len(left) == 1:
        return _Sent(True)
    shared = {load for one in a for load in one.loads()} & {load for one in b for load in one.loads()}
    apart = _told_apart(a, b)
    told: dict[Load, bool | None] = {}
    for load in sorted(shared, key=lambda load: load.order):
        by_names = _alike(a, b, load)
        told[load] = load not in apart and (_by_digest(a, b, load) if by_names is None else by_names)
    if not told or None in told.values():  # the records do not say it of every load: the digests decide
        if not left or not right or left == right:
            return _Sent(False)
        text = f"{PROMPTS}: {_shown(left)} against {_shown(right)}"
        return _Sent(True, frozenset(shared), Difference(PROMPTS, _shown(left), _shown(right), True, text))
    unlike = [load for load, alike in told.items() if not alike]
    if not unlike:
        return _Sent(True)
    everywhere = len(unlike) == len(told)
    where = f"not the same at {', '.join(map(str, unlike))}"
    one_each = len(left) == len(right) == 1 and left != right
    text = f"{PROMPTS}: {f'{_shown(left)} against {_shown(right)}' if everywhere and one_each else where}"
    return _Sent(True, frozenset(unlike), Difference(PROMPTS, None, None, everywhere, text))


def _told_apart(a: Sequence[Measured], b: Sequence[Measured]) -> set[Load]:
    """Loads of runs that began with the same one and sent other prompts in it: the digest is over a run's first point."""
    return {
        load
        for one in a
        for other in b
        if one.passes and other.passes and _first(one) == _first(other)
        if None not in (digests := (one.provenance.prompts_sha256, other.provenance.prompts_sha256))
        if digests[0] != digests[1]
        for load in {*one.loads()} & {*other.loads()}
    }


def _first(one: Measured) -> tuple[Load, float | None]:
    return one.passes[0].load, one.passes[0].number("requests")


def _alike(a: Sequence[Measured], b: Sequence[Measured], load: Load) -> bool | None:
    """None where it cannot be told: a name tells the text only among the shipped prompts, cut and padded alike."""
    sent = [
        {(one.provenance.prompts, _names(point)) for one in arm for point in one.passes if point.load == load}
        for arm in (a, b)
    ]
    kinds = {kind for arm in sent for kind, _ in arm}
    if any(not names for arm in sent for _, names in arm) or not kinds <= SHIPPED_PROMPTS:
        return None
    return len(sent[0] | sent[1]) == 1


def _by_digest(a: Sequence[Measured], b: Sequence[Measured], load: Load) -> bool | None:
    """What the digests say of a load with which every run of it began; None where a run has it later, or no digest."""
    runs = [one for one in (*a, *b) if load in one.loads()]
    digests = {one.provenance.prompts_sha256 for one in runs}
    if None in digests or any(_first(one)[0] != load for one in runs):
        return None
    return len(digests) == 1


def _names(point: Pass) -> tuple[str, ...]:
    """The prompts of every request of the point that was answered, each as often as it was sent."""
    return tuple(sorted(sample.prompt for sample in point.samples))


def _values(arm: Sequence[Measured], key: str) -> set[object]:
    return {_hashable(getattr(one.provenance, key)) for one in arm}


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _same_known(a: Sequence[Measured], b: Sequence[Measured], key: str) -> bool:
    both = _values(a, key) | _values(b, key)
    return None not in both and len(both) == 1


def _difference(what: str, a: set[object], b: set[object], decisive: bool) -> Difference:
    left, right = _shown(a), _shown(b)
    return Difference(what, left, right, decisive, f"{what}: {left} against {right}")


def _shown(values: set[object]) -> str:
    texts = sorted(str(value) for value in values)
    return " and ".join(text[:12] + "…" if len(text) == 64 else text for text in texts)


def parse_utc(text: str | None) -> datetime | None:
    """A stored time; None where it is missing or damaged."""
    try:
        stamp = datetime.fromisoformat((text or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    return stamp if stamp.tzinfo else stamp.replace(tzinfo=timezone.utc)


def span(seconds: float) -> str:
    """A duration for people: 40 s, 12 min, 5 h, 3 days."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def _time(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[Difference, ...]:
    times = [[stamp for one in arm if (stamp := parse_utc(one.created_utc))] for arm in (a, b)]
    if not times[0] or not times[1]:
        return ()
    gap = abs((min(times[1]) - min(times[0])).total_seconds())
    if gap <= CLOSE_IN_TIME_S or _one_session(a, b):
        return ()
    what = TIME
    left, right = (f"{min(stamps):%Y-%m-%d %H:%M}" for stamps in times)
    text = f"{what}: {span(gap)} apart ({left} and {right} UTC)"
    return (Difference(what, left, right, False, text),)


def _one_session(a: Sequence[Measured], b: Sequence[Measured]) -> bool:
    return _same_known(a, b, "session")


def _interleaved(a: Sequence[Measured], b: Sequence[Measured]) -> list[str]:
    """Order of the runs in time: ABBA and the like separates the arms from drift, AABB does not."""
    stamps = [
        (stamp, one.figures.get("index") or 0, arm)
        for arm, runs in (("A", a), ("B", b))
        for run in runs
        if (stamp := parse_utc(run.created_utc))
        for one in run.passes
        if isinstance(one.figures.get("index"), (int, type(None)))
    ]
    order = "".join(arm for arm, _ in groupby(arm for _, _, arm in sorted(stamps)))
    if "A" not in order or "B" not in order:
        return []
    changes = len(order) - 1
    return (
        []
        if changes > 1
        else [f"one arm was measured wholly before the other ({order}): slow drift would look like a gain"]
    )


def _contention(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[Difference, ...]:
    seen = {
        name: [said for one in arm for said in one.provenance.contention or ()] for name, arm in (("A", a), ("B", b))
    }
    if not any(seen.values()):
        return ()
    text = "; ".join(f"{name}: {', '.join(said)}" for name, said in seen.items() if said)
    return (Difference("foreign work", seen["A"], seen["B"], False, f"foreign work during the measurement ({text})"),)


def _cache(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[Difference, ...]:
    rates = [[rate for one in arm if (rate := one.provenance.prefix_cache_hit_rate) is not None] for arm in (a, b)]
    if not rates[0] or not rates[1]:
        return ()
    left, right = (sum(rate) / len(rate) for rate in rates)
    if abs(left - right) <= 0.05:
        return ()
    what = "prefix cache hits"
    return (Difference(what, left, right, False, f"{what}: {left:.0%} against {right:.0%} of the input tokens"),)


def _settings(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[tuple[Difference, ...], str]:
    left, right = a[0].provenance, b[0].provenance
    if not left.args or not right.args:
        return (), "the arguments of at least one arm are not recorded, so whether the settings match is unknown"
    changed = tuple(
        Difference(
            name, left.args.get(name), right.args.get(name), False, f"{name}: {_arg(left, name)} → {_arg(right, name)}"
        )
        for name in sorted({*left.args, *right.args} - {"host", "port"})
        if left.args.get(name) != right.args.get(name)
    )
    if left.tuned and right.tuned:
        return changed, "each arm has its own best settings, found by a search"
    if not changed:
        return changed, "both arms have the same settings"
    names = [one.what for one in changed]
    if all(name.startswith(MTP_ARGS) for name in names):
        return changed, "same settings but for MTP and its state cache"
    others = [name for name in names if not name.startswith(MTP_ARGS)]
    return changed, f"not the same settings: besides MTP, {', '.join(others)} differ"


def _arg(of: Provenance, name: str) -> str:
    args: Mapping[str, object] = of.args
    return str(args[name]) if name in args else "default"
