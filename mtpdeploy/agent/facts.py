"""Reads the host: everything that a plan, a preflight or a doctor wants to know. Reads only.

What cannot be read is None; nothing is assumed. Questions to the deployment's Python are asked in one child process of that
Python (importing SGLang would take seconds and a GPU context; its metadata takes milliseconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from mtpdeploy.agent import gpus, ports, process, supervisor
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.command import Root, run
from mtpdeploy.agent.protocol import Facts, ProbeSpec
from mtpdeploy.agent.release import living_launches

# Runs inside the deployment's python. `simulated`: the shim's package carries a marker file.
_ASK_PYTHON = r"""
import importlib.metadata as m, importlib.util as u, json, os, sys
out = {"executable": sys.executable, "version": sys.version.split()[0], "sglang_version": None, "sglang_location": None,
       "simulated": False, "aiohttp": u.find_spec("aiohttp") is not None, "error": None}
try:
    d = m.distribution("sglang")
    out["sglang_version"] = d.version
    out["sglang_location"] = str(d.locate_file("sglang"))
except m.PackageNotFoundError:
    out["error"] = "SGLang is not installed for this python"
spec = u.find_spec("sglang")
if spec is not None and spec.submodule_search_locations:
    place = list(spec.submodule_search_locations)[0]
    out["sglang_location"] = place
    out["simulated"] = os.path.exists(os.path.join(place, "MTPDEPLOY_SIMULATED"))
    if out["sglang_version"] is None:
        out["error"] = "a package sglang is importable and has no metadata, so its version is unknown"
out["path"] = sys.path
print(json.dumps(out))
"""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def read(workdir: Path, spec: ProbeSpec, root: Root) -> Facts:
    """All facts. Takes some tenths of a second; `help_flags` some seconds more."""
    env = {str(k): str(v) for k, v in (spec.get("env") or {}).items()}
    uname = os.uname()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = _meminfo()
    facts = Facts(
        hostname=uname.nodename,
        os=_os_name(),
        kernel=uname.release,
        architecture=uname.machine,
        user=process.user_name(os.geteuid()),
        uid=os.geteuid(),
        home=os.path.expanduser("~"),
        boot_id=process.boot_id(),
        in_container=_container(),
        agent_python=sys.executable,
        agent_python_version=platform.python_version(),
        cpu_count=os.cpu_count(),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        cgroup_memory_limit_bytes=_cgroup_limit(),
        nofile_soft=soft,
        nofile_hard=hard,
        memlock_soft=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        workdir=str(workdir),
        workdir_writable=_writable(workdir),
        supervisors=supervisor.survey(root),
        tmux=supervisor.tmux_version(),
        hf_token=_hf_token(env),
        clock_synchronised=_clock_synchronised(),
    )
    way = root.way()
    facts["sudo"] = (
        "passwordless" if way == "passwordless" else "root" if way == "root" else "none" if way == "none" else "asks"
    )
    facts["shm_total_bytes"], facts["shm_free_bytes"] = _space("/dev/shm")
    facts["disk_total_bytes"], facts["disk_free_bytes"] = _space(str(_existing(workdir)))
    try:
        facts["gpus"], facts["gpus_error"] = gpus.read(env), None
    except gpus.NoGpus as error:
        facts["gpus"], facts["gpus_error"] = None, str(error)
    facts["living_launches"] = living_launches(workdir)
    if python := spec.get("python"):
        facts["python"] = ask_python(python, env)
        facts["help_flags"] = _help_flags(python, env) if spec.get("help_flags") else None
    if model := spec.get("model_path"):
        facts["model"] = _model(model, env)
    if port := spec.get("port"):
        facts["port_owner"] = ports.owner(int(port))
        facts["port_free"] = facts["port_owner"] is None
    facts["utc"] = utc_now()
    return facts


def ask_python(python: str, env: dict[str, str], *, with_path: bool = False) -> dict[str, Any]:
    """{executable, version, sglang_version, sglang_location, simulated, aiohttp, error} of the deployment's interpreter.

    with_path: and `path`, its sys.path.
    """
    program = os.path.expanduser(python)
    done = run([program, "-c", _ASK_PYTHON], env=env, timeout_s=30)
    try:
        value = json.loads(done.out.splitlines()[-1]) if done.ok else None
    except (ValueError, IndexError):
        value = None
    if isinstance(value, dict):
        path = value.pop("path", [])
        return {**value, "path": path} if with_path else value
    return {
        "executable": python, "version": None, "sglang_version": None, "sglang_location": None,
        "simulated": False, "aiohttp": False, "error": done.said,
    }  # fmt: skip


def _help_flags(python: str, env: dict[str, str]) -> list[str] | None:
    """Every long option that this SGLang's own --help names; None if it did not answer."""
    import re

    done = run([os.path.expanduser(python), "-m", "sglang.launch_server", "--help"], env=env, timeout_s=120)
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", done.out)))
    return flags or None


