"""Runs that come from another home: what is understood comes in whole, what is not leaves the store as it was."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpdeploy.actions.report import report
from mtpdeploy.actions.runs import delete, export, import_
from mtpdeploy.actions.runs import runs as listed
from mtpdeploy.bench.values import Record
from mtpdeploy.errors import UsageError
from mtpdeploy.progress import Silent
from mtpdeploy.store import Run, Store

SILENT: Any = Silent()


def benchmark(home: Path, **meta: Any) -> Run:
    """A small measured run: four requests of three chunks."""
    run = Store(home).new_run("bench", {"host": "gpu1", "profile": "mtp", "schema": 1, **meta})
    records = [
        Record(0, i, f"code-{i}", "code", 30, i * 1000, times_us=(1000, 31_000, 61_000), tokens=(3, 6, 9), end_us=61_500,
               http_status=200, finish_reason="stop", input_tokens=10, output_tokens=9)
        for i in range(4)
    ]  # fmt: skip
    run.append_jsonl("records.jsonl", [one.as_json() for one in records])
    run.append_jsonl(
        "measured.jsonl",
        [{"point": 0, "started_utc": "2026-11-30T10:00:00Z", "duration_s": 0.1, "spec": {"concurrency": 4}}],
    )
    run.finish({"points": 1})
    return run


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def bring(home: Path, *sources: Path) -> Any:
    return import_(home=home, talk=SILENT, source=[str(one) for one in sources])


def by_folder(run: Run, where: Path) -> Path:
    return run.path


def by_store(run: Run, where: Path) -> Path:
    return run.path.parent


def by_home(run: Run, where: Path) -> Path:
    return run.path.parent.parent


def by_archive(run: Run, where: Path) -> Path:
    made = where / "x.tar.gz"
    export(home=run.path.parent.parent, talk=SILENT, run=[run.id], format="archive", output=str(made))
    return made


def by_zip(run: Run, where: Path) -> Path:
    made = where / "x.zip"
    with zipfile.ZipFile(made, "w") as archive:
        for path in run.files():
            archive.write(path, f"runs/{run.id}/{path.name}")
    return made


def renamed(run: Run, where: Path) -> Path:
    return Path(shutil.copytree(run.path, where / "what a colleague called it"))


@pytest.mark.parametrize("way", [by_folder, by_store, by_home, by_archive, by_zip, renamed])
def test_a_run_comes_in_with_its_figures_by(
    way: Callable[[Run, Path], Path], home: Path, other: Path, tmp_path: Path
) -> None:
    run = benchmark(other)
    source = way(run, tmp_path)
    assert bring(home, source).runs == (run.id,)
    (row,) = listed(home=home, talk=SILENT).rows
    assert (row.id, row.status, row.host) == (run.id, "done", "gpu1")
    (point,) = report(home=home, talk=SILENT, run=run.id).points
    assert point.tpot_ms.p50 == pytest.approx(10.0)
    assert (Store(home).run(run.id).path / "points.json").is_file()  # made here, since it was not there
    assert bring(home, source).as_json() == {"imported": [], "already_here": [run.id]}
    assert not list(Store(home).folder.glob(".import-*"))


def test_the_same_id_with_another_content_is_refused_and_nothing_changes(home: Path, other: Path) -> None:
    run, second = benchmark(other), benchmark(other)
    bring(home, run.path)
    run.append_jsonl(
        "records.jsonl",
        [{"point": 0, "index": 9, "prompt_id": "x", "prompt_class": "x", "output_limit": 1, "start_us": 1}],
    )
    with pytest.raises(UsageError, match="another content"):
        bring(home, other)
    assert [row.id for row in listed(home=home, talk=SILENT).rows] == [run.id] != [second.id]


def test_a_run_that_was_being_written_comes_in_as_interrupted(home: Path, other: Path) -> None:
    run = Store(other).new_run("deploy", {"host": "gpu1"})
    bring(home, run.path)
    assert [row.status for row in listed(home=home, talk=SILENT).rows] == ["interrupted"]


HEAD: dict[str, Any] = {"run_id": "20261130-101500-3fa9", "kind": "bench", "status": "done", "meta": {}, "summary": {}}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no run.json"),
        ({"run.json": "{"}, "not readable as JSON"),
        ({"run.json": "[1]"}, "should hold an object"),
        ({"run.json": json.dumps(HEAD | {"run_id": "../../etc"})}, "run_id"),
        ({"run.json": json.dumps(HEAD | {"kind": "poem"})}, "kind is 'poem', and should be one of bench"),
        ({"run.json": json.dumps(HEAD | {"status": "fine"})}, "status is 'fine'"),
        ({"run.json": json.dumps(HEAD | {"meta": []})}, "meta should be an object"),
        ({"run.json": json.dumps(HEAD)}, "nothing was measured"),
        ({"run.json": json.dumps(HEAD | {"meta": {"schema": 99}}), "records.jsonl": "{}\n"}, "newer mtpdeploy"),
        ({"run.json": json.dumps(HEAD), "records.jsonl": '{"point": 0}\n'}, "damaged"),
        ({"run.json": json.dumps(HEAD), "records.jsonl": "torn"}, "no benchmark records"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(
    home: Path, tmp_path: Path, files: dict[str, str], says: str
) -> None:
    place = tmp_path / "given"
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
    with pytest.raises(UsageError, match=says) as refused:
        bring(home, place)
    assert str(place) in refused.value.message
    assert [path for path in (home / "runs").iterdir() if path.is_dir()] == []


def test_a_missing_file_and_one_that_is_no_archive_are_named(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        bring(home, tmp_path / "nowhere")
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(UsageError, match="not readable as an archive"):
        bring(home, tmp_path / "note.txt")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_an_archive_cannot_write_outside_the_store(home: Path, tmp_path: Path, name: str) -> None:
    made = tmp_path / "x.tar"
    with tarfile.open(made, "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    with pytest.raises(UsageError, match="outside"):
        bring(home, made)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name, "{}")
    with pytest.raises(UsageError, match="outside"):
        bring(home, tmp_path / "x.zip")


def test_links_in_an_archive_or_folder_are_left_out(home: Path, other: Path, tmp_path: Path) -> None:
    run = benchmark(other)
    secret = tmp_path / "secret"
    secret.write_text("do not take me")
    (run.path / "link.txt").symlink_to(secret)
    bring(home, run.path)
    assert not (Store(home).folder / run.id / "link.txt").exists()


def test_csv_says_why_a_point_is_invalid_and_no_cell_is_a_formula(other: Path) -> None:
    run = benchmark(other, profile="=cmd()")
    bring(other / "x", run.path)
    text = export(home=other / "x", talk=SILENT, run=[run.id], format="csv").content or ""
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["tpot_p50_ms"], row["valid"], row["windows_dropped"]) == ("10.0", "true", "0")
    assert not any(str(cell).startswith(("=", "+", "@")) for cell in row.values())


def test_rows_for_bench_serving_hold_its_keys_and_its_inter_token_latency(other: Path) -> None:
    run = benchmark(other)
    bring(other / "x", run.path)
    row = json.loads(export(home=other / "x", talk=SILENT, run=[run.id], format="bench-serving").content or "")
    assert {
        "request_throughput",
        "input_throughput",
        "total_throughput",
        "std_ttft_ms",
        "p95_itl_ms",
        "concurrency",
    } <= set(row)
    assert (row["mean_itl_ms"], row["std_itl_ms"], row["completed"]) == (pytest.approx(10.0), 0.0, 4)
    assert row["p99_e2e_latency_ms"] is None


def test_binary_forms_want_a_file_and_parquet_names_what_it_lacks(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = benchmark(other)
    with pytest.raises(UsageError, match="--output"):
        export(home=other, talk=SILENT, run=[run.id], format="archive")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pyarrow"):
        export(home=other, talk=SILENT, run=[run.id], format="parquet", output=str(other / "x.parquet"))


def test_parquet_has_a_typed_column_a_figure(other: Path, home: Path) -> None:
    files = pytest.importorskip("pyarrow.parquet")
    run = benchmark(other)
    bring(home, run.path)
    export(home=home, talk=SILENT, run=[run.id], format="parquet", output=str(other / "x.parquet"))
    table = files.read_table(other / "x.parquet")
    (row,) = table.to_pylist()
    assert (row["run_id"], row["tpot_p50_ms"], row["valid"], row["completed"], row["rate"]) == (
        run.id,
        10.0,
        True,
        4,
        None,
    )


def test_an_imported_run_can_be_deleted(home: Path, other: Path) -> None:
    run = benchmark(other)
    bring(home, run.path)
    assert delete(home=home, talk=SILENT, run=[run.id]).runs == (run.id,)
    assert listed(home=home, talk=SILENT).rows == ()
