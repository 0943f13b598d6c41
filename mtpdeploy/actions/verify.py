"""`verify`: is what runs what was asked for? Live over the agent, or offline from a log file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpdeploy import inventory as inventories
from mtpdeploy.actions.logfile import read_summary
from mtpdeploy.agent.protocol import StatusRequest, TailRequest
from mtpdeploy.errors import NotFound, UsageError
from mtpdeploy.inventory.values import Deployment, Host
from mtpdeploy.progress import Talk
from mtpdeploy.secret import Secret
from mtpdeploy.sglang import command as commands
from mtpdeploy.sglang.api import ServerInfo, server_info
from mtpdeploy.sglang.logs import Fold, Parser, Summary
from mtpdeploy.sglang.model import ModelConfig, recognise
from mtpdeploy.sglang.verify import Freshness, Verification, judge_version
from mtpdeploy.sglang.verify import verify as compare
from mtpdeploy.sglang.versions import NEWEST, Version

if TYPE_CHECKING:
    from mtpdeploy.actions.reach import Target

# A longer log is not carried over the line: /server_info has the arguments then, and the log's end the acceptance.
_WHOLE_LOG = 64 << 20
_TAIL = 256 << 10


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wanted: None where nobody says."""

    args: Mapping[str, object] | None
    env: Mapping[str, str | Secret]
    version: Version | None
    source: str


def verify(
    *,
    home: Path,
    talk: Talk,
    host: str | None,
    profile: str | None,
    inventory: Sequence[str],
    set_: Sequence[str],
    file: str | None,
    command: str | None,
    sglang_version: str | None,
    model_config: str | None,
    gpu_memory_gb: float | None,
    want_concurrency: int | None,
) -> Any:
    """A Verification; of several hosts one each. Raises UsageError, ConfigError, NotFound and what a connection raises."""
    if command is not None and profile is not None:
        raise UsageError("--command and --profile exclude each other: each says what was asked for")
    version = _version(sglang_version)
    model = ModelConfig.read(model_config) if model_config else None
    if file is not None:
        if host is not None:
            raise UsageError("--file reads a log that lies here, --host asks a server: give one of them")
        log = _read(file, talk)
        guess = version or (judge_version(log.server_args) if log.server_args else None)
        asked = _asked(home, inventory, profile, set_, command or (None if profile else log.command), guess)
        return compare(
            asked.args,
            env=asked.env,
            log=log,
            version=version,
            model=model or _shape(log, asked),
            gpu_memory_gb=gpu_memory_gb,
            wanted_concurrency=want_concurrency,
        )
    from mtpdeploy.actions import reach
    from mtpdeploy.hosts.fanout import on_hosts

    found = {t.host: t for t in reach.targets(home, host, inventory, profile=profile, sets=() if command else set_)}

    def one(target: Host) -> Verification:
        explicit = command if command is not None else profile if profile is not None or set_ else None
        return _live(talk, found[target], explicit, command, set_, version, model, gpu_memory_gb, want_concurrency)

    return on_hosts(tuple(found), one)


def of_log(
    home: Path, talk: Talk, file: str, *, sglang_version: str | None, gpu_memory_gb: float | None
) -> tuple[Summary, Verification]:
    """A log and what it tells of its own launch, against the command that it shows."""
    log, version = _read(file, talk), _version(sglang_version)
    guess = version or (judge_version(log.server_args) if log.server_args else None)
    asked = _asked(home, (), None, (), log.command, guess)
    shape = _shape(log, asked)
    return log, compare(asked.args, env=asked.env, log=log, version=version, model=shape, gpu_memory_gb=gpu_memory_gb)


def _read(file: str, talk: Talk) -> Summary:
    log = read_summary(file, talk)
    if log.is_sglang is not True:
        raise NotFound(f"{file} is not the log of an SGLang server: there is nothing to verify")
    return log


def _version(text: str | None) -> Version | None:
    if text is None:
        return None
    try:
        return Version.parse(text)
    except ValueError as error:
        raise UsageError(f"--sglang-version: {error}") from error


def _asked(
    home: Path,
    inventory: Sequence[str],
    profile: str | None,
    sets: Sequence[str],
    command: str | None,
    version: Version | None,
) -> Asked:
    """The request: a profile with its layers, or a command line as it stands."""
    if command is not None:
        return _of_command(command, sets, version)
    if profile is None:
        return Asked(_set_args(sets) or None, {}, version, "--set" if sets else "nobody")
    deployment = inventories.resolve(inventories.load(home, inventory), None, profile, sets, reveal=False)
    chosen = version or (Version.parse(deployment.sglang_version) if deployment.sglang_version else None)
    return Asked(_wanted(deployment), inventories.env_for(deployment, chosen), chosen, f"profile {profile}")


def _of_command(command: str, sets: Sequence[str], version: Version | None) -> Asked:
    parsed = commands.parse(command, version or NEWEST)
    secrets: dict[str, object] = {name: Secret("") for name in parsed.secrets}
    return Asked({**parsed.args, **secrets, **_set_args(sets)}, dict(parsed.env), version, "the command line")