def _model(path: str, env: dict[str, str]) -> dict[str, Any]:
    """The model as this host has it: a folder, or a name in the Hugging Face cache."""
    value: dict[str, Any] = {
        "path": path, "readable": False, "config": None, "weights_bytes": None, "weight_files": None, "error": None,
    }  # fmt: skip
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir() and not path.startswith(("/", "~", ".")) and path.count("/") == 1:
        cached = _hub_snapshot(path, env)
        if cached is None:
            value["error"] = "not a folder here, and not in the Hugging Face cache: it would be downloaded at the start"
            return value
        folder = cached
    try:
        value["config"] = json.loads((folder / "config.json").read_text())
        files = [entry for entry in os.scandir(folder) if entry.name.endswith(_WEIGHTS)]
        # Where a checkpoint lies in two formats, SGLang reads the safetensors (load_format auto).
        tensors = [f for f in files if f.name.endswith(_WEIGHTS[0]) and not f.name.startswith("consolidated")]
        sizes = [entry.stat().st_size for entry in tensors or files]
        value.update(readable=True, weights_bytes=sum(sizes) if sizes else None, weight_files=len(sizes))
    except (OSError, ValueError) as error:
        value["error"] = f"{folder / 'config.json'}: {getattr(error, 'strerror', None) or error}"
    return value


def _hub_snapshot(name: str, env: dict[str, str]) -> Path | None:
    """The newest snapshot of a model in the hub's cache (its documented layout: models--OWNER--NAME/snapshots/REV)."""
    home = env.get("HF_HOME") or os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = env.get("HF_HUB_CACHE") or os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = Path(hub) / f"models--{name.replace('/', '--')}" / "snapshots"
    try:
        found = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime)
    except OSError:
        return None
    return found[-1] if found else None


def _hf_token(env: dict[str, str]) -> bool:
    """Whether a Hugging Face token is there; the token itself is not read."""
    if any(env.get(name) or os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    home = env.get("HF_HOME") or os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return os.path.exists(os.path.join(home, "token"))


def _os_name() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip().strip('"')
    return None


def _container() -> str | None:
    """The container's kind as its manager told PID 1, or by the marks that docker and podman leave."""
    with contextlib.suppress(OSError):
        text = Path("/run/systemd/container").read_text().strip()
        if text:
            return text
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    return process.environment(1).get("container") if process.environment(1) else None  # type: ignore[union-attr]


def _meminfo() -> dict[str, int]:
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    return found


def _cgroup_limit() -> int | None:
    """The tightest memory limit above this process, v2 or v1; None if there is none."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                base, name = Path("/sys/fs/cgroup"), "memory.max"
            elif "memory" in controllers.split(","):
                base, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            else:
                continue
            here = base / path.lstrip("/")
            for folder in (here, *here.parents):
                if base not in (folder, *folder.parents):
                    break
                text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
                if text != "max" and int(text) < 1 << 60:
                    limits.append(int(text))
    return min(limits) if limits else None


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _space(path: str) -> tuple[int | None, int | None]:
    """(total, free for this user) bytes of the file system of `path`."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _existing(path: Path) -> Path:
    """The nearest folder upwards that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _writable(workdir: Path) -> bool:
    return os.access(_existing(workdir), os.W_OK | os.X_OK)


def _clock_synchronised() -> bool | None:
    if shutil.which("timedatectl") is None:
        return None
    done = run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], timeout_s=5)
    return {"yes": True, "no": False}.get(done.out.strip()) if done.ok else None
