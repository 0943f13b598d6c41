"""The figures of runs in the forms that other tools read."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from mtpdeploy.actions.runs import RunShown
from mtpdeploy.report.figures import load, number, within

FORMATS = ("md", "csv", "json", "bench-serving")

# column → where it stands in a point
COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("arm", ("arm",)),
    ("concurrency", ("concurrency",)),
    ("rate", ("rate",)),
    ("repeat", ("repeat",)),
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
            *((name, "_ms", ("p50", "p90", "p99", "max")) for name in ("ttft", "tpot", "chunk_gap", "stall", "e2e")),
        )
        for share in shares
    ),
    ("accept_length", ("accept_length",)),
    ("accept_length_source", ("accept_length_source",)),
    ("valid", ("valid",)),
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
    title = f"## {_cell(said.profile or run.run.id)} on {_cell(said.host or said.endpoint or 'unknown host')}"
    lines = [title, ""]
    if run.simulated:
        lines += ["**Simulated: no GPU was measured.**", ""]
    lines += [f"- not like for like: {_cell(one)}" for one in run.not_like_for_like]
    facts = (
        ("run", run.run.id),
        ("measured", run.run.created_utc),
        ("GPU", said.gpu),
        ("SGLang", said.sglang_version),
        ("model", said.model),
        ("workload", said.workload),
        ("client", said.client_place),
    )
    lines += [f"- {name}: {_cell(value)}" for name, value in facts if value is not None]
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
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    """Text that cannot break out of a Markdown table, nor become a tag."""
    text = " ".join(str(value).split())
    for sign in "\\|`*_[]<>":
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text


def _csv(runs: Sequence[RunShown]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(
        ["run_id", "created_utc", "host", "profile", "workload", "simulated", *(name for name, _ in COLUMNS)]
    )
    for run in runs:
        said = run.run.provenance
        head = (run.run.id, run.run.created_utc, said.host, said.profile, said.workload, run.simulated)
        for point in run.points:
            table.writerow([_plain(value) for value in (*head, *(within(point, *path) for _, path in COLUMNS))])
    return out.getvalue()


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
    """Rows as `sglang.bench_serving --output-file` appends them (benchmark/serving.py of 0.5.23), one a point.

    itl there is the time between tokens, so it is filled from tpot; what we don't measure that way is null.
    """
    rows = []
    for point in run.points:
        asked, done = point.get("rate"), point.get("completed")
        duration = point.get("duration_s")
        per_s = done / duration if isinstance(done, int) and isinstance(duration, (int, float)) and duration else None
        row: dict[str, object] = {
            "tag": run.run.id,
            "backend": "mtpdeploy",
            "dataset_name": run.run.provenance.prompts,
            "request_rate": "inf" if asked is None else asked,
            "max_concurrency": point.get("concurrency"),
            "duration": duration,
            "completed": done,
            "total_input_tokens": point.get("input_tokens"),
            "total_output_tokens": point.get("output_tokens"),
            "request_throughput": per_s,
            "output_throughput": point.get("output_tok_s"),
            "accept_length": point.get("accept_length"),
        }
        for ours, theirs in (("e2e", "e2e_latency"), ("ttft", "ttft"), ("tpot", "tpot"), ("tpot", "itl")):
            for share, name in (
                ("mean", f"mean_{theirs}_ms"),
                ("p50", f"median_{theirs}_ms"),
                ("p99", f"p99_{theirs}_ms"),
            ):
                row[name] = within(point, f"{ours}_ms", share)
        rows.append(row)
    return rows
