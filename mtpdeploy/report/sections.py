"""What a report says, section by section: text, tables and drawings. HTML, Markdown and JSON only lay it out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from markupsafe import Markup

from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.analysis.frontier import Spot
from mtpdeploy.analysis.samples import Pass
from mtpdeploy.analysis.stats import Interval, mean
from mtpdeploy.report import plots
from mtpdeploy.report.figures import UNKNOWN, number, times, within
from mtpdeploy.report.story import Side, Story

VERDICT_CLASS = {"faster": "good", "slower": "bad", "can't tell": "unsure", "depends on the load": "unsure"}
MEMORY_PARTS = (
    ("weights_gb", "weights"),
    ("draft_weights_gb", "MTP weights"),
    ("ssm_gb", "state slots"),
    ("conv_gb", "conv state"),
    ("intermediate_ssm_gb", "state in verification"),
    ("intermediate_conv_gb", "conv state in verification"),
    ("kv_gb", "KV cache"),
    ("draft_kv_gb", "KV cache of MTP"),
    ("graph_reserve_gb", "CUDA graphs"),
    ("headroom_gb", "left free"),
)


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. `numeric` counts the columns from the right that hold numbers."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: int = 0
    classes: tuple[str, ...] = ()  # of the rows
    files: tuple[Path, ...] = ()  # what the second cell of each row links to


@dataclass(frozen=True, slots=True)
class Plot:
    """`description` is what somebody reads who cannot see the drawing; a table of the page holds the numbers. series: as drawn."""

    draw: Callable[[], str]
    caption: str
    description: str
    series: tuple[plots.Series, ...] = ()

    @property
    def svg(self) -> Markup:
        """Drawn when it is asked for: Markdown and JSON need no drawing."""
        return Markup(self.draw())


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its drawings and tables."""

    id: str
    heading: str
    text: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the reader came for. `unlike` stands above it."""

    word: str
    text: str
    colour: str
    unlike: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def sections(story: Story) -> tuple[Section, ...]:
    """In the order in which they are read; what no run can tell has none."""
    made = (
        _campaign(story),
        _comparison(story),
        _trade(story),
        _speed(story),
        _latency(story),
        _acceptance(story),
        _memory(story),
        _launch(story),
        _decode(story),
        _load(story),
        _arguments(story),
        _points(story),
        _provenance(story),
        _files(story),
        _steps(story),
    )
    return tuple(section for section in made if section is not None)


def verdicts(story: Story) -> list[Verdict]:
    return [
        Verdict(
            word=one.verdict,
            text=one.verdict_text,
            colour=VERDICT_CLASS[one.verdict],
            unlike=tuple(difference.text for difference in one.likeness.differences),
            notes=(f"Settings: {one.likeness.settings_text}.", *one.notes),
        )
        for one in story.comparisons
    ]


def headline(story: Story) -> list[tuple[str, str, str]]:
    """(what, number, unit) of the last side: a few figures to take away."""
    side = story.sides[-1]
    passes = [one for run in side.measurements for one in run.passes if one.counts_for_speed]
    tiles = []
    for loads, what in ((min, "one user" if _lowest(passes) == 1 else "fewest users"), (max, "most users")):
        closed = [one for one in passes if one.load.concurrency is not None]
        if not closed:
            continue
        chosen = loads(one.load.concurrency or 0 for one in closed)
        speeds = [value for one in closed if one.load.concurrency == chosen and (value := one.number("output_tok_s"))]
        if speeds and (what != "most users" or chosen != _lowest(passes)):
            label = f"{side.label}, {what}" if what == "one user" else f"{side.label} at concurrency {chosen}"
            tiles.append((label, number(statistics.geometric_mean(speeds)), "tok/s"))
    lengths = [value for one in passes if (value := one.number("accept_length")) is not None]
    if lengths:
        tiles.append(("accept length", f"{statistics.fmean(lengths):.2f}", "tokens a step"))
    return tiles


def _lowest(passes: Sequence[Pass]) -> int | None:
    known = [one.load.concurrency for one in passes if one.load.concurrency is not None]
    return min(known) if known else None


# -- sections


def _comparison(story: Story) -> Section | None:
    if not story.comparisons:
        return None
    tables = []
    for one in story.comparisons:
        rows, classes = [], []
        for at in one.loads:
            batch, request = at.batch, at.request
            rows.append(
                (
                    str(at.load),
                    at.verdict,
                    number(at.a_tok_s),
                    number(at.b_tok_s),
                    times(batch.value, batch.low, batch.high) if batch else UNKNOWN,
                    times(request.value, request.low, request.high) if request else UNKNOWN,
                    f"{number(at.a_ttft_ms)} → {number(at.b_ttft_ms)}",
                    f"{number(at.a_tpot_ms)} → {number(at.b_tpot_ms)}",
                    f"{at.basis}; {at.why}",
                )
            )
            classes.append(VERDICT_CLASS[at.verdict])
        heads = (
            "load", "verdict", f"{one.a}, tok/s", f"{one.b}, tok/s", "all requests, times (95 %)",
            "one request, times (95 %)", "TTFT p50, ms", "TPOT p50, ms", "rests on",
        )  # fmt: skip
        tables.append(Table(f"{one.b} against {one.a}", heads, tuple(rows), 0, tuple(classes)))
    text = [line for one in story.comparisons for line in _covariate(one)]
    return Section("comparison", "Comparison", tuple(text), (), tuple(tables))


def _covariate(one: Comparison) -> list[str]:
    said = []
    for at in one.loads:
        part = at.acceptance
        if part is None:
            continue
        line = (
            f"{at.load}: {part.tokens_a_step:.2f} times the tokens a step "
            f"(accept length {part.a:.2f} to {part.b:.2f}), {part.step_time:.2f} times the time a step"
        )
        if part.break_even is not None:
            line += f"; it breaks even at accept length {times(part.break_even.value, part.break_even.low, part.break_even.high)}"
        if part.at_equal_acceptance is not None:
            line += f"; at equal acceptance one request would be {part.at_equal_acceptance:.2f} times as fast"
        said.append(line + ".")
    if one.agreement:
        agree = one.agreement
        said.append(
            f"Greedy answers: {agree.identical} of {agree.prompts} identical; "
            f"median of the first agreeing {agree.unit}: {number(agree.median_first_tokens)}."
        )
    return said


def _closed(story: Story) -> dict[str, list[Spot]]:
    spots = story.frontier.spots if story.frontier else ()
    found: dict[str, list[Spot]] = {side.label: [] for side in story.sides}
    for spot in spots:
        if spot.load.concurrency is not None:
            found[spot.profile].append(spot)
    return {label: spots for label, spots in found.items() if spots}


def _speed(story: Story) -> Section | None:
    closed = _closed(story)
    if not closed:
        return None
    drawn = []
    for name, caption, y, pick in (
        ("total", "All requests together", "output tok/s per GPU", "gpu_tok_s"),
        ("user", "What one user sees", "decode tok/s of a request", "user_tok_s"),
    ):
        series = []
        for label, spots in closed.items():
            figures = [getattr(spot, pick) for spot in spots]
            series.append(
                plots.Series(
                    label,
                    tuple(float(spot.load.concurrency or 0) for spot in spots),
                    tuple(figure.value for figure in figures),
                    tuple(figure.low for figure in figures),
                    tuple(figure.high for figure in figures),
                )
            )
        draw = partial(plots.lines, name, series, x="concurrency", y=y, log_x=True)
        said = f"{y} over concurrency, with 95 % bands; the numbers are in the table."
        drawn.append(Plot(draw, caption, said, tuple(series)))
    rows = tuple(
        (
            spot.profile,
            str(spot.load.concurrency),
            *_figure(spot.user_tok_s),
            *_figure(spot.gpu_tok_s),
            "yes" if spot.front else "",
        )
        for spots in closed.values()
        for spot in spots
    )
    heads = ("profile", "concurrency", "tok/s for a user", "95 %", "tok/s per GPU", "95 %", "beaten by none")
    return Section("speed", "Speed over concurrency", (), tuple(drawn), (Table("As drawn", heads, rows, 5),))


def _figure(one: Interval) -> tuple[str, str]:
    known = one.low is not None and one.high is not None
    return number(one.value), f"{number(one.low)} to {number(one.high)}" if known else UNKNOWN


def _latency(story: Story) -> Section | None:
    drawn = []
    for key, caption in (
        ("ttft_ms", "Time to first token"),
        ("tpot_ms", "Time per output token"),
        ("stall_ms", "Longest pause"),
    ):
        series = []
        for colour, side in enumerate(story.sides):
            for dash, share in enumerate(("p50", "p90")):
                held = _by_concurrency(side, key, share)
                if held:
                    values = [figure.value for figure in held.values()]
                    low, high = (tuple(getattr(one, end) for one in held.values()) for end in ("low", "high"))
                    series.append(
                        plots.Series(f"{side.label} {share}", tuple(held), tuple(values), low, high, colour, dash)
                    )
        if series:
            draw = partial(plots.lines, key, series, x="concurrency", y="ms", log_x=True)
            said = f"{caption} in milliseconds over concurrency, p50 and p90, with the spread over repeats."
            drawn.append(Plot(draw, caption, said, tuple(series)))
    if not drawn:
        return None
    rows = [
        (one.label, plot.caption.lower(), f"{at:g}", number(value), _range(one, place))
        for plot in drawn
        for one in plot.series
        for place, (at, value) in enumerate(zip(one.x, one.y, strict=True))
    ]
    table = Table("Latencies, mean over repeats", ("profile", "figure", "concurrency", "ms", "95 %"), tuple(rows), 3)
    return Section("latency", "Latency", (), tuple(drawn), (table,))


def _range(one: plots.Series, place: int) -> str:
    low = one.low[place] if place < len(one.low) else None
    high = one.high[place] if place < len(one.high) else None
    return UNKNOWN if low is None or high is None else f"{number(max(low, 0.0))} to {number(high)}"


def _by_concurrency(side: Side, *path: str) -> dict[float, Interval]:
    """Mean over repeats, with Student's interval where there are several."""
    found: dict[float, list[float]] = {}
    for run in side.measurements:
        for one in run.passes:
            value = one.number(*path)
            if one.load.concurrency is not None and one.valid and value is not None:
                found.setdefault(float(one.load.concurrency), []).append(value)
    return {at: mean(values) for at, values in sorted(found.items())}


