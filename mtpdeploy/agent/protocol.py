"""What the two sides say to each other. Standard library only: this file runs at both ends.

One exec is one stage of work:

    <python> -I -S <workdir>/agent/<hash>.pyz VERB REQUEST

REQUEST is base64url of JSON when it is small and holds no secret (then stdin is not used at all), or `-`: then stdin
carries a 4-byte big-endian length and that many bytes of JSON. Every line of stdout is one JSON object with an `event`:

    {"event": "heartbeat"}                       each HEARTBEAT_S; SILENT_S without one: no agent is there any more
    {"event": "step", "do": …, "why": …}                      something is about to be done
    {"event": "note", "text": …}                              something that a person should know
    {"event": "log", "launch_id", "boot", "inode", "offset", "data"}      data: base64; offset: of its first byte
    {"event": "log-gap", "launch_id", "inode", "offset", "why"}           the file was truncated or replaced
    {"event": "state", "word", "why", …}                      the server's state changed (see StatusResult.word)
    {"event": "bench", …}                                     an event of the benchmark's client, as it wrote it
    {"event": "result", …}                                    the last line of a verb that worked
    {"event": "error", "kind", "message", "evidence", "next_commands", "runbook", "details"}      … of one that did not

`kind` is the slug of a class in mtpdeploy.errors (`host-locked`, `plan-refused`, `launch-failed`, …). Exit status: 0
with a result, 3 with an error, 70 if the agent itself is broken. Sizes are bytes, times UTC
(`2026-01-31T12:00:00.123Z`) or seconds (`_s`), GPU memory GiB (`_gb`).
"""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any, BinaryIO, Literal, TypedDict

PROTOCOL = 1
HEARTBEAT_S = 1.0
SILENT_S = 20.0  # a cut line is noticed below, in five (hosts.ssh); a host may be so busy that its agent gets no turn
ARGV_LIMIT = 96 * 1024  # one argument may have 128 KiB (MAX_ARG_STRLEN); base64 and the shell's quotes are inside
REQUEST_LIMIT = 64 * 1024 * 1024
LOG_CHUNK = 48 * 1024  # bytes of log in one event
EXIT_RESULT, EXIT_ERROR, EXIT_BROKEN = 0, 3, 70

Verb = Literal[
    "probe", "install", "start", "deploy", "watch", "status", "stop", "tail", "bench", "bench-pull", "doctor",
    "history", "rollback", "prune", "adopt", "unlock", "journal", "corpse",
]  # fmt: skip

# What `status` can say of a service. Each but `ready` and `not deployed` comes with a `why`.
Word = Literal["not deployed", "starting", "ready", "degraded", "stopped", "crashed", "stale", "unknown"]
SupervisorKind = Literal["systemd", "systemd-user", "tmux", "detached"]

SERVICE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}\Z")
LAUNCH_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}\Z")


# ---------------------------------------------------------------- values inside requests


class InstallFile(TypedDict):
    """A file of a release. `path` is a plain name inside the release folder.

    In system.service, user.service and tmux.sh (and only there) the agent replaces @@PYTHON@@, @@AGENT@@,
    @@SERVICE_DIR@@, @@RELEASE@@ and @@USER@@ by what the host alone knows, quoted as a word for systemd or the shell
    (@@NAME_PLAIN@@: for a systemd setting that is no command line).
    """

    path: str
    mode: int  # 0o700 launch.sh and tmux.sh, 0o600 env and server.yml, 0o644 *.service
    content: str


class ReleaseFile(TypedDict):
    """release.json, as the plan makes it; the agent writes it and adds nothing. No secret in clear."""

    launch_id: str
    service: str
    profile: str
    created_utc: str
    by: str  # user@client-host
    fingerprint: str
    host: str  # what the server binds to
    port: int
    python: str
    argv: list[str]  # as launch.sh executes it
    args: dict[str, Any]  # canonical names
    env: dict[str, str]  # masked
    sglang_version: str | None
    supervisor: str  # SupervisorChoice as asked; what was chosen stands in state.json
    model_path: str | None
    served_model_name: str | None
    drain_timeout_s: float
    ready_timeout_s: float
    simulated: bool
    restart_limit: int  # restarts in `restart_window_s` after which a crash loop is given up
    restart_window_s: float
    plan: dict[str, Any]
    notes: list[str]


class ProbeSpec(TypedDict, total=False):
    """What to look at beside the host. `env` (no secret) is added for questions to `python`: PYTHONPATH, PATH."""

    python: str
    env: dict[str, str]
    model_path: str | None
    port: int | None
    help_flags: bool  # also run `launch_server --help` (seconds: it imports SGLang)
    gpus: list[int]  # indices the service will use; absent = all


class Needs(TypedDict, total=False):
    """What the plan needs of the host; checked before anything is stopped. Absent = not checked."""

    gpu_free_gb: dict[str, float]  # by GPU index as a string
    disk_bytes: int  # in the work folder
    shm_bytes: int


# ---------------------------------------------------------------- requests


class Request(TypedDict, total=False):
    """Keys of every request. `workdir` may begin with `~/`."""

    protocol: int
    workdir: str
    service: str
    client: str  # user@host of the person's machine, for lock, journal and release


