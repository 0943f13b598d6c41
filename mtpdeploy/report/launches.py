"""Launches for people: the word first, then why, then what to type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtpdeploy.actions.deploy import Deployed
from mtpdeploy.actions.doctor import Examined
from mtpdeploy.actions.launches import HostAnswer, Status
from mtpdeploy.actions.plan import Planned, Plans
from mtpdeploy.errors import MtpError
from mtpdeploy.hosts.fanout import Outcomes
from mtpdeploy.report.errors import text as error_text

_STYLES = {
    "ready": "green",
    "unchanged": "green",
    "starting": "cyan",
    "started": "cyan",
    "running": "green",
    "stopped": "dim",
    "not deployed": "dim",
    "degraded": "yellow",
    "unknown": "yellow",
    "crashed": "bold red",
    "stale": "bold red",
}
_MARKS = {True: "yes", False: "NO", None: "unknown"}
T = TypeVar("T")


def _line(console: Console, *parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble(*parts), soft_wrap=True)


def _all(answer: T | Outcomes[Any], console: Console, one: Callable[[T, Console], None]) -> None:
    if not isinstance(answer, Outcomes):
        one(answer, console)
        return
    for host, said in answer.by_host.items():
        if isinstance(said, MtpError):
            _line(console, (host, "bold"))
            error_text(said, console)
        else:
            one(said, console)


def _word(word: str) -> tuple[str, str]:
    return word, _STYLES.get(word, "")


def _version(result: Mapping[str, Any]) -> str:
    return f"{result.get('sglang_version') or 'unknown'}{_simulated(result.get('simulated'))}"


def _simulated(yes: object) -> str:
    return " (simulated)" if yes else ""


# ---------------------------------------------------------------- deploy


def deployed(answer: Deployed | Outcomes[Deployed] | Planned | Plans, console: Console) -> None:
    if isinstance(answer, (Planned, Plans)):
        from mtpdeploy.report.plan import text as plan_text

        plan_text(answer, console)
        return
    _all(answer, console, _deployed)


def _deployed(answer: Deployed, console: Console) -> None:
    told = answer.as_json()
    _line(
        console, (answer.host, "bold"), ": ", _word(answer.outcome), f"  {answer.profile} as {answer.service}",
        f", launch {answer.launch_id}, boot {told['boot']}", _simulated(told["simulated"]),
    )  # fmt: skip
    _fact(console, "url", told["url"])
    if told["supervisor"]:
        _fact(console, "supervisor", f"{told['supervisor']}: {told['supervisor_why'] or ''}".rstrip(": "))
    generation = told["generation"]
    if isinstance(generation, Mapping):
        _fact(
            console,
            "proven by",
            f"{generation['tokens']} tokens from {generation['endpoint']} in {generation['latency_ms']} ms",
        )
    _fact(console, "sglang", _version(told))
    if answer.summary is not None:
        _capacity(console, answer.summary.as_json())
    _memory(console, answer)
    for note in answer.notes:
        _line(console, ("  note: ", "dim"), note)
    findings = told["findings"]
    for finding in findings if isinstance(findings, list) else ():
        _line(console, ("  warning: ", "yellow"), f"{finding['what']} ({finding['why']})")
    _line(
        console, ("  next: ", "dim"), f"mtpdeploy verify --host {answer.host}    mtpdeploy bench --host {answer.host}"
    )


def _memory(console: Console, answer: Deployed) -> None:
    """The budget beside the log, where both say something."""
    rows = [c for c in answer.memory if c.predicted is not None and c.actual is not None]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2), header_style="dim")
    table.add_column("memory")
    table.add_column("predicted", justify="right")
    table.add_column("actual", justify="right")
    for row in rows:
        figures = (
            "" if n is None else f"{n:,.0f}" if float(n).is_integer() else f"{n:,.2f}"
            for n in (row.predicted, row.actual)
        )
        table.add_row(row.name, *figures)
    console.print(table)


def _capacity(console: Console, summary: Mapping[str, Any]) -> None:
    running = summary.get("max_running_requests")
    tokens = summary.get("max_total_num_tokens")
    parts = [
        f"{running} requests at a time" if running is not None else None,
        f"{tokens:,} KV tokens" if isinstance(tokens, int) else None,
    ]
    if text := ", ".join(part for part in parts if part):
        _fact(console, "capacity", text)


_PORT = {True: "free", False: "still taken by something else: mtpdeploy status", None: None}


def _fact(console: Console, name: str, value: object) -> None:
    if value not in (None, ""):
        _line(console, (f"  {name:<11}", "dim"), str(value))


# ---------------------------------------------------------------- status


def status(answer: Status | Outcomes[Status], console: Console) -> None:
    _all(answer, console, _status)


def _status(answer: Status, console: Console) -> None:
    r = answer.result
    phase = f" ({answer.progress.text})" if answer.progress else ""
    why = f": {r['why']}" if r.get("why") else ""
    _line(console, (answer.host, "bold"), ": ", _word(r["word"]), phase, why, _simulated(r.get("simulated")))
    if r.get("launch_id"):
        boots = f", boot {r['boot']}" if r.get("boot") else ""
        restarts = f", {r['restarts']} restarts" if r.get("restarts") else ""
        _fact(console, "launch", f"{r['launch_id']} {r['profile']}{boots}{restarts}")
        _fact(console, "sglang", _version(r))
        _fact(console, "url", r.get("url"))
        _fact(console, "supervisor", r.get("supervisor"))
        _fact(console, "since", r.get("since_utc") if r.get("main_pid") else None)
        _fact(console, "requests", _requests(r.get("health") or {}))
        _fact(console, "gpu", _gpus(r))
        _fact(console, "log", (r.get("log") or {}).get("path"))
    if lock := r.get("lock"):
        _fact(
            console,
            "lock",
            f"{lock['state']}: {lock.get('client')} since {lock.get('since_utc')} for {lock.get('why')}",
        )
    if answer.with_proof:
        for proof in r.get("proof") or ():
            style = {True: "green", False: "bold red"}.get(proof["holds"], "yellow")
            _line(
                console, (f"  {_MARKS[proof['holds']]:<8}", style), f"{proof['check']}: ",
                proof["found"] if proof["holds"] else f"expected {proof['expected']}, found {proof['found']}",
            )  # fmt: skip
    for note in r.get("notes") or ():
        _line(console, ("  note: ", "yellow"), str(note))
    for command in r.get("next_commands") or ():
        _line(console, ("  next: ", "dim"), _at(command, answer.host))


def _at(command: str, host: str) -> str:
    """The agent's next command with the host that it does not know the name of."""
    words, sep, comment = command.partition("   #")
    return (
        f"{words} --host {host}{sep}{comment}" if words.startswith("mtpdeploy ") and "--host" not in words else command
    )