def _trade(story: Story) -> Section | None:
    closed = _closed(story)
    if story.frontier is None or sum(len(spots) for spots in closed.values()) < 2:
        return None
    series = [
        plots.Series(
            label, tuple(spot.user_tok_s.value for spot in spots), tuple(spot.gpu_tok_s.value for spot in spots)
        )
        for label, spots in closed.items()
    ]
    names = [[str(spot.load.concurrency) for spot in spots] for spots in closed.values()]
    draw = partial(plots.cloud, "trade", series, names, x="tok/s for one user", y="output tok/s per GPU")
    front = ", ".join(f"{spot.profile} at {spot.load}" for spot in story.frontier.spots if spot.front)
    text = (
        f"Nothing measured is better in both than: {front}.",
        *(one.text + "." for one in story.frontier.crossovers),
    )
    described = "Speed for one user against speed of the GPU; each point is a load, with its concurrency beside it."
    return Section("trade", "What is traded", text, (Plot(draw, "Up and right is better", described, tuple(series)),))


def _acceptance(story: Story) -> Section | None:
    drawn, tables = [], []
    for key, caption, y in (
        ("acceptance_by_position", "By draft position", "share of drafts accepted"),
        ("acceptance_by_class", "By class of prompt", "accept length"),
    ):
        series: list[plots.Series] = []
        groups: list[str] = []
        for colour, side in enumerate(story.sides):
            held = _last_figure(side, key)
            values = (
                {f"position {number + 1}": value for number, value in enumerate(held)}
                if isinstance(held, list)
                else held
            )
            if not isinstance(values, Mapping) or not values:
                continue
            shown = {str(name): value for name, value in values.items() if isinstance(value, (int, float))}
            groups += [name for name in shown if name not in groups]
            at = tuple(float(groups.index(name)) for name in shown)
            series.append(plots.Series(side.label, at, tuple(map(float, shown.values())), colour=colour))
        if series:
            draw = partial(plots.columns, key, tuple(groups), tuple(series), y=y)
            told = "; ".join(
                f"{one.label}: "
                + ", ".join(f"{groups[int(at)]} {number(value)}" for at, value in zip(one.x, one.y, strict=True))
                for one in series
            )
            drawn.append(Plot(draw, caption, told, tuple(series)))
            heads = (caption.lower(), *(one.label for one in series))
            held = [dict(zip(one.x, one.y, strict=True)) for one in series]
            rows = tuple(
                (group, *(number(one.get(float(place))) for one in held)) for place, group in enumerate(groups)
            )
            tables.append(Table(f"{caption}: {y}", heads, rows, len(series)))
    return Section("acceptance", "Acceptance of drafts", (), tuple(drawn), tuple(tables)) if drawn else None