class ProbeRequest(Request, total=False):
    probe: ProbeSpec


class DeployRequest(Request, total=False):
    """First without `release` and `files` (small, in argv): answers `unchanged`, `starting`, or `needs-files` and
    facts.

    Then, if needed, with both (on stdin). Everything between lock and start happens in that one exec.
    """

    fingerprint: str
    expect_version: str | None  # version the fingerprint was computed for; another one at the host → needs-files
    force: bool
    probe: ProbeSpec
    needs: Needs
    release: ReleaseFile | None
    files: list[InstallFile] | None
    abort_requests: bool  # abort what is running instead of draining
    sudo_password: str | None  # stdin only; used once, stored nowhere
    keep: int  # releases to keep afterwards; 0 = do not prune
    skip_preflight: bool  # findings are reported and refuse nothing


class StartRequest(Request, total=False):
    launch_id: str | None  # None = current
    restart: bool
    abort_requests: bool
    probe: ProbeSpec
    needs: Needs
    sudo_password: str | None


class WatchRequest(Request, total=False):
    """Streams the launch until it is proven ready, has ended, or its log was silent for `silence_s`."""

    launch_id: str
    inode: int | None  # resume point, all three from the last log event
    offset: int
    silence_s: float
    generate: bool  # default True: prove readiness by a real generation


class StatusRequest(Request, total=False):
    port: int | None  # looked at when nothing is deployed
    host: str | None
    generate: bool  # also generate one token; default False
    log_tail_bytes: int  # 0 = none


class StopRequest(Request, total=False):
    launch_id: str | None
    why: str
    drain_timeout_s: float | None  # None = the release's
    abort_requests: bool
    sudo_password: str | None


class TailRequest(Request, total=False):
    launch_id: str | None  # None = current
    inode: int | None
    offset: int | None  # None = from `lines` before the end
    lines: int
    since: str  # `2026-01-31 12:00:00` as the log spells it: begin somewhere before it; instead of lines
    follow: bool


class BenchRequest(Request, total=False):
    """Runs the packed benchmark client with the deployment's python; records stay in <workdir>/bench/<run_id>/."""

    run_id: str
    python: str
    env: dict[str, str]
    spec: dict[str, Any]  # hostmain's own; may hold no secret: the key is read from the release's env file
    api_key: str  # of a server at another host; "" if it needs none. Absent: the service's own
    detach: bool  # go on when the client goes away
    attach_only: bool  # do not start; follow a run that is there
    from_line: int  # events already seen


class BenchPullRequest(Request, total=False):
    run_id: str
    name: str  # a file of the run
    offset: int
    remove: bool  # remove the run's folder once everything was read (explicitly asked)


class RollbackRequest(Request, total=False):
    launch_id: str | None  # None = the newest earlier release that was once ready
    abort_requests: bool
    sudo_password: str | None


class PruneRequest(Request, total=False):
    keep: int
    dry_run: bool


class AdoptRequest(Request, total=False):
    """Takes a foreign server over: writes a release that describes it. It is not restarted."""

    port: int
    launch_id: str
    pid: int | None  # must agree with the port's owner if given
    log: str | None


class UnlockRequest(Request, total=False):
    break_lock: bool  # also a lock whose holder lives


class JournalRequest(Request, total=False):
    lines: int


class CorpseRequest(Request, total=False):
    launch_id: str | None
    log_bytes: int


# ---------------------------------------------------------------- results


class GpuFacts(TypedDict):
    index: int
    uuid: str
    name: str
    memory_gb: float | None
    used_gb: float | None
    free_gb: float | None
    driver: str | None
    processes: list[GpuProcess]


class GpuProcess(TypedDict):
    pid: int
    used_gb: float | None
    user: str | None
    command: str | None
    launch_id: str | None  # of ours, read from its environment


class PortOwner(TypedDict):
    """Who listens. `pid` None: the process belongs to somebody else and cannot be seen (uid is known)."""

    port: int
    address: str
    pid: int | None
    start_time: int | None  # clock ticks after boot, field 22 of /proc/PID/stat
    user: str | None
    command: str | None
    launch_id: str | None


class Finding(TypedDict):
    """One line of doctor or preflight. ok None: could not be decided."""

    check: str
    ok: bool | None
    what: str
    why: str  # why it matters
    type: str  # what to type, or ""
    severity: Literal["refuse", "warn", "note"]


