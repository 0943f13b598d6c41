"""`demo`: the main job on a rehearsal host of its own: baseline and MTP deployed, measured, compared; nothing is left but the run."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpdeploy.analysis.compare import Comparison
from mtpdeploy.errors import MtpError
from mtpdeploy.progress import Talk
from mtpdeploy.store import Store

HOST = "local"
CLOCK = 2.0  # simulated seconds a second
CONCURRENCY = "1,4"
REQUESTS = 12
OUTPUT_TOKENS = 96
ARMS = ("baseline", "mtp")


@dataclass(frozen=True, slots=True)
class Demo:
    """Both benchmarks, their comparison, and the page. Everything in it is simulated."""

    baseline: Mapping[str, Any]
    mtp: Mapping[str, Any]
    comparison: Comparison
    report: Path
    run_id: str
    clock: float

    @property
    def workload(self) -> str:
        """What was sent, in one line."""
        return (
            f"{REQUESTS} requests a point at concurrency {CONCURRENCY.replace(',', ' and ')}, at most {OUTPUT_TOKENS} output "
            "tokens each, mixed prompts, greedy"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "baseline": dict(self.baseline),
            "mtp": dict(self.mtp),
            "comparison": self.comparison.as_json(),
            "report": str(self.report),
            "simulated": True,
            "run_id": self.run_id,
            "workload": self.workload,
            "simulated_clock": self.clock,
        }


def demo(*, home: Path, talk: Talk) -> Demo:
    """Runs in a home of its own below the temporary folder; only the finished run is kept in `home`."""
    from mtpdeploy.actions.bench import bench
    from mtpdeploy.actions.compare import compare
    from mtpdeploy.actions.deploy import deploy
    from mtpdeploy.actions.runs import report

    talk.note(
        f"A rehearsal on this machine: SGLang and its GPU are simulated, {CLOCK:g} simulated seconds a second. "
        "No number below says anything about a real one."
    )
    with _rehearsal_host(talk) as stage:
        answers: dict[str, Mapping[str, Any]] = {}
        for arm in ARMS:
            deploy(home=stage, talk=talk, host=HOST, profile=arm, inventory=(), set_=())
            measured = bench(
                home=stage, talk=talk, host=HOST, concurrency=CONCURRENCY, requests=REQUESTS,
                output_tokens=str(OUTPUT_TOKENS), prompts="mixed",
            )  # fmt: skip
            answers[arm] = measured.as_json()
        names = tuple(str(answers[arm]["run_id"]) for arm in ARMS)
        comparison = compare(home=stage, talk=talk, a=names[0], b=names[1])
        written = report(home=stage, talk=talk, run=names, output=str(stage / "report.html"))
        with Store(home).new_run("demo", _meta(comparison)) as kept:
            for name in names:
                shutil.copytree(stage / "runs" / name, kept.path / name)
            kept.write_json("comparison.json", comparison.as_json())
            page = kept.file("report.html")
            shutil.copyfile(str(written.path), page)
            kept.finish({"verdict": comparison.verdict})
    return Demo(answers["baseline"], answers["mtp"], comparison, page.absolute(), kept.id, CLOCK)


def _meta(comparison: Comparison) -> dict[str, object]:
    return {"host": HOST, "profile": " / ".join(ARMS), "simulated": True, "clock": CLOCK}


@contextlib.contextmanager
def _rehearsal_host(talk: Talk) -> Iterator[Path]:
    """A home with one simulated host on a free port; whatever happens, its server is stopped and the folder removed."""
    import yaml

    from mtpdeploy.resources import bundled

    stage = Path(tempfile.mkdtemp(prefix="mtpdeploy-demo-"))
    try:
        inventory = yaml.safe_load((bundled("inventories") / "local.yml").read_text())
        host = inventory["hosts"][HOST]
        host.setdefault("simulate", {})["clock"] = CLOCK
        host["workdir"] = str(stage / "work")
        host["supervisor"] = "detached"
        host.setdefault("args", {})["port"] = _free_port()
        (stage / "inventories").mkdir()
        (stage / "inventories" / "local.yml").write_text(yaml.safe_dump(inventory))
        yield stage
    finally:
        _clean(stage, talk)


def _clean(stage: Path, talk: Talk) -> None:
    from mtpdeploy.actions.launches import stop

    if (stage / "work").exists():
        try:
            stop(home=stage, talk=talk, host=HOST, inventory=())
        except MtpError as error:
            talk.note(f"could not stop the rehearsal's server: {error.message}; its folder is kept: {stage}")
            return
    shutil.rmtree(stage, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
