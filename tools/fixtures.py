"""Turns recorded runs of a real SGLang into test fixtures: scrubbed, trimmed, packed.

    python tools/fixtures.py RECIPE.json OUT_DIR

RECIPE.json lists what was recorded: [{"name", "kind": "server" | "failure", "command", "made_by", "machine", "date_utc",
"folders": {"/where/models": "/models"},
"log": path, "server_info": path, "metrics": path, "model_info": path, …}]. OUT_DIR gets manifest.json (all but the
paths) and one archive per kind, KIND.tar.xz, with NAME/server.log, NAME/server_info.json and so on.

What is changed, and nothing else:
- folders of the recording machine: models to /models, Python packages to /site, Python to /usr, the work folder to /srv/mtpdeploy
- of uvicorn's access lines those that repeat an earlier one but for the client's port
- of the line that lists the arguments nothing; it holds no secret, the recordings were made without keys
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDERS = (
    (re.compile(r"/root/stage/models"), "/models"),
    (re.compile(r"/root/stage/site"), "/site"),
    (re.compile(r"/opt/torch/\.venv/lib/python3\.12/site-packages"), "/site"),
    (re.compile(r"/root/(?!stage|mtpdeploy|cache)[^'\"\s]*?/lib/python3\.12"), "/usr/lib/python3.12"),
    (re.compile(r"/root/mtpdeploy"), "/srv/mtpdeploy"),
    (re.compile(r"/root/stage"), "/srv/cache"),
)
BODIES = {
    "log": "server.log",
    "server_info": "server_info.json",
    "metrics": "metrics.txt",
    "model_info": "model_info.json",
}
_ACCESS = re.compile(rb'INFO:     \S+ - ("[A-Z]+ \S+ HTTP/1\.1" \d+)')


def scrub(text: str, folders: Mapping[str, str] = {}) -> str:
    """`text` without the recording machine's folders; `folders`: of another machine, with what stands for each."""
    for folder, word in folders.items():
        text = text.replace(folder, word)
    for pattern, word in FOLDERS:
        text = pattern.sub(word, text)
    return text


def trim(log: bytes) -> bytes:
    """The log without access lines that say again what an earlier one said."""
    seen: set[bytes] = set()
    kept = []
    for line in log.splitlines(keepends=True):
        found = _ACCESS.search(line)
        if found is None or found[1] not in seen:
            kept.append(line)
        if found is not None:
            seen.add(found[1])
    return b"".join(kept)


def pack(recipe: list[dict[str, Any]], out: Path) -> None:
    """Writes manifest.json and an archive per kind below `out`; the same input gives the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    manifest = []
    for kind in ("server", "failure"):
        with tarfile.open(out / f"{kind}s.tar.xz", "w:xz", preset=9) as archive:
            for entry in (entry for entry in recipe if entry["kind"] == kind):
                for field, name in BODIES.items():
                    if field not in entry:
                        continue
                    data = Path(entry[field]).read_bytes()
                    data = scrub(
                        (trim(data) if field == "log" else data).decode("utf-8", "surrogateescape"),
                        entry.get("folders", {}),
                    ).encode("utf-8", "surrogateescape")
                    info = tarfile.TarInfo(f"{entry['name']}/{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                said = {key: value for key, value in entry.items() if key not in BODIES and key != "folders"}
                manifest.append(
                    {
                        **json.loads(scrub(json.dumps(said), entry.get("folders", {}))),
                        "files": [BODIES[f] for f in BODIES if f in entry],
                    }
                )
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    pack(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
