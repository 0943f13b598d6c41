"""Changes what runs: deploy, start, stop, rollback. Each under the lock, each with its intent written down first.

Killed at any moment, the old state or the new one is there: a release is written beside the others, the old server is
stopped only when the new one is known to fit, and `current` moves in one step. intent.json lies there while a change is under
way; if it is still there afterwards, the change was interrupted, and `status` says where.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

from mtpdeploy.agent import ending, facts, files, installed, journal, lock, preflight, process, release, supervisor
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.command import Root
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.protocol import (
    DeployRequest,
    DeployResult,
    Facts,
    Finding,
    Needs,
    ProbeSpec,
    RollbackRequest,
    StartRequest,
    StatusResult,
    StopRequest,
    StopResult,
)
from mtpdeploy.agent.release import Release, Service
from mtpdeploy.agent.status import dead_schedulers, status
from mtpdeploy.agent.stream import Stream

_LOOK_AGAIN_S, _LOOK_AGAIN_EACH_S = 12.0, 0.5


@contextlib.contextmanager
def changing(
    service: Service, stream: Stream, client: str, act: str, launch_id: str | None, why: str = ""
) -> Iterator[None]:
    """The frame of every change: lock, intent, journal. The intent goes when the change ended, well or with a Fault."""
    service.prepare()
    with lock.held(service, client, why or act, full_disk_too=act == "stop") as note:
        if note:
            stream.note(note)
        for name in release.sweep(service):
            stream.note(f"removed {name}, left by an interrupted install")
        left = files.read_json(service.folder / "intent.json")
        if left and isinstance(left, dict):
            stream.note(
                f"an earlier {left.get('act')} by {left.get('client')} was interrupted {left.get('at')}; going on from there"
            )
        try:
            mark(service, act=act, client=client, launch_id=launch_id, at="before anything was changed")
            if act != "stop":
                files.keep_reserve(service.folder)
                journal.write(service, act, client, launch_id=launch_id, why=why)
        except OSError as error:
            if act != "stop":  # a full disk must not forbid a stop
                raise files.explain(error, f"recording the {act}") from None
        try:
            yield
        except Fault:
            _forget(service)
            raise
        _forget(service)


def _forget(service: Service) -> None:
    with contextlib.suppress(OSError):
        os.unlink(service.folder / "intent.json")


def mark(service: Service, *, at: str, **fields: Any) -> None:
    """Writes down how far a change has come. OSError if it cannot."""
    path = service.folder / "intent.json"
    before = files.read_json(path) if not fields else {}
    files.replace_json(path, {**(before if isinstance(before, dict) else {}), **fields, "at": at, "utc": utc_now()})


def _step(service: Service, at: str) -> None:
    """`mark` in the middle of a change, where going on is safer than stopping."""
    with contextlib.suppress(OSError):
        mark(service, at=at)


# ---------------------------------------------------------------- deploy


def deploy(service: Service, stream: Stream, request: DeployRequest) -> DeployResult:
    """One exec from lock to start; see DeployRequest."""
    client = str(request.get("client") or "unknown")
    spec: ProbeSpec = request.get("probe") or {}
    root = Root(request.get("sudo_password"))
    asked = request.get("release")
    service.check()
    if (same := _already(service, stream, request, spec)) is not None:
        return same
    if asked is None or request.get("files") is None:
        if (held := lock.read(service)) and held["state"] != "stale":
            raise Fault(
                "host-locked",
                f"{service.name} is being changed: {lock.describe(held)}",
                next_commands=["mtpdeploy status", "mtpdeploy unlock --break-lock   # only if that deploy hangs"],
                details={"lock": held},
                runbook="half-finished-deploy",
            )
        return DeployResult(outcome="needs-files", facts=facts.read(service.workdir, spec, root))
    if asked.get("fingerprint") != request.get("fingerprint"):
        raise Fault("usage-error", "the release's fingerprint is not the request's")
    with changing(service, stream, client, "deploy", asked["launch_id"], f"profile {asked['profile']}"):
        if (same := _already(service, stream, request, spec)) is not None:
            return same
        _refuse_to_disturb(service, client, bool(request.get("force")))
        stream.step("look at the host", "what would make the launch fail is found before anything is stopped")
        known = facts.read(service.workdir, spec, root)
        findings = _preflight(
            service, known, spec, request.get("needs") or {}, asked["host"], bool(request.get("skip_preflight"))
        )
        choice = supervisor.choose(asked["supervisor"], known["supervisors"], root)
        stream.step(f"supervisor {choice.kind}", choice.why)
        stream.step(f"write release {asked['launch_id']}", f"beside the others in {service.releases}")
        fresh = release.install(service, asked, request.get("files") or [], supervisor.file_values(service.folder))
        previous = service.current()
        _step(service, "while the old server was being stopped")
        _stop_all(service, stream, root, client, f"replaced by launch {fresh.launch_id}", request, spare=fresh)
        if previous is not None:
            supervisor.retire(previous, choice.kind, root)
        _step(service, "after the old server was stopped and before the new one was started")
        release.flip(fresh)
        boot = _start(fresh, stream, choice, root, previous)
        if keep := int(request.get("keep") or 0):
            prune(service, keep)
        return _started(fresh, choice, boot, previous, known, findings)


def _already(service: Service, stream: Stream, request: DeployRequest, spec: ProbeSpec) -> DeployResult | None:
    """The answer if the same thing runs already: equal fingerprint, ready or on its way, same SGLang installed.

    Fault `not-ready` if it runs, is degraded, and nothing shows that it is broken: a server that is only slow is never torn down
    by a deploy that has nothing to change.
    """
    if request.get("force"):
        return None
    current = service.current()
    if current is None or current.read()["fingerprint"] != request.get("fingerprint"):
        return None
    found = _settled(service, stream, current)
    if found is None:
        return None
    expected = request.get("expect_version")
    if expected and (python := spec.get("python")):
        env = {str(k): str(v) for k, v in (spec.get("env") or {}).items()}
        if installed.version(service.workdir, python, env) != expected:
            return None
    why = "the same command, environment and files run already"
    return DeployResult(
        outcome="starting" if found["word"] == "starting" else "unchanged",
        why=f"{why}, {found['word']}: {found['why']}" if found["word"] == "degraded" else why,
        launch_id=current.launch_id,
        boot=found["boot"],
        supervisor=found["supervisor"],
        log=_log_place(current, current.last_boot() or {}),
        status=found,
    )


def _settled(service: Service, stream: Stream, current: Release) -> StatusResult | None:
    """The state of a launch that is to be left alone; None if it does not run, or is broken and may be replaced.

    What may pass by itself (a long prefill, a full queue, a look between two states) is looked at again for _LOOK_AGAIN_S.
    """
    deadline = time.monotonic() + _LOOK_AGAIN_S
    told = None
    while True:
        found = status(service, launch_id=current.launch_id, with_gpus=False)
        late = time.monotonic() >= deadline or stream.gone.is_set()
        if found["word"] in ("ready", "starting"):
            return found
        if found["word"] != "degraded" or _broken(current, found, late):
            return None
        if found["health"].get("status") == 200 and current.supervisor() is None and found["identity"] == "ours":
            kind = found["supervisor"]
            if kind in ("tmux", "detached"):
                stream.note(f"{found['why']}. `mtpdeploy restart` gives it one; a deploy of the same does not stop it")
                return found
        if late:
            raise Fault(
                "not-ready",
                f"launch {current.launch_id} is the same and has been degraded for {_LOOK_AGAIN_S:.0f} s: {found['why']}. "
                "It may only be busy, so nothing was touched",
                next_commands=[
                    "mtpdeploy logs",
                    "mtpdeploy status --generate",
                    "mtpdeploy restart",
                    "mtpdeploy deploy --force   # starts a new launch",
                ],
                runbook="server-never-ready",
                details={"launch_id": current.launch_id, "word": found["word"], "why": found["why"]},
            )
        if found["why"] != told:
            told = found["why"]
            stream.note(f"the same runs already and is degraded ({told}); looking again")
        time.sleep(_LOOK_AGAIN_EACH_S)


def _broken(current: Release, found: StatusResult, late: bool) -> bool:
    """Whether a degraded launch cannot come back by itself."""
    boot = current.last_boot()
    if found.get("stop") or found["main_pid"] is None or boot is None:
        return True  # being stopped, or its main process has gone
    if dead_schedulers(current.state().get("proven") or {}, boot):
        return True
    return late and found["port_owner"] is None  # it listened once, and does so no longer


def _refuse_to_disturb(service: Service, client: str, force: bool) -> None:
    """A launch of somebody else that is still loading is not torn down by accident."""
    current = service.current()
    if force or current is None or current.main() is None:
        return
    by = current.read()["by"]
    if by == client or status(service)["word"] != "starting":
        return
    raise Fault(
        "host-locked",
        f"launch {current.launch_id} of {by} is still starting",
        next_commands=["mtpdeploy status", "mtpdeploy deploy --force   # stops it"],
        details={"launch_id": current.launch_id, "by": by},
    )


def _preflight(service: Service, known: Facts, spec: ProbeSpec, needs: Needs, host: str, skip: bool) -> list[Finding]:
    findings = preflight.check(service, known, spec, needs, host)
    refusing = preflight.refusing(findings)
    if refusing and not skip:
        raise Fault(
            "plan-refused",
            "; ".join(f["what"] for f in refusing) + ". Nothing was touched.",
            evidence=[f"{f['check']}: {f['what']} ({f['why']})" for f in refusing],
            next_commands=[f["type"] for f in refusing if f["type"]],
            runbook="port-or-gpu-taken" if {f["check"] for f in refusing} & {"port", "gpu memory"} else None,
            details={"findings": findings},
        )
    return findings


def _stop_all(
    service: Service, stream: Stream, root: Root, client: str, why: str, request: Any, spare: Release | None = None
) -> None:
    """Stops every launch of the service that lives, or whose supervisor would start it again. Fault if one will not die."""
    current = service.current()
    for old in service.history():
        if spare is not None and old.launch_id == spare.launch_id:
            continue
        if old.main() is None and old.supervisor() is None and (current is None or old.launch_id != current.launch_id):
            continue
        if not old.boots():
            continue
        done = ending.stop(
            old, stream, root, client=client, why=why, abort_requests=bool(request.get("abort_requests")),
        )  # fmt: skip
        _refuse_leftovers(old, done)


def _refuse_leftovers(old: Release, done: StopResult) -> None:
    """Never two servers: what will not die forbids the next start."""
    if not done["left"]:
        return
    raise Fault(
        "remote-error",
        f"launch {old.launch_id} could not be stopped completely; nothing new was started",
        evidence=[f"pid {p['pid']} state {p['state']} {p['gpu_gb'] or 0} GiB: {p['command']}" for p in done["left"]],
        next_commands=[p["hint"] for p in done["left"]],
        runbook="port-or-gpu-taken",
        details={"left": done["left"]},
    )


def _start(
    fresh: Release, stream: Stream, choice: supervisor.Choice, root: Root, previous: Release | None
) -> dict[str, Any]:
    stream.step(f"start launch {fresh.launch_id}", f"under {choice.kind}")
    try:
        return supervisor.start(fresh, choice, root)
    except Fault as fault:
        if previous is not None and previous.launch_id != fresh.launch_id:
            fault.message += f". The previous launch {previous.launch_id} was stopped before"
            fault.next_commands.append("mtpdeploy rollback")
        raise


def _log_place(which: Release, boot: dict[str, Any]) -> dict[str, Any]:
    """Where a watch begins: at this boot's first byte."""
    inode = None
    with contextlib.suppress(OSError):
        inode = os.stat(which.log).st_ino
    return {"path": str(which.log), "inode": inode, "offset": boot.get("log_offset") or 0}