def _last_figure(side: Side, key: str) -> object:
    for run in reversed(side.measurements):
        for one in reversed(run.passes):
            if one.figures.get(key):
                return one.figures[key]
    return None


def _memory(story: Story) -> Section | None:
    bars, tables, text = [], [], []
    for side in story.sides:
        if not side.memory:
            continue
        planned, actual = _planned(side.memory), _actual(side.log)
        bars.append(plots.Bar(f"{side.label}, planned", tuple(planned.items())))
        if actual:
            bars.append(plots.Bar(f"{side.label}, actual", tuple(actual.items())))
        names = [name for _, name in MEMORY_PARTS if name in planned or name in actual]
        rows = [(name, number(planned.get(name)), number(actual.get(name))) for name in names]
        for key, name in (
            ("slots", "state slots"),
            ("slots_per_request", "slots per request"),
            ("max_running_requests", "running requests"),
            ("kv_tokens", "KV tokens"),
        ):
            rows.append((name, number(side.memory.get(key)), number(_actual_count(side.log, key))))
        tables.append(Table(f"{side.label}: GiB, then counts", ("part", "planned", "actual"), tuple(rows), 2))
        if side.memory.get("bound_by"):
            text.append(
                f"{side.label}: {number(side.memory.get('max_running_requests'))} running requests, "
                f"bound by {side.memory['bound_by']}."
            )
    if not bars:
        return None
    draw = partial(plots.stacked, "memory", tuple(bars), x="GiB")
    described = "GPU memory by use, planned and as the log reports it; the numbers are in the table."
    return Section("memory", "Memory", tuple(text), (Plot(draw, "GPU memory", described),), tuple(tables))


