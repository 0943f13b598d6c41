"""What would make a launch fail, found before anything is stopped. `doctor` shows it, `deploy` refuses by it.

Each finding says what was found, why it matters and what to type. A port or GPU that the service's own running launch holds is
no obstacle: that launch will be stopped first.
"""

from __future__ import annotations

import os

from mtpdeploy.agent import ports, process
from mtpdeploy.agent.protocol import Facts, Finding, Needs, ProbeSpec
from mtpdeploy.agent.release import Release, Service

_DISK_BYTES = 256 * 1024 * 1024
_SHM_BYTES = 64 * 1024 * 1024
_NOFILE = 4096


def check(service: Service, facts: Facts, spec: ProbeSpec, needs: Needs, host: str) -> list[Finding]:
    """All findings, those that refuse a launch first."""
    living = service.living()
    findings = [
        *_python(facts, spec),
        *_port(spec, living, host),
        *_gpus(facts, spec, needs, living),
        *_model(facts),
        *_space(facts, needs),
        *_limits(facts),
        *_clock(facts),
    ]
    rank = {"refuse": 0, "warn": 1, "note": 2}
    return sorted(findings, key=lambda f: (f["ok"] is True, rank[f["severity"]]))


def refusing(findings: list[Finding]) -> list[Finding]:
    """Those that make a launch pointless."""
    return [f for f in findings if f["ok"] is False and f["severity"] == "refuse"]


def _finding(check: str, ok: bool | None, what: str, why: str, do: str = "", severity: str = "refuse") -> Finding:
    return Finding(check=check, ok=ok, what=what, why=why, type=do, severity=severity)  # type: ignore[typeddict-item]


def _python(facts: Facts, spec: ProbeSpec) -> list[Finding]:
    found = facts.get("python")
    if found is None:
        return []
    name = spec.get("python")
    if found["version"] is None:
        return [
            _finding("python", False, f"{name} does not run: {found['error']}", "SGLang runs with it", f"{name} -V")
        ]
    if found["sglang_version"] is None:
        return [
            _finding(
                "sglang", False, f"{found['error']} ({found['executable']})", "nothing can be launched without it",
                f"{name} -m pip install sglang",
            )
        ]  # fmt: skip
    label = " (simulated)" if found["simulated"] else ""
    return [_finding("sglang", True, f"SGLang {found['sglang_version']}{label}, {found['sglang_location']}", "")]


def _port(spec: ProbeSpec, living: list[Release], host: str) -> list[Finding]:
    port = spec.get("port")
    if port is None:
        return []
    owner = ports.owner(int(port), host)
    why = "SGLang binds its port only after the whole model load, and would fail then"
    if owner is None:
        return [_finding("port", True, f"port {port} is free", why)]
    chain = [] if owner["pid"] is None else [owner["pid"], *process.ancestors(owner["pid"])]
    for release in living:
        main = release.main()
        if (main and main.pid in chain) or owner["launch_id"] == release.launch_id:
            return [
                _finding("port", True, f"port {port} is held by launch {release.launch_id}, which will be stopped", why)
            ]
    do = f"ss -ltnp 'sport = :{port}'" if owner["pid"] is None else f"ps -fp {owner['pid']}"
    if owner["launch_id"] and owner["user"] == process.user_name(
        os.geteuid()
    ):  # one of ours without a release folder, or another service's
        do = f"mtpdeploy adopt --port {port}   # takes launch {owner['launch_id']} over; then `mtpdeploy stop`"
    return [_finding("port", False, ports.describe(owner), why, do)]