def _started(
    fresh: Release, choice: supervisor.Choice, boot: dict[str, Any], previous: Release | None, known: Facts | None,
    findings: list[Finding],
) -> DeployResult:  # fmt: skip
    result = DeployResult(
        outcome="started",
        why="",
        launch_id=fresh.launch_id,
        boot=boot["n"],
        supervisor=choice.kind,
        supervisor_why=choice.why,
        survives=choice.survives,
        previous=previous.launch_id if previous else None,
        findings=findings,
        log=_log_place(fresh, boot),
        simulated=fresh.read().get("simulated"),
    )
    if known is not None:
        result["facts"] = known
    return result


# ---------------------------------------------------------------- start, stop, rollback


def start(service: Service, stream: Stream, request: StartRequest) -> DeployResult:
    """Starts the current (or named) release again, with all that deploy checks; `restart` stops it first."""
    client = str(request.get("client") or "unknown")
    root = Root(request.get("sudo_password"))
    target = service.release(request.get("launch_id"))
    act = "restart" if request.get("restart") else "start"
    with changing(service, stream, client, act, target.launch_id):
        current = service.current()
        running = target.main() is not None and current is not None and current.launch_id == target.launch_id
        if running and not request.get("restart"):
            found = status(service)
            return DeployResult(
                outcome="starting" if found["word"] == "starting" else "unchanged",
                why=f"it runs already: {found['word']} {found['why']}".strip(),
                launch_id=target.launch_id,
                boot=found["boot"],
                supervisor=found["supervisor"],
                log=_log_place(target, target.last_boot() or {}),
                simulated=found.get("simulated"),
                status=found,
            )
        return _switch(service, stream, root, client, target, request)