def _planned(memory: Mapping[str, object]) -> dict[str, float]:
    held = dict(memory)
    if "kv_gb" not in held:
        tokens, each = held.get("kv_tokens"), held.get("kv_bytes_per_token")
        if isinstance(tokens, (int, float)) and isinstance(each, (int, float)):
            held["kv_gb"] = tokens * each / 2**30
    return _positive({name: held.get(key) for key, name in MEMORY_PARTS})


def _actual(log: Mapping[str, object]) -> dict[str, float]:
    graphs = log.get("graphs")
    listed = [one.get("mem_gb") for one in graphs if isinstance(one, Mapping)] if isinstance(graphs, list) else []
    taken = [size for size in listed if isinstance(size, (int, float))]
    return _positive(
        {
            "weights": within(log, "weights", "mem_gb"),
            "MTP weights": within(log, "draft", "mem_gb"),
            "state slots": within(log, "mamba_cache", "ssm_gb"),
            "conv state": within(log, "mamba_cache", "conv_gb"),
            "state in verification": within(log, "mamba_cache", "intermediate_gb"),
            "conv state in verification": within(log, "mamba_cache", "intermediate_conv_gb"),
            "KV cache": _both(log, "kv_cache", "k_gb", "v_gb", "size_gb"),
            "KV cache of MTP": _both(log, "draft", "kv_k_gb", "kv_v_gb", "kv_size_gb"),
            "CUDA graphs": sum(taken) if taken else within(log, "graph", "mem_gb"),
            "left free": log.get("available_gpu_mem_gb"),
        }
    )


