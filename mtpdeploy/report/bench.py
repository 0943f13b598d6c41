"""A benchmark for the terminal: what speaks against the numbers first, then a line a point, then acceptance and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.bench.metrics import NEEDED
from mtpdeploy.bench.values import Point, Spread
from mtpdeploy.report.figures import UNKNOWN, number


def text(answer: BenchAnswer, console: Console) -> None:
    if answer.simulated:
        console.print("simulated: no GPU was measured", style="bold magenta")
    if answer.interrupted:
        console.print("interrupted: only what was complete is counted", style="bold yellow")
    for unlike in answer.not_like_for_like:
        console.print(f"not like for like: {unlike}", style="bold red")
    for point in answer.points:
        for why in point.invalid_because:
            console.print(f"INVALID {name(point, answer.points)}: {why}", style="bold red", soft_wrap=True)
    for point in answer.points:
        for mark in point.marks:
            console.print(f"{name(point, answer.points)}: {mark}", style="yellow", soft_wrap=True)
    for note in answer.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    console.print(table(answer.points))
    _few(answer.points, console)
    _not_steady(answer.points, console)
    _streams(answer.points, console)
    _acceptance(answer.points, console)
    _open_loop(answer.points, console)
    _server(answer.points, console)
    for skipped in answer.meta.get("skipped", ()):
        console.print(f"not measured: {skipped['load']}: {skipped['why']}", style="dim", soft_wrap=True)
    if answer.knee is not None:
        console.print(f"knee (most throughput per latency): {name(answer.knee, answer.points)}")
    if answer.slo:
        best = (
            f"{name(answer.best, answer.points)}, {number(answer.best.output_tok_s)} tok/s"
            if answer.best
            else "none of these points"
        )
        console.print(f"best that keeps {', '.join(map(str, answer.slo))}: {best}")
    route = answer.meta.get("api")
    console.print(
        f"route: {route or UNKNOWN}; chat template: {answer.meta.get('template') or UNKNOWN}",
        style="dim",
        soft_wrap=True,
    )
    console.print(f"records: {answer.path}", style="dim", soft_wrap=True)
    console.print(f"next:\n  mtpdeploy report {answer.run_id}\n  mtpdeploy runs report {answer.run_id}")


def name(point: Point | None, points: Sequence[Point]) -> str:
    """The load in words, with the cap of the answers where `points`, those of the run, have several."""
    if point is None:
        return UNKNOWN
    load = f"concurrency {point.concurrency}"
    if point.process != "closed":
        load = f"{number(point.rate)} requests/s" if point.rate is not None else point.process
    extras = [
        f"input {point.input_length}" if point.input_length else "",
        f"output {point.output_length}" if len({one.output_length for one in points}) > 1 else "",
        f"repeat {point.repeat + 1}" if point.repeat else "",
    ]
    told = ", ".join((load, *(extra for extra in extras if extra)))
    return f"{point.arm}: {told}" if point.arm else told


def table(points: Sequence[Point]) -> Table:
    """A line a point. A dash: unknown, or too few samples."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("load")
    columns = (
        "done",
        "out tok/s",
        "steady",
        "tok/s a req",
        "TTFT p50",
        "p90",
        "ms/token p50",
        "p90",
        "stall p50",
        "max",
        "E2E p50",
        "accept",
    )
    for column in columns:
        made.add_column(column, justify="right")
    for point in points:
        made.add_row(
            Text(name(point, points), style="" if point.valid else "red"),
            f"{point.completed}/{point.requests}",
            number(point.output_tok_s),
            number(point.output_tok_s_steady),
            number(point.request_tok_s.p50),
            number(point.ttft_ms.p50),
            number(point.ttft_ms.p90),
            _tpot(point),
            number(point.tpot_ms.p90),
            number(point.stall_ms.p50),
            number(point.stall_ms.max),
            number(point.e2e_ms.p50),
            number(point.accept_length),
        )
    return made


def _tpot(point: Point) -> str:
    if point.tpot_ms.p50 is None and point.tpot_bounds_ms is not None:
        return f"{number(point.tpot_bounds_ms[0])} to {number(point.tpot_bounds_ms[1])}"
    return number(point.tpot_ms.p50)