def _requests(health: Mapping[str, Any]) -> str | None:
    if health.get("running") is None:
        return None
    return f"{health['running']} running, {health['queued']} queued"


def _gpus(result: Mapping[str, Any]) -> str | None:
    rows = [
        f"{gpu['index']}: {gpu['used_gb']:.1f} of {gpu['memory_gb']:.1f} GiB used"
        for gpu in result.get("gpus") or ()
        if gpu.get("used_gb") is not None and gpu.get("memory_gb") is not None
    ]
    return "; ".join(rows) or None


# ---------------------------------------------------------------- doctor


def doctor(answer: Examined | Outcomes[Examined], console: Console) -> None:
    _all(answer, console, _doctor)


def _doctor(answer: Examined, console: Console) -> None:
    facts = answer.facts
    for_profile = f", for {answer.profile}" if answer.profile else ""
    _line(console, (answer.host, "bold"), f": {facts.get('os')}, user {facts.get('user')}{for_profile}")
    for finding in answer.findings:
        mark, style = {
            True: ("ok", "green"),
            False: ("NO", "bold red") if finding["severity"] == "refuse" else ("warn", "yellow"),
            None: ("?", "yellow"),
        }[finding["ok"]]
        _line(console, (f"  {mark:<5}", style), f"{finding['check']}: {finding['what']}")
        if finding["ok"] is not True:
            _line(console, (f"       {finding['why']}", "dim"))
            if finding["type"]:
                _line(console, f"       type: {finding['type']}")


# ---------------------------------------------------------------- the rest


def text(answer: HostAnswer | Outcomes[HostAnswer], console: Console) -> None:
    _all(answer, console, _answer)


def _answer(answer: HostAnswer, console: Console) -> None:
    {
        "stop": _stopped,
        "start": _started,
        "rollback": _started,
        "history": _history,
        "prune": _pruned,
        "unlock": _unlocked,
        "adopt": _adopted,
    }[answer.verb](answer.host, answer.result, console)


