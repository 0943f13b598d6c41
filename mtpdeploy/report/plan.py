"""A plan for people: what will run first, then what it costs, what to know, what to change."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.plan import Planned, Plans
from mtpdeploy.errors import MtpError
from mtpdeploy.inventory import NO_HOST
from mtpdeploy.inventory.values import as_sets
from mtpdeploy.plan import Plan
from mtpdeploy.report.errors import text as error_text
from mtpdeploy.sglang.memory import Budget, Suggestion

_WORDS = {"refuse": "would not start", "warn": "warning", "note": "note"}


WAYS = 5  # of a wanted concurrency, cheapest first


def text(answer: Planned | Plans, console: Console) -> None:
    if isinstance(answer, Planned):
        _one(answer, console)
        return
    for name, each in answer.hosts.items():
        console.print(Text(f"== {name}", style="bold"))
        if isinstance(each, MtpError):
            error_text(each, console)
        else:
            _one(each, console)
        console.print()


def _one(answer: Planned, console: Console) -> None:
    plan = answer.plan
    _head(plan, console)
    _section(console, "Command")
    console.print(_command(plan), soft_wrap=True, highlight=False)
    if plan.env:
        _section(console, "Environment")
        for name, value in plan.masked_env().items():
            console.print(f"{name}={shlex.quote(value)}", soft_wrap=True, highlight=False)
    _section(console, "Files of the release")
    for file in plan.files():
        secret = "  holds a secret: not shown" if file.secret else ""
        console.print(f"{file.mode:04o}  {file.path}{secret}", highlight=False)
    _section(console, "Steps")
    for number, step in enumerate(plan.steps, 1):
        console.print(f"{number}. {step.do}", soft_wrap=True, highlight=False)
        console.print(f"   because {step.why}", style="dim", soft_wrap=True, highlight=False)
    _section(console, "Memory of one GPU (GiB)")
    if plan.budget:
        memory_table(plan.budget, console)
    else:
        console.print(f"not computed: {plan.known.no_memory_because}", soft_wrap=True)
    if plan.findings:
        _section(console, "Findings")
        for finding in plan.findings:
            style = {"refuse": "red", "warn": "yellow"}.get(finding.severity, "")
            console.print(Text(f"{_WORDS[finding.severity]}: ", style=style) + Text(finding.message), soft_wrap=True)
    if plan.budget and plan.budget.suggestions and answer.fit is None:
        _section(console, "What would change it (each line is one set: all of it, or nothing)")
        for suggestion in plan.budget.suggestions:
            _suggestion(suggestion, console)
    if answer.fit:
        fit = answer.fit
        _section(console, f"{fit.requests} requests of {fit.tokens_per_request:,} tokens at once")
        if fit.set is None or not fit.set:
            console.print(fit.effect, soft_wrap=True)
        for way in fit.ways[:WAYS]:
            _suggestion(way, console)
        if len(fit.ways) > WAYS:
            console.print(f"{len(fit.ways) - WAYS} more ways in --json", style="dim")
    if plan.budget:
        _section(console, "Assumed")
        for line in plan.budget.assumptions:
            console.print(f"- {line}", soft_wrap=True, highlight=False)
    if plan.notes:
        _section(console, "Notes")
        for line in plan.notes:
            console.print(f"- {line}", soft_wrap=True, highlight=False)


def _head(plan: Plan, console: Console) -> None:
    what = f"profile {plan.deployment.profile}" if plan.deployment.profile else "the command as it stands"
    where = f" on {plan.deployment.host.name}" if plan.deployment.host is not NO_HOST else ""
    simulated = " (simulated)" if plan.known.simulated else ""
    console.print(
        Text(f"Plan: {what}{where}{simulated}, SGLang {plan.version} ({plan.known.version_source})", style="bold"),
        soft_wrap=True,
    )


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _command(plan: Plan) -> str:
    """One option a line, ready to paste; the API key's file is named and not opened."""
    words = list(plan.argv)
    if plan.secrets:
        words += ["--config", "server.yml"]
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return " \\\n    ".join(lines)


def memory_table(budget: Budget, console: Console) -> None:
    """The budget top down, as the log will tell it after the launch."""
    p = budget.pools
    s = p.settings
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")

    def row(name: str, value: str, why: str = "") -> None:
        table.add_row(name, value, why)

    row("free before the load", f"{p.pre_load_gb:.2f}")
    row("weights", f"{p.weights_gb:.2f}", s.quantization or "")
    if s.algorithm:
        row(
            "draft weights",
            f"{p.draft_weights_gb:.2f}",
            f"{p.released_gb:.2f} of it come free later" if p.released_gb else "",
        )
    row(f"left to graphs and activations (fraction {s.fraction:.3g})", f"{p.slack_gb:.2f}")
    if p.slots is not None:
        row(
            "state slots",
            f"{p.conv_gb + p.ssm_gb:.2f}",
            f"{max(p.slots, 0)} of {p.state_bytes_per_slot / 2**20:.1f} MiB, {s.ssm_dtype}",
        )
        if s.algorithm:
            row(
                "intermediate states",
                f"{p.intermediate_ssm_gb + p.intermediate_conv_gb:.2f}",
                f"{p.max_running} + 1 requests × {s.allocated_draft_tokens} draft tokens",
            )
            if p.reserved_intermediate_gb > 1.5 * (p.intermediate_ssm_gb + p.intermediate_conv_gb) + 0.1:
                row(
                    "  set aside for them",
                    f"{p.reserved_intermediate_gb:.2f}",
                    f"for {s.requested_running} requests; the rest stays unused",
                )
    row("KV cache", f"{p.k_gb + p.v_gb:.2f}", f"{p.kv_tokens:,} tokens of {p.kv_bytes_per_token / 1024:.0f} KiB")
    if p.draft_kv_gb:
        row("draft's KV cache", f"{p.draft_kv_gb:.2f}", "out of what is left to graphs")
    row("CUDA graphs", f"{p.graph_reserve_gb:.2f}", "estimate")
    row("free at the end", f"{p.avail_end_gb:.2f}", "for activations")
    console.print(table)
    limit = {
        "state_slots": f"the state slots ({p.slots} // {p.slots_per_request} per request)",
        "max_running_requests": f"max_running_requests{' (the default under speculation)' if s.running_is_default else ''}",
        "kv_tokens": "the KV cache",
        "sglang_default": "SGLang's own default",
    }[p.bound_by]
    console.print(
        Text(f"{p.max_running} request{'' if p.max_running == 1 else 's'} at once", style="bold")
        + Text(f", limited by {limit}; {p.tokens_per_request:,} KV tokens for each"),
        soft_wrap=True,
    )


def _suggestion(suggestion: Suggestion, console: Console) -> None:
    cost = ""
    if suggestion.cost_gb is not None:
        cost = f" [{'costs' if suggestion.cost_gb >= 0 else 'gives back'} {abs(suggestion.cost_gb):.1f} GB of states]"
    console.print(as_sets(suggestion.set), soft_wrap=True, highlight=False)
    console.print(f"   {suggestion.effect}{cost}", style="dim", soft_wrap=True, highlight=False)