def _few(points: Sequence[Point], console: Console) -> None:
    for quantile in ("p90", "p99"):
        short = [point.ttft_ms for point in points if getattr(point.ttft_ms, quantile) is None and point.completed]
        if short:
            most = max(_missing(one, quantile) for one in short)
            console.print(
                f"{quantile}: null where a point has under {NEEDED[quantile]} completed requests; up to {most} more are needed",
                style="dim",
            )


def _not_steady(points: Sequence[Point], console: Console) -> None:
    for why in dict.fromkeys(point.steady.get("why_not") for point in points if point.completed):
        if why:
            console.print(f"steady: no window: {why}", style="dim", soft_wrap=True)


def _missing(one: Spread, quantile: str) -> int:
    return one.missing.get(quantile, 0)


def _streams(points: Sequence[Point], console: Console) -> None:
    """Chunk gaps and tokens per chunk: with speculation a chunk is not a token."""
    for point in points:
        if point.chunk_gap_ms.p50 is None:
            continue
        total = sum(point.tokens_per_chunk.values())
        shares = ", ".join(f"{size}: {count / total:.0%}" for size, count in list(point.tokens_per_chunk.items())[:8])
        console.print(
            f"{name(point, points)}: chunk gap {number(point.chunk_gap_ms.p50)} ms p50, {number(point.chunk_gap_ms.p99)} p99; "
            + (f"tokens a chunk {shares}" if total else "the server gives no token count per chunk"),
            soft_wrap=True,
        )


def _acceptance(points: Sequence[Point], console: Console) -> None:
    told = [point for point in points if point.accept_length is not None]
    for source in dict.fromkeys(point.accept_length_source for point in told):
        console.print(f"accept length from {source}", style="dim", soft_wrap=True)
    for point in told:
        parts = []
        if point.accept_rate is not None:
            parts.append(f"rate {point.accept_rate:.2f} ({point.accept_rate_definition})")
        if point.acceptance_by_position:
            parts.append("by position " + ", ".join(f"{share:.2f}" for share in point.acceptance_by_position))
        if len(point.acceptance_by_class) > 1:
            parts.append(
                "by class "
                + ", ".join(f"{kind} {number(length)}" for kind, length in point.acceptance_by_class.items())
            )
        if parts:
            console.print(f"{name(point, points)}: acceptance {'; '.join(parts)}", soft_wrap=True)


def _open_loop(points: Sequence[Point], console: Console) -> None:
    for point in points:
        if point.process == "closed":
            continue
        console.print(
            f"{name(point, points)}: {point.process} open loop; from the scheduled time: TTFT {number(point.ttft_scheduled_ms.p50)} ms p50, "
            f"{number(point.ttft_scheduled_ms.p90)} p90; sent {number(point.lag_ms.p50)} ms late at p50, {number(point.lag_ms.max)} at most",
            soft_wrap=True,
        )


def _server(points: Sequence[Point], console: Console) -> None:
    for point in points:
        parts = []
        if point.cached_share is not None:
            parts.append(f"{point.cached_share:.1%} of the input from the prefix cache")
        if point.server.get("inter_token_ms_mean") is not None:
            parts.append(f"by the server {number(point.server['inter_token_ms_mean'])} ms a token")
        if point.queue_ms.max is not None:
            parts.append(f"queue {number(point.queue_ms.p50)} ms p50, {number(point.queue_ms.max)} max")
        if point.gpu.get("power_w_mean") is not None:
            parts.append(f"GPU {number(point.gpu['power_w_mean'])} W, {number(point.gpu['memory_used_gb_max'])} GiB")
        if point.gpu.get("energy_j_per_token") is not None:
            parts.append(f"{number(point.gpu['energy_j_per_token'])} J a token ({point.gpu['energy_source']})")
        if point.goodput.get("share") is not None:
            parts.append(
                f"goodput {number(point.goodput['requests_s'])} requests/s ({float(str(point.goodput['share'])):.0%})"
            )
        if parts:
            console.print(f"{name(point, points)}: {'; '.join(parts)}", style="dim", soft_wrap=True)
