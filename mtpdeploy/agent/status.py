"""What a service is doing, in one word, with the proof.

A 200 from /health proves nothing: a server of an earlier launch, or of somebody else, answers just as well. So each link of
the chain from the port to the launch is looked at, and printed: port owner, recorded pid, start time, boot id, environment,
session, cgroup or InvocationID, log file.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from mtpdeploy.agent import files, gpus, lock, oom, ports, process, supervisor
from mtpdeploy.agent.clock import seconds_since, spell_epoch, utc_now
from mtpdeploy.agent.process import ProcessId
from mtpdeploy.agent.protocol import PortOwner, Proof, ReleaseFile, StatusResult, Word
from mtpdeploy.agent.release import READY_LINE, Release, Service, elsewhere, host_rebooted_since, unit_name
from mtpdeploy.agent.server import Server, base_url

STALL_S = 60.0  # requests run and the log shows no progress for so long
_PROGRESS_BYTES = 256 * 1024
SCHEDULER = "sglang::scheduler"  # title of the processes that hold the GPU (managers/scheduler.py)


def status(
    service: Service,
    *,
    port: int | None = None,
    host: str | None = None,
    generate: bool = False,
    log_tail_bytes: int = 0,
    launch_id: str | None = None,
    with_gpus: bool = True,
) -> StatusResult:
    """The service's state. Changes nothing. `with_gpus`: nvidia-smi is asked too, which takes tenths of a second."""
    service.check()
    release = service.release(launch_id) if launch_id else service.current()
    result = StatusResult(
        service=service.name,
        host_utc=utc_now(),
        lock=lock.read(service),
        unfinished=intent if isinstance(intent := files.read_json(service.folder / "intent.json"), dict) else None,
        next_commands=[],
        proof=[],
        restarts=0,
    )
    if release is None and len(alone := service.living()) == 1:
        release = alone[0]
        result["notes"] = [f"`current` is lost; launch {release.launch_id} is shown because its process lives"]
    if release is None:
        return _nothing(result, port, host)
    asked = release.read()
    state = release.state()
    main = release.main()
    owner = ports.owner(asked["port"], asked["host"], main.pid if main else None)
    kind = (state.get("supervisor") or {}).get("kind")
    boot = release.last_boot()
    started = int(state.get("asked_from", 1))
    known = StatusResult(
        launch_id=release.launch_id,
        profile=asked["profile"],
        sglang_version=asked.get("sglang_version"),
        supervisor=kind,
        url=base_url(asked),
        release=asked,
        simulated=asked.get("simulated"),
        stop=state.get("stop"),
        boot=boot["n"] if boot else None,
        restarts=max(0, boot["n"] - started) if boot else 0,
        since_utc=boot["started_utc"] if boot else None,
        exit=_exit(boot),
        port_owner=owner,
        gpus=_gpus(release) if with_gpus else None,
        log=_log(release, log_tail_bytes),
        health={},
        server_info=None,
    )
    result.update(known)
    main = release.main()  # looked at again: it may have ended while the port was being looked at
    if owner is None and main is not None and boot is not None and said_ready(release, boot):
        owner = ports.owner(asked["port"], asked["host"], main.pid)  # it may have begun to listen between the two looks
        result["port_owner"] = owner
    result["main_pid"] = main.pid if main else None
    result["argv"] = process.arguments(main.pid) if main else None
    names = process.environment(main.pid) if main else None
    result["environ_names"] = sorted(names) if names else None
    result["proof"], result["identity"] = prove(release, owner, main)
    word, why = _word(release, asked, state, boot, main, owner, result)
    if state.get("damaged"):
        told = "is shown as its process tells it" if boot else "what became of this launch is not known"
        result["notes"] = [*result.get("notes", ()), f"{release.path / 'state.json'} was damaged; {told}"]
    if generate and word in ("ready", "degraded") and result["identity"] == "ours":
        answer = Server.of(release).generate(1)
        result["health"]["generation"] = answer
        if not answer["ok"]:
            word, why = "degraded", f"a generation failed: {answer['error']}"
    result["word"], result["why"] = word, why
    result["next_commands"] = _next(word, result)
    return result


