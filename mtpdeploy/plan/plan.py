"""The plan of a deployment: what will run, what will be written, in which order and why, and what it will cost in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import pbkdf2_hmac, sha256
from pathlib import Path
from typing import Any

from mtpdeploy.errors import ConfigError, PlanRefused
from mtpdeploy.inventory import NO_HOST, env_for
from mtpdeploy.inventory.values import ArgValue, Deployment
from mtpdeploy.plan.known import Known
from mtpdeploy.plan.render import RESTART_LIMIT, RESTART_WINDOW_S, File, render
from mtpdeploy.secret import MASK, Secret
from mtpdeploy.sglang import command, memory, overrides, rules
from mtpdeploy.sglang.masking import is_secret, mask
from mtpdeploy.sglang.rules import Finding
from mtpdeploy.sglang.versions import Version

UNLAUNCHED = "00000000T000000Z-000000"  # the launch id of a plan that nobody has launched


@dataclass(frozen=True, slots=True)
class Step:
    """One act and its reason."""

    do: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `deploy` will do. Nothing has been done; only templates were read.

    args: canonical names with `slots_for` applied. secrets: SGLang settings that go into server.yml.
    effective: what SGLang will make of the arguments, with the rule. budget: None with the reason in `no_memory_because`.
    """

    deployment: Deployment
    known: Known
    args: Mapping[str, ArgValue]
    argv: tuple[str, ...]
    env: Mapping[str, str | Secret]
    secrets: Mapping[str, Secret]
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    effective: Mapping[str, tuple[object, str]]
    budget: memory.Budget | None
    fingerprint: str
    home: Path | None = None

    @property
    def version(self) -> Version:
        return self.known.version

    def files(self, launch_id: str = UNLAUNCHED) -> tuple[File, ...]:
        """The release's files for that launch, release.json excepted."""
        return render(
            self.deployment,
            self.argv,
            self.env,
            self.secrets,
            sglang_version=str(self.version) if self.known.version_is_fact else None,
            launch_id=launch_id,
            home=self.home,
        )

    @property
    def wants_help(self) -> bool:
        """This version is not in the flag table, and its own --help was not read: the probe should (`help_flags`)."""
        return not self.version.known and self.known.help_flags is None

    def needs(self) -> dict[str, Any]:
        """What the host must have before anything is stopped (the agent's Needs); GiB by GPU index."""
        if self.budget is None or not self.known.gpus:
            return {}
        p = self.budget.pools
        least = p.weights_gb + p.draft_weights_gb + p.state_gb + 1.0
        return {"gpu_free_gb": {str(index): round(least, 2) for index in self.known.gpus}}

    def release(self, launch_id: str, *, created_utc: str, by: str) -> dict[str, Any]:
        """release.json (agent.protocol.ReleaseFile): no secret in clear."""
        d = self.deployment
        served = self.args.get("served_model_name")
        return {
            "launch_id": launch_id,
            "service": d.service,
            "profile": d.profile,
            "created_utc": created_utc,
            "by": by,
            "fingerprint": self.fingerprint,
            "host": str(self.args["host"]),
            "port": _port(self.args),
            "python": d.python,
            "argv": list(self.argv),
            "args": {name: _plain(value) for name, value in self.args.items()},
            "env": self.masked_env(),
            "sglang_version": str(self.version) if self.known.version_is_fact else None,
            "supervisor": d.supervisor,
            "model_path": str(self.args["model_path"]),
            "served_model_name": served if isinstance(served, str) else str(self.args["model_path"]),
            "drain_timeout_s": d.drain_timeout_s,
            "ready_timeout_s": d.ready_timeout_s,
            "simulated": self.known.simulated,
            "restart_limit": RESTART_LIMIT,
            "restart_window_s": RESTART_WINDOW_S,
            "plan": self.as_json(files=False),
            "notes": list(self.notes),
        }

    def masked_env(self) -> dict[str, str]:
        return {n: MASK if isinstance(v, Secret) or is_secret(n) else v for n, v in sorted(self.env.items())}

    def as_json(self, *, files: bool = True) -> dict[str, object]:
        shown = self.files() if files else ()
        return {
            "sglang_version": str(self.version),
            "sglang_version_source": self.known.version_source,
            "command": [mask(word) for word in self.argv],
            "env": self.masked_env(),
            **({"files": [f.as_json() for f in shown]} if files else {}),
            "steps": [{"do": s.do, "why": s.why} for s in self.steps],
            "notes": list(self.notes),
            "findings": [f.as_json() for f in self.findings],
            "effective": [
                {"name": n, "value": _plain(v), "rule": rule} for n, (v, rule) in sorted(self.effective.items())
            ],
            "memory": self.budget.as_json() if self.budget else None,
            "memory_unknown_because": self.known.no_memory_because if self.budget is None else None,
            "profile": self.deployment.profile or None,
            "host": None if self.deployment.host is NO_HOST else self.deployment.host.name,
            "service": self.deployment.service,
            "fingerprint": self.fingerprint,
            "simulated": self.known.simulated,
        }