def _stopped(host: str, r: Mapping[str, Any], console: Console) -> None:
    if r.get("already"):
        _line(
            console,
            (host, "bold"),
            ": ",
            _word("stopped"),
            f" already, launch {r['launch_id']}",
            _simulated(r.get("simulated")),
        )
        return
    if not r["stopped"]:
        _line(console, (host, "bold"), ": ", ("not stopped completely", "bold red"), f", launch {r['launch_id']}")
        for one in r["left"]:
            held = f", {one['gpu_gb']:.1f} GiB of GPU memory" if one["gpu_gb"] else ""
            _line(console, f"  pid {one['pid']}, state {one['state']}{held}: {one['command']}")
            _line(console, ("  type: ", "dim"), one["hint"])
        return
    how = "drained" if r["drained"] else "killed after the drain limit"
    said = f" in {r['seconds']:.1f} s ({how}), launch {r['launch_id']}"
    _line(console, (host, "bold"), ": ", _word("stopped"), said, _simulated(r.get("simulated")))
    if r["killed"]:
        _fact(console, "left over", f"killed pids {', '.join(map(str, r['killed']))}")
    _fact(console, "port", _PORT[r["port_free"]])
    if r["gpu_freed_gb"]:
        _fact(console, "gpu memory", f"{r['gpu_freed_gb']:.1f} GiB came back")


def _started(host: str, r: Mapping[str, Any], console: Console) -> None:
    word = str(r["outcome"])
    _line(
        console,
        (host, "bold"),
        ": ",
        _word(word),
        f"  launch {r['launch_id']}, boot {(r.get('status') or r).get('boot')}",
        _simulated(r.get("simulated")),
    )
    _fact(console, "why", r.get("why"))
    _fact(console, "url", (r.get("status") or {}).get("url"))
    _fact(console, "supervisor", r.get("supervisor"))


def _history(host: str, r: Mapping[str, Any], console: Console) -> None:
    _line(console, (host, "bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "LAUNCH", "STATE", "PROFILE", "SGLANG", "BOOTS", "ENDED", "BY"):
        table.add_column(column, overflow="fold")
    for row in r["releases"]:
        table.add_row(
            "*" if row.get("current") else "",
            row["launch_id"],
            Text(row["state"], style=_STYLES.get(row["state"], "")),
            str(row.get("profile") or ""),
            f"{row.get('sglang_version') or ''}{' (simulated)' if row.get('simulated') else ''}",
            str(row.get("boots", "")),
            _ended(row),
            str(row.get("by") or ""),
        )
    console.print(table if r["releases"] else "  nothing was ever deployed", soft_wrap=False)
    for act in r.get("acts") or ():
        _line(
            console,
            (f"  {act['utc']}  ", "dim"),
            f"{act['act']} by {act['client']} {act.get('launch_id') or ''} {act.get('why') or ''}",
        )


def _ended(row: Mapping[str, Any]) -> str:
    if stop := row.get("stop"):
        return f"{stop.get('why')}"
    ended = row.get("exit")
    if not ended:
        return ""
    return f"signal {ended['signal']}" if ended.get("signal") else f"exit {ended.get('status')}"


def _pruned(host: str, r: Mapping[str, Any], console: Console) -> None:
    verb = "would remove" if r.get("dry_run") else "removed"
    _line(console, (host, "bold"), f": {verb} {len(r['removed'])} releases")
    for launch_id in r["removed"]:
        _line(console, f"  {launch_id}")
    if agents := r.get("agents"):
        _line(console, f"  and {len(agents)} agents of earlier versions")


def _unlocked(host: str, r: Mapping[str, Any], console: Console) -> None:
    lock = r.get("lock")
    whose = f" of {lock['client']} ({lock['why']}, since {lock['since_utc']})" if lock else ""
    _line(console, (host, "bold"), f": removed the lock{whose}" if r["removed"] else ": there is no lock")


def _adopted(host: str, r: Mapping[str, Any], console: Console) -> None:
    _line(
        console,
        (host, "bold"),
        f": pid {r['pid']} is launch {r['launch_id']} from now on: ",
        _word(r["status"]["word"]),
    )
    _fact(console, "log", r["log"] or "none that could be linked: `logs` will show nothing")
