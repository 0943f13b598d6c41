"""A log for people: how it ended and why first, then what was in force, then traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from mtpdeploy.actions.logfile import Answer, LogRead, LogsRead, Series
from mtpdeploy.sglang.failures import Diagnosis

_BLOCKS = " ▁▂▃▄▅▆▇█"


def text(answer: Answer, console: Console) -> None:
    if isinstance(answer, Series):
        plot(answer, console)
        return
    if isinstance(answer, LogsRead):
        for i, log in enumerate(answer.logs):
            if i:
                console.print()
            _one(log, console)
        return
    _one(answer, console)


def _one(log: LogRead, console: Console) -> None:
    s = log.summary
    if s.is_sglang is not True:
        said = "is empty" if s.is_sglang is None else "is not the log of an SGLang server"
        console.print(Text(f"{log.file} {said}", style="yellow"), soft_wrap=True)
        return
    style = {"crashed": "bold red", "hung": "bold red", "ready": "bold green", "serving": "bold green"}.get(
        s.phase, "bold"
    )
    head = f"{log.file}: {s.phase.replace('_', ' ')}"
    if s.cause:
        head += f" — {s.cause.replace('_', ' ')}" + (f" in {s.failed_in.replace('_', ' ')}" if s.failed_in else "")
    console.print(Text(head, style=style), soft_wrap=True)
    if s.simulated:
        console.print(Text("This server was SIMULATED.", style="bold yellow"))
    if s.boots > 1:
        console.print(f"  {s.boots} boots in this log; what follows is the last one's")
    if log.diagnosis is not None:
        diagnosis_text(log.diagnosis, console)
    for label, value in _facts(log):
        console.print(Text.assemble((f"  {label:<18}", "dim"), value), soft_wrap=True)


def diagnosis_text(d: Diagnosis, console: Console) -> None:
    """Cause, evidence, remedy, next commands: also what a failed deploy prints."""
    console.print(f"  {d.meaning}", soft_wrap=True)
    for line in d.evidence:
        console.print(Text(f"  | {line}", style="red"), soft_wrap=True)
    for fact in d.facts:
        console.print(f"  fact: {fact}", soft_wrap=True)
    settings = " ".join(f"{k}={v}" for k, v in d.remedy.set.items())
    console.print(
        Text.assemble(("  try: ", "bold"), f"{settings}  ({d.remedy.why})" if settings else d.remedy.why),
        soft_wrap=True,
    )
    if d.consequences:
        console.print(
            Text(
                f"  {len(d.consequences)} line(s) are only consequences, such as: {d.consequences[0][:160]}",
                style="dim",
            ),
            soft_wrap=True,
        )
    for command in d.next_commands:
        console.print(f"  next: {command}", soft_wrap=True)
    console.print(f"  page: docs/runbooks/{d.runbook}.md", soft_wrap=True)


def _gb(value: object) -> str:
    return "?" if value is None else f"{value} GB"


def _facts(log: LogRead) -> list[tuple[str, str]]:
    s = log.summary
    rows: list[tuple[str, str]] = []
    if s.warnings:
        rows.append(("warnings", ", ".join(w.replace("_", " ") for w in s.warnings)))
    if s.weights:
        rows.append(("weights", _load(s.weights)))
    if s.draft:
        rows.append(
            ("draft", _load(s.draft) + (f", {s.draft.get('kv_tokens')} KV tokens" if s.draft.get("kv_tokens") else ""))
        )
    if s.mamba_cache:
        m = s.mamba_cache
        each = f", {s.slots_per_request} a request" if s.slots_per_request else ""
        extra = f", intermediate {_gb(m.get('intermediate_gb'))}" if m.get("intermediate_gb") is not None else ""
        rows.append(
            ("state slots", f"{m.get('slots')}{each}; conv {_gb(m.get('conv_gb'))}, ssm {_gb(m.get('ssm_gb'))}{extra}")
        )
    for label, pool in (("KV cache", s.kv_cache), ("sliding window", s.swa_cache)):
        if pool:
            size = (
                _gb(pool.get("size_gb"))
                if pool.get("size_gb") is not None
                else f"K {_gb(pool.get('k_gb'))}, V {_gb(pool.get('v_gb'))}"
            )
            rows.append(
                (label, f"{pool.get('tokens')} tokens; {size}" + (f"; {pool['dtype']}" if pool.get("dtype") else ""))
            )
    rows += [
        ("CUDA graphs", f"{graph.get('kind')}: {graph.get('elapsed_s')} s, {_gb(graph.get('mem_gb'))}")
        for graph in s.graphs
    ]
    asked = (s.server_args or {}).get("max_running_requests")
    if s.max_running_requests is not None:
        told = f"{s.max_running_requests}" + (
            f" (asked for {asked})" if asked not in (None, s.max_running_requests) else ""
        )
        rows.append(("running requests", told))
    if s.max_total_num_tokens is not None:
        rows.append(
            (
                "at the end",
                f"{s.max_total_num_tokens} KV tokens, context {s.context_len}, {_gb(s.available_gpu_mem_gb)} free",
            )
        )
    rows.extend(_traffic(s.decode, s.retractions))
    return rows


def _load(load: Mapping[str, object]) -> str:
    took = f" in {load['elapsed_s']} s" if load.get("elapsed_s") is not None else ""
    quant = f" ({load['quant']})" if load.get("quant") else ""
    return f"{load.get('type') or '?'}{quant}: {_gb(load.get('mem_gb'))}{took}, {_gb(load.get('avail_gb'))} free after"


def _traffic(decode: Mapping[str, object], retractions: int) -> list[tuple[str, str]]:
    if not decode.get("count"):
        return []
    last = decode.get("last")
    rows = [("decode records", str(decode["count"]) + (f", {retractions} retractions" if retractions else ""))]
    if isinstance(last, Mapping):
        rows.append(
            ("last", ", ".join(f"{k} {v}" for k, v in last.items() if v is not None and k not in ("time", "rank")))
        )
    if decode.get("accept_len_min") is not None:
        rows.append(("accept length", f"{decode['accept_len_min']} to {decode['accept_len_max']} tokens a step"))
    return rows


# -- the series in a terminal ------------------------------------------------------------------------------------------------

_CURVES = (
    ("gen_throughput", "tok/s"),
    ("running_req", "running"),
    ("queue_req", "queued"),
    ("accept_len", "accept length"),
    ("full_token_usage", "KV use"),
    ("token_usage", "KV use"),
    ("mamba_usage", "state use"),
)


def plot(series: Series, console: Console) -> None:
    """One line a curve: time runs to the right, each column the mean of its records."""
    if not series.rows:
        console.print("no decode records")
        return
    width = max(20, min(100, console.width - 42))
    first, last = series.rows[0]["time"], series.rows[-1]["time"]
    console.print(f"{len(series.rows)} decode records, {first or '?'} to {last or '?'}", soft_wrap=True)
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for column, label in _CURVES:
        values = [v for row in series.rows if isinstance(v := row[column], (int, float)) and not isinstance(v, bool)]
        if not values:
            continue
        console.print(
            Text(
                f"{label:>14} {sparkline(values, width, ascii_only)}  {min(values):g} … {max(values):g}, last {values[-1]:g}"
            ),
            no_wrap=True,
            crop=False,
        )


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """`values` squeezed into at most `width` columns from 0 to their largest."""
    columns = min(width, len(values))
    means = []
    for i in range(columns):
        part = values[
            i * len(values) // columns : max((i + 1) * len(values) // columns, i * len(values) // columns + 1)
        ]
        means.append(sum(part) / len(part))
    top = max(means)
    marks = " .:-=+*#@" if ascii_only else _BLOCKS
    return "".join(marks[0 if top <= 0 else round(max(0.0, m) / top * (len(marks) - 1))] for m in means)
