"""`compare`: two runs, or the latest runs of two profiles, side by side."""

from __future__ import annotations

from pathlib import Path

from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.analysis.compare import compare as compared
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store
from mtpdeploy.store.choose import pair


def compare(
    *,
    home: Path,
    talk: Talk,
    a: str | None = None,
    b: str | None = None,
    host: str | None = None,
    workload: str | None = None,
    seed: int = 0,
) -> Comparison:
    """b against a. Each is a run id, `last`, RUN:ARM, several with commas, or a profile (see `mtpdeploy.store.choose`).

    Raises NotFound where a profile has no finished benchmark on the same host under the same workload.
    """
    left, right = pair(Store(home), a, b, host=host, workload=workload)
    return compared(left, right, seed=seed)