def _set_args(sets: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: write args.NAME=VALUE")
        if key.startswith("args."):
            found[key.removeprefix("args.")] = value
    return found


def _wanted(deployment: Deployment) -> dict[str, object]:
    args: dict[str, object] = dict(deployment.args)
    if deployment.api_key is not None:
        args["api_key"] = deployment.api_key
    return args


def _shape(log: Summary | None, asked: Asked) -> ModelConfig | None:
    """The model's shape by the path that runs or was asked for, where it is a published one."""
    for values in (log.server_args if log is not None else None, asked.args):
        path = (values or {}).get("model_path")
        if isinstance(path, str) and (found := recognise(path)) is not None:
            return found[0]
    return None


# -- live --------------------------------------------------------------------------------------------------------------------


def _live(
    talk: Talk,
    target: Target,
    explicit: str | None,
    command: str | None,
    sets: Sequence[str],
    version: Version | None,
    model: ModelConfig | None,
    gpu_memory_gb: float | None,
    wanted: int | None,
) -> Verification:
    """explicit: a profile or command that the options name; None: the host's own record of the launch is what was asked for."""
    from mtpdeploy.actions.reach import agent

    deployment = target.deployment
    talk.stage(target.name, "asking the server and its log")
    with agent(target) as client:
        status = client.call("status", StatusRequest(log_tail_bytes=_TAIL))
        release = status.get("release")
        if not release:
            raise NotFound(
                f"{target.name}: {status.get('word', 'nothing is deployed')} {status.get('why') or ''}".rstrip(),
                next_commands=(f"mtpdeploy deploy --host {target.name} --profile {target.profile or 'mtp'}",),
                runbook="log-from-another-launch" if status.get("port_owner") else None,
            )
        log = _log(client, status)
    talk.done(target.name, "read")
    stated = version or (Version.parse(release["sglang_version"]) if release.get("sglang_version") else None)
    if command is not None:
        asked = _of_command(command, sets, stated)
    elif explicit is not None or sets:
        asked = Asked(_wanted(deployment), inventories.env_for(deployment, stated), stated, f"profile {target.profile}")
    else:
        env = {n: v for n, v in (release.get("env") or {}).items() if isinstance(v, str)}
        asked = Asked(release.get("args") or {}, env, stated, f"launch {release['launch_id']}")
    info = _info(status)
    gpus = [g["memory_gb"] for g in status.get("gpus") or () if g.get("memory_gb")]
    return compare(
        asked.args,
        env=asked.env,
        rendered=release.get("argv"),
        live=status.get("argv"),
        live_env_names=status.get("environ_names"),
        server_info=info,
        log=log,
        version=stated,
        freshness=freshness(status),
        model=model or _shape(log, asked),
        gpu_memory_gb=gpu_memory_gb or (min(gpus) if gpus else None),
        wanted_concurrency=wanted,
    )


def _info(status: Mapping[str, Any]) -> ServerInfo | None:
    document = status.get("server_info")
    return server_info(document) if isinstance(document, dict) and "internal_states" in document else None


def _log(client: Any, status: Mapping[str, Any]) -> Summary | None:
    """This launch's log, whole where it is not too long, else its end."""
    facts = status.get("log")
    if not facts:
        return None
    parser, fold = Parser(totals_only=True), Fold()
    if facts.get("size", 0) <= _WHOLE_LOG:

        def take(event: dict[str, Any]) -> None:
            if event.get("event") == "log":
                fold.extend(parser.feed(base64.b64decode(event["data"])))

        client.call("tail", TailRequest(offset=0, follow=False), on_event=take)
    else:
        tail = base64.b64decode(facts.get("tail") or "")
        fold.extend(parser.feed(tail[tail.find(b"\n") + 1 :]))
    fold.extend(parser.close())
    return fold.summary()


def freshness(status: Mapping[str, Any]) -> Freshness:
    """Whether the process that answers is this launch's, by the agent's proof."""
    proof = status.get("proof") or []
    reasons = [f"{p.get('check')}: {_told(p)}" for p in proof]
    broken = [p for p in proof if p.get("holds") is False]
    identity = status.get("identity")
    launch, boot = status.get("launch_id"), status.get("boot")
    if identity in ("earlier launch", "foreign"):
        reasons.insert(
            0,
            f"what answers on the port is {identity if identity == 'foreign' else 'of an earlier launch'}: {status.get('why') or ''}".rstrip(
                ": "
            ),
        )
        return Freshness("stale", tuple(reasons), launch, boot)
    if identity == "ours" and not broken:
        return Freshness("fresh", tuple(reasons), launch, boot)
    if identity == "ours":
        return Freshness("unknown", tuple(reasons), launch, boot)
    reasons.insert(0, str(status.get("why") or f"identity {identity}"))
    return Freshness("unknown", tuple(reasons), launch, boot)


def _told(proof: Mapping[str, Any]) -> str:
    if proof.get("holds") is None:
        return f"cannot be told (expected {proof.get('expected')}, found {proof.get('found')})"
    return (
        f"holds ({proof.get('found')})"
        if proof["holds"]
        else f"expected {proof.get('expected')}, found {proof.get('found')}"
    )