def make_plan(
    deployment: Deployment,
    known: Known,
    *,
    home: Path | None = None,
    as_written: bool = False,
) -> Plan:
    """The plan, or PlanRefused naming everything that would kill the launch, before anything is touched.

    as_written: the deployment is somebody's own command line; that it listens openly is said and not refused.
    """
    version = known.version
    env = env_for(deployment, version)
    notes = [*deployment.notes, *known.notes]
    args = _sized(deployment, env, known, notes)
    secrets: dict[str, Secret] = {} if deployment.api_key is None else {"api_key": deployment.api_key}

    findings = list(rules.check(args, env, version, known.model, known.gpu_memory_gb))
    findings += _open_server(args, secrets, refuse=not as_written)
    built, problems = _command(deployment, args, known)
    notes += built.notes if built else ()
    refused = [f for f in findings if f.severity == "refuse"]
    if refused or problems:
        _refuse(deployment, refused, problems, version)
    assert built is not None
    budget, known = _budget(args, env, known)
    findings += _memory_findings(budget)
    _, effective = overrides.settle(args, env, version, known.model, known.gpu_memory_gb)
    return Plan(
        deployment=deployment,
        known=known,
        args=args,
        argv=built.argv,
        env=env,
        secrets=secrets,
        steps=_steps(deployment, version, known),
        notes=tuple(dict.fromkeys(notes)),
        findings=tuple(findings),
        effective=effective,
        budget=budget,
        fingerprint=_fingerprint(deployment, built.argv, env, secrets, known, home),
        home=home,
    )


def _sized(
    deployment: Deployment, env: Mapping[str, str | Secret], known: Known, notes: list[str]
) -> dict[str, ArgValue]:
    """`slots_for` turned into the two flags that only work together."""
    args = dict(deployment.args)
    wanted = deployment.slots_for
    if wanted is None:
        return args
    settings, _ = overrides.settle(args, env, known.version, known.model, known.gpu_memory_gb)
    sizes = memory.slots_for(wanted, settings)
    if known.model is not None and not known.model.hybrid:
        sizes.pop("max_mamba_cache_size")
    for name, value in sizes.items():
        if args.get(name) is None:
            args[name] = value
        elif args[name] != value:
            notes.append(f"slots_for {wanted} would set {name} {value}; args.{name} {args[name]} is set and wins")
    if "max_mamba_cache_size" in sizes:
        notes.append(
            f"slots_for {wanted}: {settings.slots_per_request} state slots a request in SGLang {known.version}, "
            f"so max_mamba_cache_size {sizes['max_mamba_cache_size']} and max_running_requests {sizes['max_running_requests']} together"
        )
    return args


def _command(
    deployment: Deployment, args: Mapping[str, ArgValue], known: Known
) -> tuple[command.Command | None, list[str]]:
    try:
        return command.build(args, known.version, python=deployment.python, help_flags=known.help_flags), []
    except PlanRefused as refused:
        problems = refused.details.get("problems")
        return None, [str(p) for p in problems] if isinstance(problems, list) else [refused.message]


def _refuse(deployment: Deployment, findings: Sequence[Finding], problems: Sequence[str], version: Version) -> None:
    lines = [*problems]
    for finding in findings:
        fix = " and ".join(f"{'' if n.startswith('env.') else 'args.'}{n}={_shown(v)}" for n, v in finding.fix.items())
        lines.append(finding.message + (f" [would be right: {fix}]" if fix else ""))
    sets = " ".join(
        f"--set {'' if n.startswith('env.') else 'args.'}{n}={_shown(v)}" for f in findings for n, v in f.fix.items()
    )
    named = f" --profile {deployment.profile}" if deployment.profile else ""
    named += "" if deployment.host is NO_HOST else f" --host {deployment.host.name}"
    head = f"SGLang {version} would not serve with this:"
    raise PlanRefused(
        head + (f" {lines[0]}" if len(lines) == 1 else "\n  - " + "\n  - ".join(lines)) + "\nNothing was touched.",
        next_commands=[f"mtpdeploy plan{named} {sets}"] if sets and deployment.profile else [],
        runbook="bad-arguments",
        details={
            "sglang_version": str(version),
            "problems": list(problems),
            "findings": [f.as_json() for f in findings],
        },
    )