def _nothing(result: StatusResult, port: int | None, host: str | None) -> StatusResult:
    """Nothing is deployed; something else may still answer on the port."""
    owner = ports.owner(port, host or "127.0.0.1") if port else None
    nothing = StatusResult(
        word="not deployed", why="", launch_id=None, port_owner=owner, identity="nobody", release=None
    )
    result.update(nothing)
    if owner is not None:
        result["identity"] = "unseen" if owner["pid"] is None else "foreign"
        result["why"] = f"but {ports.describe(owner)}"
        result["server_info"] = _foreign_info(owner)
        result["next_commands"] = [f"mtpdeploy adopt --port {port}   # to take it over"]
    if result.get("unfinished"):
        result["why"] = (result["why"] + "; " if result["why"] else "") + _unfinished(result["unfinished"])
    return result


def _unfinished(intent: dict[str, Any] | None) -> str:
    intent = intent or {}
    return f"a {intent.get('act')} by {intent.get('client')} at {intent.get('utc')} was interrupted {intent.get('at')}"


def _foreign_info(owner: PortOwner) -> dict[str, Any] | None:
    """What a server that is not ours says about itself (it may be no SGLang at all)."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(owner["address"], owner["address"])
    base = f"http://[{address}]:{owner['port']}" if ":" in address else f"http://{address}:{owner['port']}"
    value = Server(base).ask("/model_info", timeout_s=2).json()
    return value if isinstance(value, dict) else None


def _exit(boot: dict[str, Any] | None) -> dict[str, Any] | None:
    if not boot or not boot.get("exit"):
        return None
    return {**boot["exit"], "ended_utc": boot.get("ended_utc")}


def _gpus(release: Release) -> Any:
    path = {k: v for k, v in release.environment().items() if k == "PATH"}
    try:
        return gpus.read(path)
    except gpus.NoGpus:
        return None


def _log(release: Release, tail: int) -> dict[str, Any] | None:
    try:
        found = os.stat(release.log)
        value: dict[str, Any] = {
            "path": str(release.log),
            "inode": found.st_ino,
            "size": found.st_size,
            "mtime_utc": spell_epoch(found.st_mtime),
            "silent_s": round(max(0.0, time.time() - found.st_mtime), 1),
        }
        if tail:
            with open(release.log, "rb") as file:
                start = max(0, found.st_size - tail)
                file.seek(start)
                value.update(tail_offset=start, tail=base64.b64encode(file.read(tail)).decode())
    except OSError:
        return None
    return value


# ---------------------------------------------------------------- proof


def prove(release: Release, owner: PortOwner | None, main: ProcessId | None) -> tuple[list[Proof], Any]:
    """Each link between what answers on the port and this launch, and the verdict on whose it is."""
    boot = release.last_boot()
    proof: list[Proof] = []

    def link(check: str, holds: bool | None, expected: Any, found: Any) -> None:
        proof.append(Proof(check=check, holds=holds, expected=str(expected), found=str(found)))

    if boot is None:
        return proof, "nobody" if owner is None else _stranger(release, owner)
    link("boot of the host", boot["boot_id"] == process.boot_id(), boot["boot_id"], process.boot_id())
    stat = process.read_stat(boot["pid"])
    link(
        "main process lives",
        main is not None,
        f"pid {boot['pid']} started at tick {boot['start_time']}",
        f"started at tick {stat.start_time}, state {stat.state}" if stat else "no such process",
    )
    identity: Any = "nobody"
    if owner is not None:
        if owner["pid"] is None:
            link("port owner", None, f"pid {boot['pid']} or a child", f"hidden, user {owner['user']}")
            # A socket of another user cannot be our process's.
            same_user = owner["user"] == process.user_name(os.geteuid())
            identity = "unknown" if same_user else "unseen"
        else:
            chain = [owner["pid"], *process.ancestors(owner["pid"])]
            ours = main is not None and main.pid in chain
            link("port owner descends from it", ours, f"pid {boot['pid']}", " < ".join(map(str, chain)))
            carried = owner["launch_id"]
            link("launch id in its environment", carried == release.launch_id if carried else None, release.launch_id,
                 carried or "none (wiped, or not readable)")  # fmt: skip
            identity = "ours" if ours else _stranger(release, owner)
    else:
        link("port owner", None if main else False, f"pid {boot['pid']}", "nobody listens")
        identity = "ours" if main else "nobody"
    if main is not None and stat is not None:
        if boot.get("invocation_id"):
            environ = process.environment(main.pid) or {}
            found = environ.get("INVOCATION_ID")
            unit = os.path.basename(process.cgroup(main.pid) or "")
            expected = unit_name(release.service.name)
            link("cgroup is the service's unit", unit == expected, expected, unit)
            link("InvocationID", found == boot["invocation_id"] if found else None, boot["invocation_id"], found)
        else:
            link("session", stat.session == boot["session"], boot["session"], stat.session)
        link("log file is open in it", *_log_is_open(release, main.pid))
    return proof, identity


def _stranger(release: Release, owner: PortOwner) -> str:
    """Whose the port is if it is not this launch's."""
    if owner["pid"] is None:
        return "unseen"
    carried = owner["launch_id"]
    if carried and any(other.launch_id == carried for other in release.service.history()):
        return "earlier launch" if carried != release.launch_id else "unknown"
    return "foreign"


