"""The figures of runs in the forms that other tools read."""

from __future__ import annotations

import csv
import io
import json
import statistics
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from pathlib import Path

from mtpdeploy.actions.runs import RunShown
from mtpdeploy.bench.metrics import quantile, request_figures, spread
from mtpdeploy.bench.values import Record
from mtpdeploy.errors import UsageError
from mtpdeploy.report.figures import load, number, within

BINARY = {"parquet": ".parquet", "archive": ".tar.gz"}  # format → how its files end
FORMATS = ("md", "csv", "json", "bench-serving", *BINARY)
HEAD = ("run_id", "created_utc", "host", "profile", "workload", "simulated")
TEXTS = (*HEAD[:-1], "arm", "process", "accept_length_source", "cached_share_source", "invalid_because")
WHOLES = (
    "concurrency", "repeat", "input_length", "output_length", "requests", "completed", "failed", "input_tokens",
    "output_tokens", "windows_dropped",
)  # fmt: skip

# column → where it stands in a point
COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("arm", ("arm",)),
    ("concurrency", ("concurrency",)),
    ("rate", ("rate",)),
    ("process", ("process",)),
    ("repeat", ("repeat",)),
    ("input_length", ("input_length",)),
    ("output_length", ("output_length",)),
    ("requests", ("requests",)),
    ("completed", ("completed",)),
    ("failed", ("failed",)),
    ("input_tokens", ("input_tokens",)),
    ("output_tokens", ("output_tokens",)),
    ("duration_s", ("duration_s",)),
    ("output_tok_s", ("output_tok_s",)),
    ("output_tok_s_steady", ("output_tok_s_steady",)),
    *(
        (f"{name}_{share}{unit}", (f"{name}{unit}", share))
        for name, unit, shares in (
            ("request", "_tok_s", ("p50", "p90")),
            *(
                (name, "_ms", ("p50", "p90", "p99", "max"))
                for name in (
                    "ttft",
                    "tpot",
                    "chunk_gap",
                    "stall",
                    "e2e",
                    "ttft_scheduled",
                    "e2e_scheduled",
                    "lag",
                    "queue",
                )
            ),
        )
        for share in shares
    ),
    ("requests_s", ("requests_s",)),
    ("total_tok_s", ("total_tok_s",)),
    ("goodput_requests_s", ("goodput", "requests_s")),
    ("goodput_share", ("goodput", "share")),
    ("accept_length", ("accept_length",)),
    ("accept_length_source", ("accept_length_source",)),
    ("accept_rate", ("accept_rate",)),
    ("cached_share", ("cached_share",)),
    ("cached_share_source", ("cached_share_source",)),
    ("power_w_mean", ("gpu", "power_w_mean")),
    ("energy_j_per_token", ("gpu", "energy_j_per_token")),
    ("windows_dropped", ("windows_dropped",)),
    ("valid", ("valid",)),
    ("invalid_because", ("invalid_because",)),
)


def exported(runs: Sequence[RunShown], format: str) -> str:
    """`format` is one of FORMATS; unknown figures are empty in csv, null in JSON, a dash in Markdown."""
    if format == "csv":
        return _csv(runs)
    if format == "md":
        return "\n".join(markdown(run) for run in runs)
    if format == "bench-serving":
        return "".join(json.dumps(row) + "\n" for run in runs for row in _bench_serving(run))
    return json.dumps([run.as_json() for run in runs], indent=2, ensure_ascii=False) + "\n"


