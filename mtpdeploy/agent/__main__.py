"""The agent's entry: one verb, one request, events on stdout, one result or error as the last line.

    python -I -S agent.pyz VERB REQUEST|-          from the other side (see mtpdeploy.agent.protocol)
    python -I -S agent.pyz boot|ended SERVICE_DIR  from a systemd unit
    python -I -S agent.pyz supervise RELEASE_DIR   in a tmux pane, or detached
    python agent.pyz bench-client RUN_DIR          the benchmark's client

Modules are imported by the verb that needs them: each exec pays for what it uses.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mtpdeploy.agent import protocol
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.stream import Stream

# Verbs that change the host go on when the other side goes away: half a change helps nobody.
_CHANGING = {"install", "start", "deploy", "stop", "rollback", "prune", "adopt", "unlock"}


def _probe(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import facts
    from mtpdeploy.agent.command import Root
    from mtpdeploy.agent.release import work_folder

    spec: protocol.ProbeSpec = request.get("probe") or protocol.ProbeSpec()
    return facts.read(work_folder(str(request.get("workdir") or "~/.mtpdeploy")), spec, Root())


def _install(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying, release, supervisor

    service = release.Service.of(request)
    asked = request["release"]
    with deploying.changing(service, stream, str(request.get("client")), "install", asked["launch_id"]):
        fresh = release.install(service, asked, request.get("files") or [], supervisor.file_values(service.folder))
    return {"launch_id": fresh.launch_id, "path": str(fresh.path)}


def _deploy(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return deploying.deploy(Service.of(request), stream, request)


def _start(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return deploying.start(Service.of(request), stream, request)


def _stop(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return deploying.stop(Service.of(request), stream, request)


def _rollback(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return deploying.rollback(Service.of(request), stream, request)


def _history(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return {"releases": deploying.history(Service.of(request))}


def _prune(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying, oldagents
    from mtpdeploy.agent.release import Service

    service, keep = Service.of(request), int(request.get("keep", 5))
    service.check()
    if request.get("dry_run"):
        removed = deploying.prune(service, keep, dry_run=True)
        return {"removed": removed, "agents": oldagents.prune(service.workdir, dry_run=True), "dry_run": True}
    with deploying.changing(service, stream, str(request.get("client")), "prune", None, f"keep {keep}"):
        removed = deploying.prune(service, keep)
        return {"removed": removed, "agents": oldagents.prune(service.workdir), "dry_run": False}


def _adopt(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import deploying
    from mtpdeploy.agent.release import Service

    return deploying.adopt(Service.of(request), stream, request)


def _watch(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent.release import Service
    from mtpdeploy.agent.watching import SILENCE_S, Watch

    service = Service.of(request)
    service.check()
    return Watch(
        service.release(request.get("launch_id")),
        stream,
        inode=request.get("inode"),
        offset=request.get("offset"),
        silence_s=float(request.get("silence_s") or SILENCE_S),
        generate=bool(request.get("generate", True)),
    ).run()


def _tail(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent.release import Service
    from mtpdeploy.agent.watching import tail

    service = Service.of(request)
    service.check()
    return tail(
        service,
        stream,
        launch_id=request.get("launch_id"),
        inode=request.get("inode"),
        offset=request.get("offset"),
        lines=int(request.get("lines", 100)),
        follow=bool(request.get("follow")),
        since=str(said) if (said := request.get("since")) else None,
    )


def _status(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent.release import Service
    from mtpdeploy.agent.status import status

    return status(
        Service.of(request),
        port=request.get("port"),
        host=request.get("host"),
        generate=bool(request.get("generate")),
        log_tail_bytes=int(request.get("log_tail_bytes") or 0),
        launch_id=request.get("launch_id"),
    )


def _doctor(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import facts, preflight
    from mtpdeploy.agent.command import Root
    from mtpdeploy.agent.release import Service

    service = Service.of(request)
    service.check()
    spec: protocol.ProbeSpec = request.get("probe") or protocol.ProbeSpec()
    needs: protocol.Needs = request.get("needs") or protocol.Needs()
    known = facts.read(service.workdir, spec, Root())
    return {
        "facts": known,
        "findings": preflight.check(service, known, spec, needs, str(request.get("host") or "127.0.0.1")),
    }


def _bench(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import benching

    return benching.bench(stream, request)


def _bench_pull(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import benching

    return benching.pull(stream, request)


def _unlock(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import journal, lock
    from mtpdeploy.agent.release import Service

    service = Service.of(request)
    service.check()
    done = lock.unlock(service, break_lock=bool(request.get("break_lock")))
    if done["removed"]:
        journal.write(service, "unlock", str(request.get("client")), lock=done["lock"])
    return done


def _journal(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import journal
    from mtpdeploy.agent.release import Service

    service = Service.of(request)
    service.check()
    return {"acts": journal.read(service, int(request.get("lines") or 0))}


def _corpse(stream: Stream, request: Any) -> Any:
    from mtpdeploy.agent import corpse
    from mtpdeploy.agent.release import Service

    service = Service.of(request)
    service.check()
    return corpse.gather(service.release(request.get("launch_id")), request.get("log_bytes"))


VERBS: Mapping[str, Callable[[Stream, Any], Any]] = {
    "probe": _probe,
    "install": _install,
    "start": _start,
    "deploy": _deploy,
    "watch": _watch,
    "status": _status,
    "stop": _stop,
    "tail": _tail,
    "bench": _bench,
    "bench-pull": _bench_pull,
    "doctor": _doctor,
    "history": _history,
    "rollback": _rollback,
    "prune": _prune,
    "adopt": _adopt,
    "unlock": _unlock,
    "journal": _journal,
    "corpse": _corpse,
}


def _request(words: list[str]) -> dict[str, Any]:
    """The request from the command line or stdin. Fault `usage-error` if there is none, or of another protocol."""
    try:
        stdin = words == ["-"]
        request = (
            protocol.from_frame(sys.stdin.buffer) if stdin else protocol.from_argument(words[0] if words else "e30=")
        )
    except ValueError as error:
        raise Fault("usage-error", f"the request cannot be read: {error}") from None
    if request.get("protocol", protocol.PROTOCOL) != protocol.PROTOCOL:
        raise Fault("usage-error", f"the request speaks protocol {request['protocol']}, this agent {protocol.PROTOCOL}")
    return request


def serve(verb: str, words: list[str]) -> int:
    """Answers one request."""
    # What child processes print must not get between the events: stdout is ours alone.
    channel = os.dup(1)
    os.dup2(2, 1)
    stream = Stream(channel)
    stream.start_heartbeat()
    if verb in _CHANGING:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o077)
    try:
        result = VERBS[verb](stream, _request(words))
        stream.stop_heartbeat()
        stream.emit("result", **result)
        return protocol.EXIT_RESULT
    except Fault as fault:
        stream.stop_heartbeat()
        stream.emit("error", **fault.as_event())
        return protocol.EXIT_ERROR
    except OSError as error:
        from mtpdeploy.agent.files import explain

        stream.stop_heartbeat()
        stream.emit("error", **explain(error, verb).as_event())
        return protocol.EXIT_ERROR
    except Exception as error:
        import traceback

        stream.stop_heartbeat()
        stream.emit(
            "error",
            kind="remote-error",
            message=f"the agent failed in {verb}: {type(error).__name__}: {error}",
            evidence=traceback.format_exc().splitlines()[-12:],
            next_commands=["mtpdeploy doctor"],
            runbook=None,
            details={"broken": True},
        )
        return protocol.EXIT_BROKEN


def main(argv: list[str]) -> int:
    """Dispatches one call; the exit status."""
    if len(argv) == 2 and argv[0] in ("boot", "ended", "supervise", "bench-client"):
        if argv[0] == "bench-client":
            from mtpdeploy.agent import benching

            return benching.client_main(argv[1])
        from mtpdeploy.agent import supervise

        return {"boot": supervise.boot, "ended": supervise.ended, "supervise": supervise.supervise}[argv[0]](argv[1])
    if not argv or argv[0] not in VERBS:
        print(__doc__, file=sys.stderr)
        print(f"verbs: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return serve(argv[0], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