def _log_is_open(release: Release, pid: int) -> tuple[bool | None, str, str]:
    """Whether the process's stdout is this launch's own log file."""
    try:
        wanted = os.stat(release.log)
        found = os.stat(f"/proc/{pid}/fd/1")
    except OSError as error:
        return None, str(release.log), error.strerror or "cannot be read"
    same = (wanted.st_dev, wanted.st_ino) == (found.st_dev, found.st_ino)
    target = "?"
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/1")
    return same, f"{release.log} (inode {wanted.st_ino})", f"{target} (inode {found.st_ino})"


# ---------------------------------------------------------------- the word


def _word(
    release: Release,
    asked: ReleaseFile,
    state: dict[str, Any],
    boot: dict[str, Any] | None,
    main: ProcessId | None,
    owner: PortOwner | None,
    result: StatusResult,
) -> tuple[Word, str]:
    if boot is None:
        damaged = state.get("damaged")
        why = "its record was damaged and no process of it lives" if damaged else "it was installed and never started"
        if intent := result.get("unfinished"):
            why += f" ({_unfinished(intent)})"
        return ("stale", f"{why}; {ports.describe(owner)}") if owner else ("unknown" if damaged else "stopped", why)
    if elsewhere(boot):
        return (
            "unknown",
            "this launch was started by another machine that shares the work folder; set `workdir` per host",
        )
    identity = result["identity"]
    if main is None:
        return _dead(release, state, boot, owner, identity)
    if state.get("stop"):
        record = state["stop"]
        return "degraded", f"a stop asked for at {record['asked_utc']} by {record['by']} has not ended its processes"
    if identity in ("foreign", "earlier launch"):
        assert owner is not None
        return "stale", f"launch {release.launch_id} runs as pid {main.pid}, but {ports.describe(owner)}"
    if identity in ("unseen", "unknown"):
        assert owner is not None
        return "unknown", f"launch {release.launch_id} runs as pid {main.pid}, but {ports.describe(owner)}"
    return _alive(release, state, boot, main, owner, result)