def _both(log: Mapping[str, object], part: str, k: str, v: str, whole: str) -> object:
    halves = [value for name in (k, v) if isinstance(value := within(log, part, name), (int, float))]
    return sum(halves) if len(halves) == 2 else within(log, part, whole)


def _actual_count(log: Mapping[str, object], key: str) -> object:
    return {
        "slots": within(log, "mamba_cache", "slots"),
        "slots_per_request": log.get("slots_per_request"),
        "max_running_requests": log.get("max_running_requests"),
        "kv_tokens": log.get("max_total_num_tokens"),
    }[key]


def _positive(parts: Mapping[str, object]) -> dict[str, float]:
    return {name: float(size) for name, size in parts.items() if isinstance(size, (int, float)) and size > 0}


def _launch(story: Story) -> Section | None:
    """The phases of each start, one after the other; where only the durations that the log times are kept, those."""
    bars = [plots.Bar(side.label, parts) for side in story.sides if (parts := side.phases or _timed(side))]
    if not bars:
        return None
    rows = tuple((bar.label, part, number(seconds)) for bar in bars for part, seconds in bar.parts)
    whole = (
        "Phases of the start, from the first line of the log"
        if any(side.phases for side in story.sides)
        else "What the log times"
    )
    drawing = Plot(
        partial(plots.stacked, "launch", tuple(bars), x="seconds"),
        whole,
        "Seconds in each phase, one after the other; the numbers are in the table.",
    )
    return Section("launch", "Start-up", (), (drawing,), (Table("Phases", ("profile", "phase", "s"), rows, 1),))


def _timed(side: Side) -> tuple[tuple[str, float], ...]:
    """Loading and graph capture, which the log times itself."""
    parts = [
        ("weights", within(side.log, "weights", "elapsed_s")),
        ("MTP weights", within(side.log, "draft", "elapsed_s")),
    ]
    graphs = side.log.get("graphs")
    parts += [
        (f"graphs: {one.get('kind') or 'decode'}", one.get("elapsed_s"))
        for one in (graphs if isinstance(graphs, list) else ())
        if isinstance(one, Mapping)
    ]
    return tuple((name, float(value)) for name, value in parts if isinstance(value, (int, float)) and value > 0)


def _decode(story: Story) -> Section | None:
    """How the last point went: tokens as the client received them, and the server's own decode records."""
    drawn = []
    picks: tuple[tuple[str, str, str, Callable[[Side], tuple[tuple[float, float], ...]]], ...] = (
        ("client", "Tokens that arrived at the client, last point", "output tok/s", lambda side: side.arrived),
        ("server", "Throughput by the server's log", "tok/s", lambda side: side.decoded("gen_throughput")),
        ("accept", "Accept length by the server's log", "tokens a step", lambda side: side.decoded("accept_len")),
    )
    for key, caption, y, pick in picks:
        series = [
            plots.Series(side.label, tuple(at for at, _ in held), tuple(value for _, value in held), colour=colour)
            for colour, side in enumerate(story.sides)
            if len(held := pick(side)) > 1
        ]
        if series:
            draw = partial(plots.lines, f"decode-{key}", tuple(series), x="seconds", y=y, marked=False)
            told = "; ".join(f"{one.label}: {number(min(one.y))} to {number(max(one.y))}" for one in series)
            drawn.append(Plot(draw, caption, f"{y} over time. {told}.", tuple(series)))
    return Section("decode", "Decoding over time", (), tuple(drawn)) if drawn else None


