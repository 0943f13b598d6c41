"""The run store: every measurement, launch, campaign and search as a folder, with an index over them."""

from __future__ import annotations

from mtpdeploy.analysis.provenance import Provenance
from mtpdeploy.store.store import LastDeployed, Run, RunRow, Store

__all__ = ["LastDeployed", "Provenance", "Run", "RunRow", "Store"]