def _dead(
    release: Release, state: dict[str, Any], boot: dict[str, Any], owner: PortOwner | None, identity: str
) -> tuple[Word, str]:
    """The recorded main process lives no longer."""
    if owner is not None:
        who = ports.describe(owner)
        if identity == "earlier launch":
            return (
                "stale",
                f"launch {release.launch_id} does not run, and an earlier launch of this service answers: {who}",
            )
        if identity == "unknown":
            return (
                "degraded",
                f"the main process of launch {release.launch_id} has gone, but a process of it still listens: {who}",
            )
        return "stale", f"launch {release.launch_id} does not run, and something else answers: {who}"
    if record := state.get("stop"):
        why = f": {said}" if (said := record.get("why")) != "asked for" else ""
        return "stopped", f"asked for by {record.get('by')} at {record.get('asked_utc')}{why}"
    ended = boot.get("exit") or {}
    cause = _cause(ended) if ended else ""
    kind = (state.get("supervisor") or {}).get("kind")
    unit = supervisor.unit_state(release, kind)
    if not cause and unit.get("Result") not in (None, "", "success"):
        cause = f"systemd says {unit['Result']}"
    if gave_up := state.get("gave_up"):
        return "crashed", f"{cause or 'it ended'}; not started again: {gave_up['why']}"
    if host_rebooted_since(boot):
        if unit.get("ActiveState") in ("active", "activating"):
            return "starting", "the host was rebooted; its unit is bringing it back"
        return (
            "crashed",
            f"the host was rebooted after boot {boot['n']}, and {kind or 'its supervisor'} did not bring it back",
        )
    if unit.get("ActiveState") == "activating" or (release.supervisor() and state.get("restarting")):
        return "crashed", f"{cause or 'it ended'}; its supervisor starts it again in a moment"
    if unit.get("ActiveState") == "failed":
        return "crashed", f"{cause or 'it ended'}; systemd has given up ({unit.get('Result')})"
    return "crashed", cause or "its process has gone; nobody recorded how (killed with its supervisor?)"


def _cause(ended: dict[str, Any]) -> str:
    if ended.get("result") == oom.WORD:
        return "the kernel killed it for memory (oom-kill)"
    if ended.get("result") not in (None, "success", "exit-code", "signal"):
        return f"boot ended: {ended['result']}"
    if ended.get("signal"):
        return f"killed by signal {ended['signal']}"
    return f"ended with exit status {ended.get('status')}"


def _alive(
    release: Release,
    state: dict[str, Any],
    boot: dict[str, Any],
    main: ProcessId,
    owner: PortOwner | None,
    result: StatusResult,
) -> tuple[Word, str]:
    """The recorded main process lives and nobody else is on the port."""
    proven = state.get("proven") or {}
    was_ready = proven.get("boot") == boot["n"] or said_ready(release, boot)
    if owner is None:
        if was_ready:
            return "degraded", "it was ready, and nobody listens on its port any more"
        return "starting", f"boot {boot['n']} runs for {_age(boot)} and does not listen yet"
    server = Server.of(release)
    health = result["health"]
    reply = server.ask("/ready", timeout_s=5)
    health.update(source="/ready", status=reply.status, latency_ms=round(reply.latency_ms, 1))
    if reply.status in (404, 405):
        # Versions before 0.5.20. /health would cost a second and a token; that HTTP answers and the log said ready is enough.
        reply = server.ask("/model_info", timeout_s=5)
        health.update(source="/model_info", status=reply.status, latency_ms=round(reply.latency_ms, 1))
        if reply.status == 404:
            reply = server.ask("/get_model_info", timeout_s=5)
            health.update(source="/get_model_info", status=reply.status, latency_ms=round(reply.latency_ms, 1))
    if dead := dead_schedulers(proven, boot):
        return "degraded", f"scheduler {dead} died while the main process goes on: requests will hang"
    if stalled := _stalled(release, server, proven, boot, health):
        return "degraded", stalled
    if reply.status is None:
        if was_ready:
            return "degraded", f"it accepts connections and does not answer ({reply.error})"
        return "starting", f"boot {boot['n']} listens and does not answer yet"
    if reply.status == 503:
        return ("degraded", "it answers 503: unhealthy or shutting down") if was_ready else ("starting", "warming up")
    if reply.status == 401:
        return "degraded", "it refuses our API key (401)"
    if reply.status != 200:
        return "degraded", f"{health['source']} answers {reply.status}"
    if not was_ready and health["source"] != "/ready":
        return "starting", "warming up"
    kind = (state.get("supervisor") or {}).get("kind")
    if kind in ("tmux", "detached") and release.supervisor() is None:
        return "degraded", "it serves, but its supervisor has gone: after a crash nobody would start it again"
    return "ready", ""