def _load(story: Story) -> Section | None:
    """Running and queued requests while the last point was measured, as the server told them."""
    series = []
    for colour, side in enumerate(story.sides):
        at = tuple(one[0] for one in side.load)
        for dash, name in enumerate(("running", "queued")):
            if at:
                values = tuple(one[1 + dash] for one in side.load)
                series.append(plots.Series(f"{side.label}, {name}", at, values, colour=colour, dash=dash))
    if not series:
        return None
    drawing = Plot(
        partial(plots.lines, "load", tuple(series), x="seconds of the last point", y="requests", marked=False),
        "Requests at the server",
        "Running and queued requests while the last point was measured.",
        tuple(series),
    )
    return Section("load", "While it was measured", (), (drawing,))


def _arguments(story: Story) -> Section | None:
    tables = []
    for side in story.sides:
        rows, classes = [], []
        for one in _compared(side):
            rows.append(
                (str(one["name"]), *(_value(one.get(key)) for key in ("requested", "effective", "status", "rule")))
            )
            classes.append("" if one.get("requested") == one.get("effective") else "unsure")
        if rows:
            caption = f"{side.label}: {side.verified.get('verdict', 'as the log of its launch says')}"
            heads = ("argument", "requested", "effective", "status", "why")
            tables.append(Table(caption, heads, tuple(rows), 0, tuple(classes)))
    return Section("arguments", "Requested and effective arguments", (), (), tuple(tables), True) if tables else None


def _compared(side: Side) -> list[Mapping[str, object]]:
    """verify's own list, else the requested arguments beside those that the launch printed, with the plan's rules."""
    listed = side.verified.get("arguments")
    if isinstance(listed, list):
        return [one for one in listed if isinstance(one, Mapping) and "name" in one]
    printed = side.log.get("server_args")
    if not isinstance(printed, Mapping):
        return []
    found: list[Mapping[str, object]] = []
    for name, requested in side.measurements[-1].provenance.args.items():
        effective = printed.get(name)
        status = "not printed" if name not in printed else "as requested" if effective == requested else "changed"
        rule = side.rules.get(name) if status == "changed" else None
        found.append({"name": name, "requested": requested, "effective": effective, "status": status, "rule": rule})
    return found