def _open_server(args: Mapping[str, ArgValue], secrets: Mapping[str, Secret], *, refuse: bool) -> list[Finding]:
    host = str(args.get("host") or "127.0.0.1")
    if host in ("127.0.0.1", "localhost", "::1") or host.startswith("127.") or "api_key" in secrets:
        return []
    return [
        Finding(
            "refuse" if refuse else "warn",
            "open-server",
            f"host {host} is reachable from outside and no api_key is set: anybody could use the server. "
            "Leave host 127.0.0.1 and use `mtpdeploy tunnel`, or set api_key (from_env: or from_file:) in the profile",
            {"host": "127.0.0.1"},
        )
    ]


def _budget(
    args: Mapping[str, ArgValue], env: Mapping[str, str | Secret], known: Known
) -> tuple[memory.Budget | None, Known]:
    if known.model is None or (known.gpu_memory_gb is None and known.available_gb is None):
        return None, known
    try:
        return (
            memory.budget(
                args,
                env,
                known.version,
                known.model,
                gpu_memory_gb=known.gpu_memory_gb,
                available_gb=known.available_gb,
                calibration=known.calibration,
                assumptions=known.assumptions,
            ),
            known,
        )
    except (PlanRefused, ConfigError) as unknown:
        return None, replace(known, no_memory_because=unknown.message)


def _memory_findings(budget: memory.Budget | None) -> list[Finding]:
    if budget is None or budget.pools.failure is None:
        return []
    failure = budget.pools.failure
    best = budget.suggestions[0].set if budget.suggestions else {}
    return [
        Finding(
            "warn",
            failure.cause,
            f"by the memory budget this launch would end with `{failure.line}`: {failure.fix}",
            best,
        )
    ]


def _steps(deployment: Deployment, version: Version, known: Known) -> tuple[Step, ...]:
    d = deployment
    where = f"{d.workdir}/{d.service}"
    where_to = "the host" if d.host is NO_HOST else d.host.name
    supervisor = {
        "auto": "the best supervisor that the host has (systemd, systemd-user, tmux, detached, in this order)",
        "systemd": "a system unit of systemd",
        "systemd-user": "a user unit of systemd with linger",
        "tmux": "a tmux session of its own socket",
        "detached": "the agent's own small supervisor, detached from the session",
    }[d.supervisor]
    return (
        Step(f"lock {where}", "two people who change one service at once would leave neither's"),
        Step(
            "compare fingerprints, and stop here if the same is running and ready",
            "an unchanged deploy must not restart a serving server",
        ),
        Step(
            f"probe {where_to}: SGLang in {d.python}, GPUs, port {_port(d.args)}, model, disk",
            f"the command is built for SGLang {version}"
            + ("" if known.version_is_fact else ", which is assumed so far")
            + "; a taken port shows only after the whole model load",
        ),
        Step(
            f"write a new release below {where}/releases aside, fsync it, rename it, point `current` at it",
            "whatever is interrupted leaves the old release or the new one, never half of one",
        ),
        Step(
            f"stop the release that runs, draining up to {d.drain_timeout_s:g} s, by its recorded pid, start time and boot id",
            "its GPU memory and port are needed; nothing is ever killed by name",
        ),
        Step(
            f"start launch.sh under {supervisor}",
            "it must outlive this connection, and restart after a crash, not for ever",
        ),
        Step(
            f"follow this launch's own log until a real generation answers; give up after {d.ready_timeout_s:g} s without a new line",
            "a 200 from /health may come from another launch",
        ),
        Step(
            "compare what is in force with what was asked for",
            "SGLang rewrites arguments and caps concurrency without an error",
        ),
    )


def _fingerprint(
    deployment: Deployment,
    argv: Sequence[str],
    env: Mapping[str, str | Secret],
    secrets: Mapping[str, Secret],
    known: Known,
    home: Path | None,
) -> str:
    """Equal exactly where a second deploy would change nothing. Secrets enter through a slow hash, so it gives none away."""
    version = str(known.version) if known.version_is_fact else None
    files = render(deployment, argv, env, secrets, sglang_version=version, launch_id=UNLAUNCHED, home=home)
    salt = f"mtpdeploy {deployment.service}".encode()

    def digest(file: File) -> str:
        data = file.content.encode()
        return (pbkdf2_hmac("sha256", data, salt, 50_000) if file.secret else sha256(data).digest()).hex()

    document = {
        "files": {f.path: [f.mode, digest(f)] for f in files},
        "python": deployment.python,
        "service": deployment.service,
        "supervisor": deployment.supervisor,
        "sglang_version": version,
        "ready_timeout_s": deployment.ready_timeout_s,
        "drain_timeout_s": deployment.drain_timeout_s,
    }
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _port(args: Mapping[str, ArgValue]) -> int:
    port = args.get("port")
    return port if isinstance(port, int) else 30000


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _shown(value: object) -> str:
    return json.dumps(_plain(value)) if not isinstance(value, str) else value
