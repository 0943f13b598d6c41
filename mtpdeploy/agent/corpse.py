"""What is left of a failed launch, gathered before anything can change it: for the person who looks at it next morning."""

from __future__ import annotations

import base64
import os
import re
import shutil
from typing import Any

from mtpdeploy.agent import supervisor
from mtpdeploy.agent.clock import utc_now
from mtpdeploy.agent.command import Root, run
from mtpdeploy.agent.fault import Fault
from mtpdeploy.agent.release import Release
from mtpdeploy.sglang.masking import mask, mask_values

# Lines of the kernel that explain a death from outside: the OOM killer, and NVIDIA's Xid errors.
_KERNEL = re.compile(r"out of memory|oom-kill|oom_reaper|killed process|NVRM|Xid|segfault", re.IGNORECASE)
_LOG_BYTES = 256 * 1024


def gather(release: Release, log_bytes: int | None) -> dict[str, Any]:
    """{release, state, log (base64, masked), log_offset, supervisor, nvidia_smi, kernel, env, limits}; None = not readable."""
    state = release.state()
    kind = (state.get("supervisor") or {}).get("kind")
    log, offset = _log(release, log_bytes or _LOG_BYTES)
    try:
        asked: Any = release.read()
    except Fault as fault:
        asked = {"error": fault.message}
    return {
        "gathered_utc": utc_now(),
        "release": asked,
        "state": state,
        "log": log,
        "log_offset": offset,
        "supervisor": [mask(line) for line in supervisor.evidence(release, kind, Root())],
        "unit": supervisor.unit_state(release, kind) or None,
        "nvidia_smi": _nvidia_smi(release),
        "kernel": kernel_lines(),
        "env": mask_values(dict(release.environment())),
    }


def _log(release: Release, wanted: int) -> tuple[str | None, int | None]:
    """The end of the last boot's log (secrets masked, so lengths may differ), and where it began."""
    boot = release.last_boot() or {}
    try:
        size = os.stat(release.log).st_size
        start = max(int(boot.get("log_offset") or 0), size - wanted)
        with open(release.log, "rb") as file:
            file.seek(start)
            text = mask(file.read(wanted).decode(errors="replace"))
    except OSError:
        return None, None
    return base64.b64encode(text.encode()).decode(), start


def _nvidia_smi(release: Release) -> list[str] | None:
    path = {k: v for k, v in release.environment().items() if k == "PATH"}
    program = shutil.which("nvidia-smi", path=path.get("PATH"))
    if program is None:
        return None
    done = run([program], env=path, timeout_s=20)
    return mask(done.out or done.err).splitlines()


def kernel_lines() -> list[str] | None:
    """The kernel's last words on killed processes and GPU errors; None if this user may not read them."""
    for argv in (["journalctl", "-k", "-b", "-n", "2000", "--no-pager", "-o", "short-iso"], ["dmesg", "-T"]):
        if shutil.which(argv[0]) is None:
            continue
        done = run(argv, timeout_s=10)
        if done.ok:
            return [mask(line) for line in done.out.splitlines() if _KERNEL.search(line)][-40:]
    return None