def _gpus(facts: Facts, spec: ProbeSpec, needs: Needs, living: list[Release]) -> list[Finding]:
    found = facts.get("gpus")
    if found is None:
        simulated = bool((facts.get("python") or {}).get("simulated"))
        return [
            _finding(
                "gpu", None if simulated else False, facts.get("gpus_error") or "no GPU was found",
                "SGLang needs an accelerator", "nvidia-smi", "note" if simulated else "warn",
            )
        ]  # fmt: skip
    ours = {release.launch_id for release in living}
    wanted = spec.get("gpus")
    out: list[Finding] = []
    for gpu in found:
        if wanted is not None and gpu["index"] not in wanted:
            continue
        name = f"GPU {gpu['index']} ({gpu['name']})"
        mine = sum(p["used_gb"] or 0.0 for p in gpu["processes"] if p["launch_id"] in ours)
        others = [p for p in gpu["processes"] if p["launch_id"] not in ours]
        need = (needs.get("gpu_free_gb") or {}).get(str(gpu["index"]))
        free = None if gpu["free_gb"] is None else gpu["free_gb"] + mine
        who = "; ".join(
            f"pid {p['pid']} of {p['user'] or 'a hidden user'} holds {p['used_gb'] if p['used_gb'] is not None else '?'} GiB: "
            f"{(p['command'] or 'unknown program')[:80]}"
            for p in others
        )
        why = "memory that others hold is missing from SGLang's pools; no fraction setting brings it back"
        if need is not None and free is not None and free < need:
            text = f"{name}: {free:.1f} GiB would be free, the plan needs {need:.1f}" + (f"; {who}" if who else "")
            out.append(_finding("gpu memory", False, text, why, "nvidia-smi"))
        elif others:
            out.append(_finding("gpu memory", False, f"{name}: {who}", why, "nvidia-smi", "warn"))
        else:
            text = f"{name}: {'unknown' if free is None else f'{free:.1f} GiB'} free for this launch"
            out.append(_finding("gpu memory", True if free is not None else None, text, why))
    missing = set(wanted or ()) - {gpu["index"] for gpu in found}
    if missing:
        out.append(_finding("gpu", False, f"there is no GPU {', '.join(map(str, sorted(missing)))}", "the plan uses it",
                            "nvidia-smi -L"))  # fmt: skip
    return out


def _model(facts: Facts) -> list[Finding]:
    found = facts.get("model")
    if found is None:
        return []
    why = "SGLang reads config.json and the weights at the start"
    if found["readable"]:
        size = found["weights_bytes"]
        text = f"{found['path']}: {'no weight files' if size is None else f'{size / 2**30:.1f} GiB of weights'}"
        return [_finding("model", True, text, why)]
    local = str(found["path"]).startswith(("/", "~", "."))
    if not local:
        token = (
            "a Hugging Face token is there"
            if facts.get("hf_token")
            else "no Hugging Face token is there: a gated model fails"
        )
        return [
            _finding("model", None, f"{found['path']}: {found['error']}; {token}", why, "huggingface-cli login", "warn")
        ]
    return [
        _finding("model", False, f"{found['path']} cannot be used: {found['error']}", why, f"ls -l {found['path']}")
    ]


def _space(facts: Facts, needs: Needs) -> list[Finding]:
    out = []
    for check, have, need, where, severity in (
        ("disk", facts.get("disk_free_bytes"), needs.get("disk_bytes", _DISK_BYTES), facts["workdir"], "refuse"),
        ("shared memory", facts.get("shm_free_bytes"), needs.get("shm_bytes", _SHM_BYTES), "/dev/shm", "warn"),
    ):
        why = (
            "release, log and records are written there"
            if check == "disk"
            else "SGLang's processes pass tensors through it"
        )
        if have is None:
            out.append(_finding(check, None, f"{where}: free space unknown", why, f"df -h {where}", "note"))
            continue
        text = f"{where}: {have / 2**20:.0f} MiB free" + ("" if have >= need else f", {need / 2**20:.0f} MiB needed")
        out.append(_finding(check, have >= need, text, why, "" if have >= need else f"df -h {where}", severity))
    if not facts["workdir_writable"]:
        out.append(_finding("work folder", False, f"{facts['workdir']} cannot be written by {facts['user']}",
                            "releases live there", f"ls -ld {facts['workdir']}"))  # fmt: skip
    return out


def _limits(facts: Facts) -> list[Finding]:
    out = []
    hard = facts["nofile_hard"]
    if 0 <= hard < _NOFILE:
        out.append(_finding("open files", False, f"at most {hard} open files", "each connection and weight file needs one",
                            "ulimit -Hn", "warn"))  # fmt: skip
    limit, total = facts.get("cgroup_memory_limit_bytes"), facts.get("memory_total_bytes")
    if limit is not None and total is not None and limit < total:
        out.append(_finding("memory limit", None, f"this cgroup may use {limit / 2**30:.1f} GiB of host memory",
                            "weights pass through host memory; beyond the limit the kernel kills the scheduler (exit -9)",
                            "cat /sys/fs/cgroup/memory.max", "note"))  # fmt: skip
    if not facts["supervisors"]["systemd"] and facts["supervisors"]["tmux"] is None:
        out.append(_finding("supervisor", None, "neither systemd nor tmux: the agent's own supervisor will be used",
                            "the server will not come back after a reboot", "", "note"))  # fmt: skip
    return out


def _clock(facts: Facts) -> list[Finding]:
    if facts.get("clock_synchronised") is False:
        return [_finding("clock", False, "the clock is not synchronised", "times in logs are compared with this machine's",
                         "timedatectl", "warn")]  # fmt: skip
    return []