class Facts(TypedDict, total=False):
    """probe's result, all of it readings of the host; null = could not be read."""

    hostname: str
    utc: str  # the host's clock while answering
    os: str | None
    kernel: str
    architecture: str
    user: str
    uid: int
    home: str
    boot_id: str
    in_container: str | None  # docker, podman, systemd-nspawn, …
    agent_python: str
    agent_python_version: str
    cpu_count: int | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    cgroup_memory_limit_bytes: int | None
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    disk_free_bytes: int | None
    disk_total_bytes: int | None
    workdir: str
    workdir_writable: bool
    nofile_soft: int
    nofile_hard: int
    memlock_soft: int | None
    supervisors: dict[str, Any]  # see agent.supervisor.survey
    sudo: Literal["root", "passwordless", "asks", "none"]
    tmux: str | None  # its version
    gpus: list[GpuFacts] | None  # None: nvidia-smi is missing or failed (why in gpus_error)
    gpus_error: str | None
    living_launches: dict[str, list[str]]  # service of this work folder → its launches whose main process lives
    python: dict[str, Any] | None  # {executable, version, sglang_version, sglang_location, simulated, error, aiohttp}
    help_flags: list[str] | None
    model: dict[str, Any] | None  # {path, readable, config, weights_bytes, weight_files, error}
    port_owner: PortOwner | None
    port_free: bool | None
    hf_token: bool
    clock_synchronised: bool | None


class Proof(TypedDict):
    """One link of the chain between what answers and what was launched."""

    check: str
    holds: bool | None
    expected: str
    found: str


class StatusResult(TypedDict, total=False):
    word: Word
    why: str
    service: str
    launch_id: str | None
    profile: str | None
    sglang_version: str | None
    supervisor: SupervisorKind | None
    url: str | None
    since_utc: str | None  # start of this boot
    boot: int | None
    restarts: int
    main_pid: int | None
    argv: list[str] | None  # of the live main process, secrets masked
    environ_names: list[str] | None  # names only; None where it is wiped or not ours to read
    identity: Literal["ours", "earlier launch", "foreign", "unseen", "nobody", "unknown"]
    proof: list[Proof]
    port_owner: PortOwner | None
    health: dict[str, Any]  # {source, status, latency_ms, running, queued, last_progress_s, generated_tokens}
    server_info: dict[str, Any] | None  # keys masked
    gpus: list[GpuFacts] | None
    log: dict[str, Any] | None  # {path, inode, size, mtime_utc, tail (base64), tail_offset}
    stop: dict[str, Any] | None  # the stop record: asked_utc, by, why, done_utc, left
    exit: dict[str, Any] | None  # {status, signal, ended_utc} of the last boot, if it ended
    lock: dict[str, Any] | None
    release: ReleaseFile | None
    notes: list[str]  # only where something of the record was lost or damaged
    next_commands: list[str]
    simulated: bool | None
    host_utc: str
    unfinished: dict[str, Any] | None  # a deploy that was interrupted: what it was about to do


class DeployResult(TypedDict, total=False):
    outcome: Literal["unchanged", "starting", "needs-files", "started"]
    why: str
    launch_id: str | None
    boot: int | None
    supervisor: SupervisorKind | None
    supervisor_why: str
    previous: str | None
    facts: Facts
    findings: list[Finding]
    log: dict[str, Any] | None  # {path, inode, offset}
    simulated: bool | None
    status: StatusResult
    survives: dict[str, Any]  # {logout, reboot, crash}: bool


class StopResult(TypedDict, total=False):
    stopped: bool
    launch_id: str | None
    already: bool
    drained: bool | None
    killed: list[int]
    seconds: float
    left: list[dict[str, Any]]  # {pid, state, command, gpu_gb, hint}
    port_free: bool | None
    gpu_freed_gb: float | None
    simulated: bool | None


class WatchResult(TypedDict, total=False):
    outcome: Literal["ready", "ended", "silent", "stopped"]
    launch_id: str
    boot: int
    exit: dict[str, Any] | None
    crash_loop: bool
    inode: int | None
    offset: int
    ready_utc: str | None
    generation: dict[str, Any] | None  # {tokens, text_bytes, latency_ms, endpoint}
    evidence: list[str]
    status: StatusResult
    oom_killed: bool | None


# ---------------------------------------------------------------- framing


def to_argument(request: Request) -> str | None:
    """The request as one word of a command line; None if it must go through stdin (too long, or it holds a secret)."""
    if any(request.get(name) for name in ("sudo_password", "files", "api_key")):
        return None
    word = base64.urlsafe_b64encode(json.dumps(request, separators=(",", ":")).encode()).decode()
    return word if len(word) <= ARGV_LIMIT else None


def from_argument(word: str) -> dict[str, Any]:
    """Reads `to_argument`'s word back. ValueError if it is none."""
    value = json.loads(base64.urlsafe_b64decode(word.encode()))
    if not isinstance(value, dict):
        raise ValueError("a request is a JSON object")
    return value


def to_frame(request: Request) -> bytes:
    """The request for stdin: 4 bytes of length, then JSON."""
    data = json.dumps(request, separators=(",", ":")).encode()
    return struct.pack(">I", len(data)) + data


def from_frame(stream: BinaryIO) -> dict[str, Any]:
    """Reads one frame. ValueError if the stream ends early or the frame is no JSON object."""
    head = stream.read(4)
    if len(head) != 4:
        raise ValueError("the request's length is missing")
    (length,) = struct.unpack(">I", head)
    if length > REQUEST_LIMIT:
        raise ValueError(f"a request of {length} bytes is longer than {REQUEST_LIMIT}")
    data = stream.read(length)
    if len(data) != length:
        raise ValueError(f"the request broke off after {len(data)} of {length} bytes")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("a request is a JSON object")
    return value