def rollback(service: Service, stream: Stream, request: RollbackRequest) -> DeployResult:
    """Starts the previous good release: the newest one, older than the current, that ever served."""
    client = str(request.get("client") or "unknown")
    root = Root(request.get("sudo_password"))
    current = service.current()
    if wanted := request.get("launch_id"):
        target = service.release(wanted)
    else:
        older = service.history() if current is None else service.before(current)
        good = [r for r in older if r.was_ready()]
        if not good:
            raise Fault(
                "not-found",
                f"no earlier launch of {service.name} was ever ready",
                evidence=[f"{r.launch_id} {r.read()['profile']}" for r in older[:5]],
                next_commands=["mtpdeploy history", "mtpdeploy start --launch ID"],
            )
        target = good[0]
    with changing(service, stream, client, "rollback", target.launch_id):
        return _switch(service, stream, root, client, target, request)


def _switch(service: Service, stream: Stream, root: Root, client: str, target: Release, request: Any) -> DeployResult:
    """Stops what runs, makes `target` current and starts it."""
    asked = target.read()
    if target.state().get("adopted"):
        raise Fault(
            "remote-error",
            f"launch {target.launch_id} was adopted: how it was started is not ours to repeat",
            next_commands=["mtpdeploy deploy --profile PROFILE"],
        )
    spec: ProbeSpec = dict(request.get("probe") or {}, port=asked["port"])  # type: ignore[assignment]
    known = facts.read(service.workdir, spec, root)
    needs: Needs = request.get("needs") or Needs()
    findings = _preflight(service, known, spec, needs, asked["host"], skip=False)
    choice = supervisor.choose(asked.get("supervisor", "auto"), known["supervisors"], root)
    if lacks := target.lacks(choice.kind):
        raise Fault(
            "remote-error",
            f"launch {target.launch_id} cannot be started again, {target.path} lacks: {', '.join(lacks)}. Nothing was touched",
            next_commands=["mtpdeploy deploy --force   # writes a new release", "mtpdeploy history"],
            runbook="half-finished-deploy",
        )
    previous = service.current()
    _step(service, "while the old server was being stopped")
    _stop_all(
        service,
        stream,
        root,
        client,
        f"{'restarted' if previous == target else f'replaced by {target.launch_id}'}",
        request,
    )
    if previous is not None:
        supervisor.retire(previous, choice.kind, root)
    _step(service, "after the old server was stopped and before the next one was started")
    release.flip(target)
    boot = _start(target, stream, choice, root, previous)
    return _started(target, choice, boot, previous, None, findings)