def _stalled(
    release: Release, server: Server, proven: dict[str, Any], boot: dict[str, Any], health: dict[str, Any]
) -> str | None:
    """Why the server is not getting on: health is progress. A long prefill is none: SGLang logs its line when it begins."""
    load = server.load()
    since = last_progress_s(release)
    health.update(running=load.running, queued=load.queued, last_progress_s=since)
    quiet = since if since is not None else seconds_since(proven.get("utc") or boot["started_utc"])
    if quiet is None or quiet <= STALL_S:
        return None
    if load.silent:
        return f"stalled: its schedulers do not answer, and no batch was logged for {quiet:.0f} s"
    if load.running:
        return f"stalled: {load.running} requests run and no batch was logged for {quiet:.0f} s"
    return None


def said_ready(release: Release, boot: dict[str, Any]) -> bool:
    """Whether this boot's part of the log has SGLang's ready line."""
    try:
        with open(release.log, "rb") as file:
            file.seek(int(boot.get("log_offset") or 0))
            return any(READY_LINE in line for line in file)
    except OSError:
        return False


def last_progress_s(release: Release) -> float | None:
    """Seconds since the log's last prefill or decode line, by that line's own time (this host's local time).

    The file's age would not do: each question of ours leaves an access line. None: no such line near the end.
    """
    try:
        with open(release.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _PROGRESS_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if (b"Decode batch" in line or b"Prefill batch" in line) and line.startswith(b"["):
            with contextlib.suppress(ValueError):
                moment = time.strptime(line[1:20].decode(errors="replace"), "%Y-%m-%d %H:%M:%S")
                return max(0.0, round(time.time() - time.mktime(moment), 1))
    return None


def schedulers(main: ProcessId) -> list[dict[str, Any]]:
    """The scheduler processes below the main process, by their title: {pid, start_time, boot_id, title}."""
    found = []
    for stat in process.descendants(main.pid):
        title = process.command_line(stat.pid) or ""
        if title.startswith(SCHEDULER) and stat.state not in "ZX":
            found.append({**ProcessId(stat.pid, stat.start_time, process.boot_id()).as_json(), "title": title[:60]})
    return found


def dead_schedulers(proven: dict[str, Any], boot: dict[str, Any]) -> str | None:
    """Titles of schedulers that were there when this boot was proven ready and live no longer."""
    if proven.get("boot") != boot["n"]:
        return None
    gone = [s for s in proven.get("schedulers", []) if not process.alive(ProcessId.from_json(s))]
    return ", ".join(f"{s['title']} (pid {s['pid']})" for s in gone) or None


def _age(boot: dict[str, Any]) -> str:
    seconds = seconds_since(boot["started_utc"])
    return "some time" if seconds is None or seconds < 0 else f"{seconds:.0f} s"


def _next(word: Word, result: StatusResult) -> list[str]:
    service = Path(result["service"]).name
    return {
        "not deployed": result["next_commands"],
        "starting": ["mtpdeploy logs --follow"],
        "ready": ["mtpdeploy bench"],
        "degraded": ["mtpdeploy logs", "mtpdeploy restart"],
        "stopped": ["mtpdeploy start"],
        "crashed": ["mtpdeploy logs", "mtpdeploy doctor", "mtpdeploy start"],
        "stale": [
            "mtpdeploy status --proof",
            f"mtpdeploy deploy --force   # takes {service}'s port only from our own launches",
        ],
        "unknown": ["mtpdeploy status --proof", "mtpdeploy doctor"],
    }[word]
