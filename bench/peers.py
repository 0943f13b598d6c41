"""The load clients that bench/client.py is compared with: how each is installed, started on one core, and read.

    python bench/peers.py --install FOLDER        # a few GB, some minutes; nothing of it is a dependency of this package

FOLDER/NAME/ is a virtual environment of each peer. Of SGLang and vLLM only the benchmark is taken out of the wheel, because the
rest wants a GPU. A peer that cannot be installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SGLANG, SGLANG_PY = "0.5.23", "0.5.6"
VERSIONS = {"aiperf": "0.13.0", "guidellm": "0.8.1", "evalscope": "1.14.1"}

# Rust: the extension needs nothing of the package around it.
RUST = """
import importlib.machinery, importlib.util, sys
path, *words = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader("_bench", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_bench", loader))
loader.exec_module(module)
module.run_argv(["sglang-bench", *words])
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What every client is asked for: `requests` answers of `tokens` tokens, `streams` at a time or at `rate` per second."""

    port: int
    streams: int
    requests: int
    tokens: int
    rate: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Peer:
    """command(folder of its results, load) → argv; read(that folder) → {ttft_ms, tpot_ms, gap_ms, requests}, with its own names' meaning.

    tpot_ms is what it prints as time per output token, gap_ms what it prints as inter-token latency; None where it has no such figure.
    """

    name: str
    command: Callable[[Path, Load], list[str]]
    read: Callable[[Path], dict[str, Any]]
    env: Mapping[str, str]


def found(root: Path, tokenizer: Path) -> list[Peer]:
    """The peers that are installed under `root`."""
    made = []
    rust = sorted(root.glob("sglang/wheel/sglang/srt/rust_extensions/_bench*.so"))
    python = root / "sglang" / "bin" / "python"
    old = root / "sglang" / "old" / "sglang" / "bench_serving.py"
    if rust:
        made.append(
            Peer(
                f"sglang {SGLANG}, Rust client",
                _sglang([sys.executable, "-c", RUST, str(rust[0])], tokenizer),
                _sglang_read,
                {},
            )
        )
    if old.exists() and python.exists():
        made.append(
            Peer(
                f"sglang {SGLANG_PY}, bench_serving",
                _sglang([str(python), str(old)], tokenizer),
                _sglang_read,
                {"HF_HUB_OFFLINE": "1"},
            )
        )
    vllm = root / "vllm" / "bin" / "python"
    if vllm.exists() and (root / "vllm" / "wheel" / "run.py").exists():
        made.append(
            Peer("vllm, bench serve", _vllm(root, tokenizer), _vllm_read, {"PYTHONPATH": str(root / "vllm" / "wheel")})
        )
    for name, make, read in (
        ("aiperf", _aiperf, _aiperf_read),
        ("guidellm", _guidellm, _guidellm_read),
        ("evalscope", _evalscope, _evalscope_read),
    ):
        program = root / name / "bin" / name
        if program.exists():
            env = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"} if name == "guidellm" else {}
            made.append(Peer(f"{name} {VERSIONS[name]}", make(program, tokenizer), read, env))
    return made


def _sglang(start: list[str], tokenizer: Path) -> Callable[[Path, Load], list[str]]:
    def command(place: Path, load: Load) -> list[str]:
        return [
            *start, "--backend", "sglang-oai-chat", "--base-url", load.url, "--model", "mock", "--tokenizer", str(tokenizer),
            "--dataset-name", "random-ids", "--random-input-len", "8", "--random-output-len", str(load.tokens),
            "--random-range-ratio", "1.0", "--num-prompts", str(load.requests), "--disable-tqdm", "--warmup-requests", "1",
            "--output-file", str(place / "out.jsonl"),
            *(["--request-rate", str(load.rate)] if load.rate else ["--max-concurrency", str(load.streams)]),
        ]  # fmt: skip

    return command


def _sglang_read(place: Path) -> dict[str, Any]:
    row = json.loads((place / "out.jsonl").read_text().splitlines()[-1])
    return _told(row["mean_ttft_ms"], row["mean_tpot_ms"], row["mean_itl_ms"], row["completed"])


def _vllm(root: Path, tokenizer: Path) -> Callable[[Path, Load], list[str]]:
    def command(place: Path, load: Load) -> list[str]:
        return [
            str(root / "vllm" / "bin" / "python"), str(root / "vllm" / "wheel" / "run.py"), "--backend", "openai-chat",
            "--base-url", load.url, "--endpoint", "/v1/chat/completions", "--model", "mock", "--tokenizer", str(tokenizer),
            "--dataset-name", "random", "--random-input-len", "8", "--random-output-len", str(load.tokens),
            "--num-prompts", str(load.requests), "--disable-tqdm", "--save-result", "--result-dir", str(place),
            "--result-filename", "out.json",
            *(["--request-rate", str(load.rate)] if load.rate else ["--max-concurrency", str(load.streams)]),
        ]  # fmt: skip

    return command


def _vllm_read(place: Path) -> dict[str, Any]:
    row = json.loads((place / "out.json").read_text())
    return _told(row["mean_ttft_ms"], row["mean_tpot_ms"], row["mean_itl_ms"], row["completed"])


def _aiperf(program: Path, tokenizer: Path) -> Callable[[Path, Load], list[str]]:
    def command(place: Path, load: Load) -> list[str]:
        return [
            str(program), "profile", "-m", "mock", "--url", load.url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(tokenizer), "--request-count", str(load.requests), "--synthetic-input-tokens-mean", "8",
            "--output-tokens-mean", str(load.tokens), "--extra-inputs", f"max_tokens:{load.tokens}",
            "--use-server-token-count", "--per-chunk-usage", "--output-artifact-dir", str(place), "--workers-max", "1",
            "--record-processors", "1", "--ui", "simple", "--num-dataset-entries", "16",
            *(
                ["--request-rate", str(load.rate), "--arrival-pattern", "poisson"]
                if load.rate
                else ["--concurrency", str(load.streams)]
            ),
        ]  # fmt: skip

    return command


def _aiperf_read(place: Path) -> dict[str, Any]:
    row = json.loads((place / "profile_export_aiperf.json").read_text())

    def mean(name: str) -> float | None:
        return row[name]["avg"] if name in row else None

    return _told(
        mean("time_to_first_token"), mean("inter_token_latency"), mean("inter_chunk_latency"), mean("request_count")
    )


def _guidellm(program: Path, tokenizer: Path) -> Callable[[Path, Load], list[str]]:
    def command(place: Path, load: Load) -> list[str]:
        profile = f"kind=poisson,rate={load.rate}" if load.rate else f"kind=concurrent,streams={load.streams}"
        return [
            str(program), "run", "--backend", f"kind=openai_http,target={load.url},model=mock,request_format=/v1/chat/completions",
            "--profile", profile, "--constraint", f"kind=max_requests,count={load.requests}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens=8,output_tokens={load.tokens}",
            "--output", f"kind=json,path={place / 'out.json'}", "--disable-console",
        ]  # fmt: skip

    return command


def _guidellm_read(place: Path) -> dict[str, Any]:
    figures = json.loads((place / "out.json").read_text())["benchmarks"][0]["metrics"]

    def mean(name: str) -> float | None:
        return figures[name]["successful"]["mean"]

    return _told(
        mean("time_to_first_token_ms"), mean("time_per_output_token_ms"), mean("inter_token_latency_ms"),
        figures["request_totals"]["successful"],
    )  # fmt: skip


def _evalscope(program: Path, tokenizer: Path) -> Callable[[Path, Load], list[str]]:
    def command(place: Path, load: Load) -> list[str]:
        return [
            str(program), "perf", "--model", "mock", "--api", "openai", "--url", f"{load.url}/v1/chat/completions",
            "--prompt", "hello", "--max-tokens", str(load.tokens), "--number", str(load.requests), "--stream",
            "--outputs-dir", str(place), "--no-test-connection", "--no-timestamp",
            *(["--open-loop", "--rate", str(load.rate)] if load.rate else ["--parallel", str(load.streams)]),
        ]  # fmt: skip

    return command


def _evalscope_read(place: Path) -> dict[str, Any]:
    row = json.loads(next(place.rglob("benchmark_summary.json")).read_text())
    return _told(row["Avg TTFT (ms)"], row["Avg TPOT (ms)"], row["Avg ITL (ms)"], row["Success Requests"])


def _told(ttft: float | None, tpot: float | None, gap: float | None, requests: float | None) -> dict[str, Any]:
    return {"ttft_ms": ttft, "tpot_ms": tpot, "gap_ms": gap, "requests": int(requests or 0)}


# -- installing


def install(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, work in (
        ("sglang", _install_sglang),
        *((one, lambda place, one=one: _pip(place, _package(one))) for one in VERSIONS),
    ):
        place = root / name
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            work(place)
        except (subprocess.CalledProcessError, OSError) as exc:
            print(f"{name} is left out: {exc}", file=sys.stderr)


def _package(name: str) -> str:
    return f"{name}[perf]=={VERSIONS[name]}" if name == "evalscope" else f"{name}=={VERSIONS[name]}"


def _pip(place: Path, *words: str) -> None:
    subprocess.run([str(place / "bin" / "pip"), "install", "-q", *words], check=True)


def _install_sglang(place: Path) -> None:
    _pip(place, "aiohttp", "numpy", "tqdm", "transformers", "requests", "pillow", "datasets", "pybase64")
    for version, folder, parts in (
        (SGLANG, "wheel", ("sglang/srt/rust_extensions/_bench",)),
        (SGLANG_PY, "old", ("sglang/bench_serving.py",)),
    ):
        wheels = place / f"{folder}-wheel"
        subprocess.run(
            [str(place / "bin" / "pip"), "download", "-q", "--no-deps", "-d", str(wheels), f"sglang=={version}"],
            check=True,
        )
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            wheel.extractall(place / folder, [name for name in wheel.namelist() if name.startswith(parts)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, required=True, metavar="FOLDER")
    install(parser.parse_args().install)