def markdown(run: RunShown) -> str:
    """A heading, the conditions, a table of the points."""
    said = run.run.provenance
    title = f"## {cell(said.profile or run.run.id)} on {cell(said.host or said.endpoint or 'unknown host')}"
    lines = [title, ""]
    if run.simulated:
        lines += ["**Simulated: no GPU was measured.**", ""]
    lines += [f"- not like for like: {cell(one)}" for one in run.not_like_for_like]
    facts = (
        ("run", run.run.id),
        ("measured", run.run.created_utc),
        ("GPU", said.gpu),
        ("SGLang", said.sglang_version),
        ("model", said.model),
        ("workload", said.workload),
        ("client", said.client_place),
    )
    lines += [f"- {name}: {cell(value)}" for name, value in facts if value is not None]
    heads = ("load", "requests", "tok/s", "tok/s a request", "TTFT p50/p90 ms", "TPOT p50/p90 ms", "accept length")
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for point in run.points:
        pairs = [
            f"{number(within(point, name, 'p50'))} / {number(within(point, name, 'p90'))}"
            for name in ("ttft_ms", "tpot_ms")
        ]
        cells = (
            (f"{point['arm']} " if point.get("arm") else "") + load(point),
            f"{number(point.get('completed'))}/{number(point.get('requests'))}",
            number(point.get("output_tok_s")) + ("" if point.get("valid") is not False else " (invalid)"),
            number(within(point, "request_tok_s", "p50")),
            *pairs,
            number(point.get("accept_length")),
        )
        lines.append(f"| {' | '.join(cell(text) for text in cells)} |")
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """Text that cannot break out of a Markdown table, nor become a tag."""
    text = " ".join(str(value).split())
    for sign in "\\|`*_[]<>":
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text


def _csv(runs: Sequence[RunShown]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*HEAD, *(name for name, _ in COLUMNS)])
    for row in _rows(runs):
        table.writerow([_plain(value) for value in row])
    return out.getvalue()


def _rows(runs: Sequence[RunShown]) -> Iterator[list[object]]:
    """A line a point; reasons joined to one text."""
    for run in runs:
        said = run.run.provenance
        head = (run.run.id, run.run.created_utc, said.host, said.profile, said.workload, run.simulated)
        for point in run.points:
            values = [within(point, *path) for _, path in COLUMNS]
            yield [
                *head,
                *("; ".join(map(str, one)) or None if isinstance(one, (list, tuple)) else one for one in values),
            ]