def stop(service: Service, stream: Stream, request: StopRequest) -> StopResult:
    """Stops the named launch, or every launch of the service that lives."""
    client = str(request.get("client") or "unknown")
    root = Root(request.get("sudo_password"))
    why = str(request.get("why") or "asked for")
    current = service.release(request.get("launch_id"))
    with changing(service, stream, client, "stop", current.launch_id, why):
        result = ending.stop(
            current,
            stream,
            root,
            client=client,
            why=why,
            drain_timeout_s=request.get("drain_timeout_s"),
            abort_requests=bool(request.get("abort_requests")),
        )
        if request.get("launch_id") is None:
            for old in service.living():
                if old.launch_id != current.launch_id:
                    stream.note(f"launch {old.launch_id} lived too; stopping it")
                    more = ending.stop(old, stream, root, client=client, why=why)
                    result["left"] += more["left"]
                    result["killed"] += more["killed"]
                    result["stopped"] = not result["left"]
        return result


# ---------------------------------------------------------------- releases


def history(service: Service) -> list[dict[str, Any]]:
    """All releases, newest first, each with what became of it."""
    service.check()
    current = service.current()
    rows: list[dict[str, Any]] = []
    for one in service.history():
        try:
            asked: Any = one.read()
        except Fault as fault:
            rows.append({"launch_id": one.launch_id, "state": "damaged", "why": fault.message})
            continue
        state, boots = one.state(), one.boots()
        last = boots[-1] if boots else None
        running = one.main() is not None
        word = (
            "running" if running
            else "never started" if last is None
            else "stopped" if state.get("stop")
            else "crashed"
        )  # fmt: skip
        rows.append(
            {
                "launch_id": one.launch_id,
                "current": current is not None and one.launch_id == current.launch_id,
                "state": word,
                "was_ready": one.was_ready(),
                "profile": asked["profile"],
                "by": asked["by"],
                "created_utc": asked["created_utc"],
                "sglang_version": asked.get("sglang_version"),
                "simulated": asked.get("simulated"),
                "boots": len(boots),
                "supervisor": (state.get("supervisor") or {}).get("kind"),
                "started_utc": boots[0]["started_utc"] if boots else None,
                "ended_utc": last.get("ended_utc") if last else None,
                "exit": last.get("exit") if last else None,
                "stop": state.get("stop"),
                "gave_up": state.get("gave_up"),
                "log_bytes": _size(one),
            }
        )
    return rows


