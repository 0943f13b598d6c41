"""`init`: a home folder to start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtpdeploy.errors import UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.resources import bundled

# The same text as the checkout's fabfile.py, which a wheel does not hold.
FABFILE = '''"""The Fabric door: `fab --list`, `fab deploy --host gpu1 --profile mtp`. The tasks are made from mtpdeploy's table of verbs."""

from mtpdeploy.fabric_door import collection

namespace = collection()
'''
GITIGNORE = "/runs/\n/index.sqlite3*\n"


@dataclass(frozen=True, slots=True)
class Made:
    """What was written into the folder, and what was there already and kept; both relative to it."""

    folder: Path
    written: tuple[str, ...]
    kept: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "written": list(self.written), "kept": list(self.kept)}


def init(*, home: Path, talk: Talk, folder: str | None, all: bool) -> Made:
    """Raises UsageError when the folder cannot be written."""
    target = Path(folder).expanduser().absolute() if folder else home
    written: list[str] = []
    kept: list[str] = []
    try:
        for name, content in _files(all):
            path = target / name
            if path.exists():
                kept.append(name)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            written.append(name)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    return Made(target, tuple(written), tuple(kept))


def _files(everything: bool) -> Iterator[tuple[str, str]]:
    yield "fabfile.py", FABFILE
    yield ".gitignore", GITIGNORE
    for kind in ("inventories", "templates"):
        shipped = bundled(kind)
        for path in sorted(p for p in shipped.rglob("*") if p.suffix in (".yml", ".j2")):
            name = f"{kind}/{path.relative_to(shipped)}"
            if name == "inventories/example.yml" or (everything and name != "inventories/local.yml"):
                yield name, path.read_text(encoding="utf-8")
