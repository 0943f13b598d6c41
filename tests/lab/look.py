"""What there is on a host, seen by root from inside and without the product's own eyes: run in the host, prints JSON. The usual work
folders of all users are looked at, and those that are named.

python3 -I -S look.py WORKDIR…
"""

from __future__ import annotations

import json
import marshal
import os
import sys
import zipfile
from pathlib import Path
from typing import Any


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start time)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def processes() -> list[dict[str, Any]]:
    """Those that carry a launch id, and agents."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or (stat := _stat(int(name))) is None or stat[0] in "ZX":
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            words = [w.decode(errors="replace") for w in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[:-1]]
        except OSError:
            continue
        launch = next((e[20:].decode() for e in environ if e.startswith(b"MTPDEPLOY_LAUNCH_ID=")), None)
        agent = next((w for w in words if w.endswith(".pyz") and "/agent/" in w), None)
        if launch or (agent and words and "python" in words[0]):
            found.append({"pid": int(name), "state": stat[0], "parent": stat[1], "start_time": stat[2], "launch": launch,
                          "words": [w[:200] for w in words], "agent": bool(agent)})  # fmt: skip
    return found


def listeners() -> dict[int, list[int]]:
    """Port → pids that listen there."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        try:
            links = (
                [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
                if name.isdigit()
                else []
            )
        except OSError:
            continue
        for link in links:
            if link.startswith("socket:[") and (port := inodes.get(link[8:-1])):
                found.setdefault(port, []).append(int(name))
    return found


def service(folder: Path, broken: list[str]) -> dict[str, Any]:
    """A service's records; what is half-written goes into `broken`."""

    def document(path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            broken.append(f"{path}: {error}")
            return None

    launches = {}
    for path in sorted((folder / "releases").glob("2*")):
        release = document(path / "release.json")
        state = document(path / "state.json") if (path / "state.json").exists() else {"boots": []}
        launches[path.name] = {"release": release, "state": state}
        script = path / "launch.sh"
        if release and not (script.read_text().rstrip().splitlines() or [""])[-1].startswith("exec "):
            broken.append(f"{script} is cut short")
    current = None
    if (folder / "current").is_symlink():
        current = os.path.basename(os.readlink(folder / "current"))
        if current not in launches:
            broken.append(f"current points to {current}, which is not there")
    for name in ("lock.json", "intent.json"):
        if (folder / name).exists():
            document(folder / name)
    return {"folder": str(folder), "current": current, "launches": launches, "lock": (folder / "lock.json").exists(),
            "intent": (folder / "intent.json").exists()}  # fmt: skip


def agents(workdir: Path) -> list[str]:
    """Agents that are not whole: their zips, and what Python compiled beside them."""
    wrong = []
    for archive in workdir.glob("agent/*.pyz"):
        try:
            bad = zipfile.ZipFile(archive).testzip()
        except (OSError, zipfile.BadZipFile) as error:
            bad = str(error)
        if bad:
            wrong.append(f"{archive}: {bad}")
    compiled = workdir.glob("agent/*.pyz.d/**/*.pyc")
    return wrong + [f"{path} is cut short" for path in compiled if not whole(path)]


def whole(compiled: Path) -> bool:
    """Whether a compiled file was written to its end."""
    try:
        marshal.loads(compiled.read_bytes()[16:])
    except (OSError, EOFError, ValueError):
        return False
    return True


def main(more: list[str]) -> None:
    usual = [*Path("/home").glob("*/.mtpdeploy"), Path("/root/.mtpdeploy")]
    workdirs = sorted({str(path) for path in [*usual, *map(Path, more)] if path.is_dir()})
    broken: list[str] = []
    services = [service(p.parent, broken) for w in workdirs for p in sorted(Path(w).glob("*/releases"))]
    for workdir in workdirs:
        broken += agents(Path(workdir))
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    print(json.dumps({"processes": processes(), "listeners": listeners(), "services": services, "broken": broken,
                      "boot_id": boot_id}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
