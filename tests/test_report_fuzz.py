"""Run folders with anything in them: what cannot be read is refused by name, and nothing else happens."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import bench_run, point

from mtpdeploy.actions.runs import show
from mtpdeploy.analysis.compare import compare
from mtpdeploy.analysis.frontier import frontier
from mtpdeploy.analysis.model import fit, observations
from mtpdeploy.analysis.samples import told_apart
from mtpdeploy.errors import MtpError
from mtpdeploy.progress import Silent
from mtpdeploy.report.export import FORMATS, exported
from mtpdeploy.report.html import page
from mtpdeploy.report.story import gathered
from mtpdeploy.store import Store
from mtpdeploy.store.measured import measured

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KEYS = sorted(point(0, 1, 100.0))
ODD_POINTS = st.lists(
    st.dictionaries(st.sampled_from([*KEYS, "arm", "client", "marks"]), ANY, max_size=8) | ANY, max_size=4
)
RECORD_KEYS = (
    "point", "index", "prompt_id", "output_tokens", "times_us", "tokens", "end_us", "error", "spec_verify", "spec_correct"
)  # fmt: skip
ODD_RECORDS = st.lists(st.dictionaries(st.sampled_from(RECORD_KEYS), ANY, max_size=8), max_size=5)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))  # NaN and infinities too, as other programs write them


@pytest.mark.slow
@MANY
@given(points=ODD_POINTS, records=ODD_RECORDS)
def test_any_points_and_records_are_compared_or_refused(points: object, records: list[object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        good = bench_run(home, "baseline", speeds={1: 70})
        odd = bench_run(home, "mtp", speeds={1: 150})
        write(odd.file("points.json"), points)
        odd.file("records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
        try:
            both = [measured(good), measured(odd)]
        except MtpError:
            return
        said = compare(both[:1], both[1:])
        json.dumps(said.as_json(), allow_nan=False)
        json.dumps(frontier(told_apart(both)).as_json(), allow_nan=False)
        fit(observations(both))
        shown = show(home=home, talk=Silent(), run=odd.id)
        for format in FORMATS:
            exported([shown], format)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=ANY, log=ANY, verify=ANY, points=ODD_POINTS, provenance=ANY)
def test_any_documents_make_a_page_or_are_refused(
    plan: object, log: object, verify: object, points: object, provenance: object
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        good = bench_run(home, "baseline", speeds={1: 70})
        odd = bench_run(home, "mtp", speeds={1: 150})
        for name, value in (("plan", plan), ("log_summary", log), ("verify", verify), ("points", points)):
            write(odd.file(f"{name}.json"), value)
        head = json.loads(odd.file("run.json").read_text())
        write(odd.file("run.json"), head | {"meta": {"provenance": provenance}})
        store = Store(home)
        assert len(store.runs()) == 2
        page(gathered(store, [good, store.run(odd.id)]))