def _size(one: Release) -> int | None:
    try:
        return os.stat(one.log).st_size
    except OSError:
        return None


def prune(service: Service, keep: int, *, dry_run: bool = False) -> list[str]:
    """Removes old releases. Kept: the newest `keep`, the current one, whatever lives, and the newest that ever served."""
    current = service.current()
    everything = service.history()
    kept = {one.launch_id for one in everything[: max(0, keep)]}
    if current is not None:
        kept.add(current.launch_id)
    kept |= {one.launch_id for one in everything if one.main() is not None or one.supervisor() is not None}
    others = [one for one in everything if current is None or one.launch_id != current.launch_id]
    kept |= {one.launch_id for one in [o for o in others if o.was_ready()][:1]}
    removed = []
    for one in everything:
        if one.launch_id in kept:
            continue
        if not dry_run:
            # Renamed first: half a release is never mistaken for one.
            aside = service.releases / f".{one.launch_id}.{os.getpid()}.new"
            os.rename(one.path, aside)
            shutil.rmtree(aside, ignore_errors=True)
        removed.append(one.launch_id)
    return removed


def adopt(service: Service, stream: Stream, request: Any) -> dict[str, Any]:
    """Takes over a server that somebody else started: from now on `status`, `logs` and `stop` know it. It is not touched."""
    from mtpdeploy.agent import ports
    from mtpdeploy.sglang.masking import mask_values

    client = str(request.get("client") or "unknown")
    owner = ports.owner(int(request["port"])) or ports.owner(int(request["port"]), "::")  # IPv6-only too
    if owner is None:
        raise Fault("not-found", f"nobody listens on port {request['port']}")
    if owner["pid"] is None:
        raise Fault("not-ours", f"{ports.describe(owner)}; adopt it as its own user, or as root")
    identity = process.identify(owner["pid"])
    if identity is None or (request.get("pid") and request["pid"] != owner["pid"]):
        raise Fault(
            "not-ours", f"port {request['port']} is not held by pid {request.get('pid')}: {ports.describe(owner)}"
        )
    if any(one.launch_id == owner["launch_id"] for one in service.history()):
        raise Fault("usage-error", f"pid {owner['pid']} is launch {owner['launch_id']} of this service already")
    words = _words(owner["pid"])
    environ = process.environment(owner["pid"]) or {}
    with changing(service, stream, client, "adopt", request["launch_id"], f"pid {owner['pid']}"):
        stat = process.read_stat(owner["pid"])
        record: Any = {
            "launch_id": request["launch_id"],
            "service": service.name,
            "profile": "adopted",
            "created_utc": utc_now(),
            "by": client,
            "fingerprint": f"adopted:{identity.pid}:{identity.start_time}:{identity.boot_id}",
            "host": owner["address"],
            "port": owner["port"],
            "python": words[0] if words else "",
            "argv": mask_values({"argv": words})["argv"],
            "args": {},
            "env": mask_values(
                {k: v for k, v in environ.items() if k.startswith(("SGL", "CUDA", "NCCL", "HF_", "TORCH"))}
            ),
            "sglang_version": None,
            "supervisor": "adopted",
            "model_path": None,
            "notes": [f"adopted from pid {owner['pid']} of user {owner['user']}"],
        }
        fresh = release.install(service, record, [], {})
        linked = _link_log(fresh, request.get("log") or _stdout_file(owner["pid"]))
        release.new_boot(
            fresh, identity, session=stat.session if stat else -1, cgroup=process.cgroup(identity.pid), invocation=None,
            supervisor=None,
        )  # fmt: skip

        def from_the_start(state: dict[str, Any]) -> None:
            state["boots"][0]["log_offset"] = 0
            state["adopted"] = True

        fresh.update(from_the_start)
        release.flip(fresh)
        return {"launch_id": fresh.launch_id, "pid": identity.pid, "log": linked, "status": status(service)}


def _words(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().rstrip(b"\0").split(b"\0")]
    except OSError:
        return []


def _stdout_file(pid: int) -> str | None:
    try:
        target = os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return None
    return target if target.startswith("/") and os.path.isfile(target) else None


def _link_log(fresh: Release, path: str | None) -> str | None:
    """A hard link: the same bytes and the same inode under our name. None where that cannot be (another file system)."""
    if path is None:
        return None
    try:
        os.link(path, fresh.log, follow_symlinks=False)
    except OSError:
        return None
    return path