def _plain(value: object) -> object:
    """A cell that starts like a formula is quoted, since spreadsheets run it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def _bench_serving(run: RunShown) -> list[dict[str, object]]:
    """Rows as `sglang.bench_serving --output-file` appends them (bench_serving.py of 0.5.6 to 0.5.23), one a point.

    itl_ms is theirs: every gap divided by the tokens that ended it, once a token. What we don't know is null, and so is a p99
    without enough samples.
    """
    records: dict[int, list[Record]] = defaultdict(list)
    for line in run.run.read_jsonl("records.jsonl"):
        try:
            one = Record.from_json(line)
        except (KeyError, TypeError, ValueError):
            continue  # a damaged line
        if one.ok:
            records[one.point].append(one)
    return [_serving_row(run, point, records.get(_whole(point.get("index")), [])) for point in run.points]


def _serving_row(run: RunShown, point: Mapping[str, object], records: Sequence[Record]) -> dict[str, object]:
    asked, done, duration = point.get("rate"), point.get("completed"), _real(point.get("duration_s"))
    figures = [request_figures(one) for one in records]
    known: dict[str, list[float]] = {
        "e2e_latency": [one.e2e_ms for one in figures if one.e2e_ms is not None],
        "ttft": [one.ttft_ms for one in figures if one.ttft_ms is not None],
        "tpot": [one.tpot_ms for one in figures if one.tpot_ms is not None],
        "itl": [gap for one in records for gap in _token_gaps_ms(one)],
    }
    taken = _real(point.get("input_tokens"))
    valid = point.get("valid") is not False
    row: dict[str, object] = {
        "tag": run.run.id,
        # A dashboard shows the backend: what no GPU gave, or what its own run calls meaningless, must not look like the rest.
        "backend": "mtpdeploy"
        + (" (simulated)" if run.run.provenance.simulated else "")
        + ("" if valid else " (invalid)"),
        "dataset_name": run.run.provenance.prompts,
        "request_rate": "inf" if asked is None else asked,
        "max_concurrency": point.get("concurrency"),
        "sharegpt_output_len": None,
        "random_input_len": point.get("input_length"),
        "random_output_len": point.get("output_length"),
        "random_range_ratio": None,
        "duration": duration,
        "completed": done,
        "total_input_tokens": point.get("input_tokens"),
        "total_output_tokens": point.get("output_tokens"),
        "total_output_tokens_retokenized": None,
        "request_throughput": _per(_real(done), duration),
        "input_throughput": _per(taken, duration),
        "output_throughput": point.get("output_tok_s"),
        "total_throughput": point.get("total_tok_s"),
    }
    for ours, theirs in (("e2e_ms", "e2e_latency"), ("ttft_ms", "ttft"), ("tpot_ms", "tpot"), (None, "itl")):
        values = sorted(known[theirs])
        told = spread(values)
        row[f"mean_{theirs}_ms"] = within(point, ours, "mean") if ours else told.mean
        row[f"median_{theirs}_ms"] = within(point, ours, "p50") if ours else told.p50
        row[f"std_{theirs}_ms"] = statistics.pstdev(values) if values else None
        if theirs == "itl":
            row["p95_itl_ms"] = quantile(values, 0.95) if len(values) >= 20 else None
        row[f"p99_{theirs}_ms"] = within(point, ours, "p99") if ours else told.p99
    row["concurrency"] = _per(sum(known["e2e_latency"]) / 1000, duration) if known["e2e_latency"] else None
    row["accept_length"] = point.get("accept_length")
    row["simulated"] = run.run.provenance.simulated
    row["valid"] = valid
    return row


def _token_gaps_ms(record: Record) -> Iterator[float]:
    for (earlier, before), (later, after) in pairwise(zip(record.times_us, record.tokens or (), strict=False)):
        if after > before:
            yield from repeat((later - earlier) / 1000 / (after - before), after - before)


def _whole(value: object) -> int:
    return value if isinstance(value, int) else -1


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _per(amount: float | None, seconds: float | None) -> float | None:
    return None if amount is None or not seconds else amount / seconds


def parquet(runs: Sequence[RunShown]) -> bytes:
    """The lines of csv as a Parquet file, with types. UsageError without pyarrow, which is not among what mtpdeploy needs."""
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from pyarrow import parquet as files
    except ImportError as exc:
        raise UsageError(
            "--format parquet needs pyarrow, which is not installed here; csv and json need nothing",
            next_commands=["pip install pyarrow"],
        ) from exc
    rows = list(_rows(runs))
    kinds = {"text": pyarrow.string(), "whole": pyarrow.int64(), "real": pyarrow.float64(), "truth": pyarrow.bool_()}
    names = [*HEAD, *(name for name, _ in COLUMNS)]
    columns = {
        name: pyarrow.array([_typed(row[place], kind) for row in rows], kinds[kind])
        for place, (name, kind) in enumerate((name, _kind(name)) for name in names)
    }
    out = io.BytesIO()
    files.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _kind(name: str) -> str:
    if name in ("simulated", "valid"):
        return "truth"
    if name in TEXTS:
        return "text"
    return "whole" if name in WHOLES else "real"


def _typed(value: object, kind: str) -> object:
    """The value as its column holds it; one of another type (a damaged file) is unknown."""
    if kind == "real":
        return _real(value)
    wanted: dict[str, type] = {"text": str, "whole": int, "truth": bool}
    ok = isinstance(value, wanted[kind]) and (kind == "truth" or not isinstance(value, bool))
    return value if ok else None


def archive(folders: Sequence[Path]) -> bytes:
    """The runs' folders as a .tar.gz that `runs import` takes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not path.is_symlink() and path.suffix != ".part":
                    tar.add(path, arcname=f"{folder.name}/{path.relative_to(folder).as_posix()}", recursive=False)
    return out.getvalue()
