"""Installs the simulator as a package called sglang, beside an nvidia-smi that knows the simulated card."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from mtpdeploy.inventory.values import Simulate
from mtpdeploy.resources import PACKAGE
from mtpdeploy.sglang.versions import Version
from mtpdeploy.sim import card
from mtpdeploy.sim.card import SETTINGS
from mtpdeploy.sim.faults import FAULTS

MARKER = "MTPDEPLOY_SIMULATED"  # the agent's probe looks for this file in the package

_LAUNCH = """\
from pathlib import Path

from mtpdeploy.sim.server import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent)
"""


def install(folder: Path, simulate: Simulate, python: str = sys.executable) -> dict[str, str]:
    """Writes the shim below `folder`; the environment that puts it in front of everything else.

    With that environment `python -m sglang.launch_server` is the simulator, `importlib.metadata` finds its version, and
    `nvidia-smi` shows its card. `python` must be able to import mtpdeploy's dependencies. ValueError: unknown fault.
    """
    if simulate.fault and simulate.fault not in FAULTS:
        raise ValueError(f"{simulate.fault!r} is no fault of the simulator; known: {', '.join(FAULTS)}")
    version = str(Version.parse(simulate.sglang_version))
    package, info, tools = folder / "sglang", folder / f"sglang-{version}.dist-info", folder / "bin"
    for old in folder.glob("sglang-*.dist-info"):
        if old != info:
            (old / "METADATA").unlink(missing_ok=True)
            old.rmdir()
    for made in (package, info, tools, folder / "card"):
        made.mkdir(parents=True, exist_ok=True)
    files = {
        package / "__init__.py": f'"""Simulated by mtpdeploy."""\n\n__version__ = "{version}"\n',
        package / "launch_server.py": _LAUNCH,
        package / MARKER: "This is not SGLang.\n",
        info
        / "METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\nSummary: Simulated by mtpdeploy\n",
        folder / SETTINGS: json.dumps(asdict(simulate), indent=1) + "\n",
        tools / "nvidia-smi": "#!/bin/sh\nexec "
        + shlex.join([python, "-I", "-S", os.path.abspath(card.__file__), str(folder)])
        + ' "$@"\n',
    }
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            aside.write_text(text)
            aside.chmod(0o755 if path.parent == tools else 0o644)
            aside.replace(path)
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)]),
        "PATH": os.pathsep.join([str(tools), str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
    }


def settings(folder: Path) -> Simulate:
    """What `install` was given."""
    return Simulate(**json.loads((folder / SETTINGS).read_text()))