def _value(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _points(story: Story) -> Section:
    tables = []
    heads = (
        "load", "repeat", "done", "tok/s", "of a request p50", "TTFT p50 / p90 / p99, ms", "TPOT p50 / p90 / p99, ms",
        "longest pause p90, ms", "accept length", "remarks",
    )  # fmt: skip
    for side in story.sides:
        rows, classes = [], []
        for run in side.measurements:
            for one in run.passes:
                remarks = [*one.invalid_because, *(str(mark) for mark in _list(one.figures.get("marks")))]
                rows.append(
                    (
                        str(one.load),
                        number(one.figures.get("repeat")),
                        f"{number(one.figures.get('completed'))}/{number(one.figures.get('requests'))}",
                        number(one.number("output_tok_s")),
                        number(one.number("request_tok_s", "p50")),
                        _three(one, "ttft_ms"),
                        _three(one, "tpot_ms"),
                        number(one.number("stall_ms", "p90")),
                        number(one.number("accept_length")),
                        "; ".join(remarks),
                    )
                )
                classes.append("" if one.valid else "bad")
        runs = ", ".join(run.run_id for run in side.measurements)
        tables.append(Table(f"{side.label} ({runs})", heads, tuple(rows), 0, tuple(classes)))
    return Section("points", "All points", (), (), tuple(tables))


def _three(one: Pass, key: str) -> str:
    return " / ".join(number(one.number(key, share)) for share in ("p50", "p90", "p99"))


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _provenance(story: Story) -> Section:
    said = [(side.label, side.measurements[-1].provenance.as_json()) for side in story.sides]
    skipped = {"args", "env", "capacity"}
    rows = []
    for key in said[0][1]:
        values = [document[key] for _, document in said]
        if key not in skipped and any(value not in (None, [], (), {}) for value in values):
            rows.append((key.replace("_", " "), *(_value(value) for value in values)))
    for group in ("args", "env", "capacity"):
        names = sorted({name for _, document in said for name in _mapping(document[group])})
        rows += [
            (f"{group}.{name}", *(_value(_mapping(document[group]).get(name)) for _, document in said))
            for name in names
        ]
    heads = ("condition", *(label for label, _ in said))
    return Section("conditions", "Conditions", (), (), (Table("As recorded with the runs", heads, tuple(rows)),), True)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _files(story: Story) -> Section:
    held = [(run, path) for run in story.runs for path in run.files() if not path.name.startswith("report.")]
    rows = tuple((run.id, str(path.relative_to(run.path)), str(path.stat().st_size)) for run, path in held)
    text = tuple(f"{run.id}: {run.path}" for run in story.runs)
    table = Table("Files", ("run", "file", "bytes"), rows, 1, files=tuple(path for _, path in held))
    return Section("files", "Raw data", text, (), (table,), True)


def _campaign(story: Story) -> Section | None:
    """What was decided, and what it rests on. What failed stands above, beside the verdict."""
    said = story.campaign.get("recommendation")
    if not isinstance(said, Mapping):
        return None
    text = [str(said.get("why")) + "."]
    for key, words in (
        ("gives_up", "Gives up"),
        ("would_change", "Would change the answer"),
        ("limits", "What limits it"),
    ):
        text += [f"{words}: {one}." for one in _list(said.get(key))]
    text += [
        f"Next: {one.get('command')} ({one.get('why')})."
        for one in _list(said.get("next_experiments"))
        if isinstance(one, Mapping)
    ]
    offered = [one for one in _list(said.get("suggestions")) if isinstance(one, Mapping)]
    rows = tuple(
        (
            ", ".join(f"{name}={value}" for name, value in _mapping(one.get("set")).items()),
            str(one.get("effect")),
            number(one.get("cost_gb")),
        )
        for one in offered
    )
    tables = (Table("Flags that only help together", ("set", "effect", "GiB more"), rows, 1),) if rows else ()
    return Section("recommendation", "Recommendation", tuple(text), (), tables)


def failures(story: Story) -> tuple[str, ...]:
    """Arms that gave no measurement, each with its cause."""
    found = []
    for name, arm in _mapping(story.campaign.get("arms")).items():
        told = _mapping(arm)
        if told.get("status") == "failed":
            found.append(f"{name} gave no measurement: {told.get('cause')}: {told.get('message')}")
            found += [f"{name}: {line}" for line in _list(told.get("evidence"))[-4:]]
    return tuple(found)


def _steps(story: Story) -> Section | None:
    listed = [one for one in _list(story.campaign.get("steps")) if isinstance(one, Mapping)]
    if not listed:
        return None
    rows = tuple(
        (str(one.get("do")), str(one.get("status")), str(one.get("message") or ""), number(one.get("seconds")))
        for one in listed
    )
    table = Table("Campaign", ("step", "status", "came to", "s"), rows, 1)
    return Section("steps", "Steps of the campaign", (), (), (table,), True)
