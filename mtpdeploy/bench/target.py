"""What answers at the URL: SGLang, vLLM or another OpenAI-compatible server; its identity, limits and counters."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from mtpdeploy.bench.client import EndpointError
from mtpdeploy.bench.counters import Scrape, parse
from mtpdeploy.bench.sse import error_text

ASK_TIMEOUT_S = 15.0  # /server_info goes round every scheduler: it waits while one is busy
# Top-level keys of /server_info that a reader of a run wants and that hold no secret.
PLAIN_FACTS = (
    "version",
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "random_seed",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "max_total_num_tokens",
    "dp_size",
    "tp_size",
    "stream_interval",
    "reasoning_parser",
    "tool_call_parser",
    "enable_cache_report",
    "disable_radix_cache",
    "simulated",
    "load_format",
    "incremental_streaming_output",
)


class Target:
    """The control side of one endpoint, by aiohttp. The key goes into a header and nowhere else."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self.metrics = True  # until /metrics says otherwise

    async def __aenter__(self) -> Target:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S), trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. EndpointError where nothing answers."""
        assert self._session is not None
        where = urlsplit(self.base).netloc
        try:
            async with self._session.get(self.base + path) as answer:
                return answer.status, await answer.read()
        except asyncio.TimeoutError:
            raise EndpointError("timeout", f"{where} did not answer GET {path} within {ASK_TIMEOUT_S:g} s") from None
        except aiohttp.ClientConnectorDNSError as exc:
            raise EndpointError("dns", f"{where}: no such host ({exc.os_error.strerror or exc})") from exc
        except aiohttp.ClientConnectorCertificateError as exc:
            raise EndpointError("tls", f"{where}: its certificate is not trusted ({exc.certificate_error})") from exc
        except (aiohttp.ClientConnectorError, ConnectionError) as exc:
            cause = getattr(exc, "os_error", exc)
            if isinstance(cause, ConnectionRefusedError):
                raise EndpointError("refused", f"{where} refused the connection: nothing listens there") from exc
            raise EndpointError("unreachable", f"{where}: {exc}") from exc
        except (aiohttp.ClientError, ssl.SSLError, OSError) as exc:
            raise EndpointError("protocol", f"{where} does not speak HTTP as expected: {exc}") from exc

    async def json(self, path: str) -> tuple[int, Any]:
        """Status and JSON value; None where the body is no JSON."""
        import json

        status, body = await self.get(path)
        try:
            return status, json.loads(body)
        except ValueError:
            return status, None

    async def identity(self) -> dict[str, Any]:
        """Who answers. kind: sglang, vllm, openai. Effective limits only where the server states them.

        EndpointError for a server that cannot be reached or refuses the key.
        """
        for path in ("/server_info", "/get_server_info"):
            status, info = await self.json(path)
            if status in (401, 403):
                raise EndpointError(f"http-{status}", f"GET {path}: HTTP {status}: the server wants an API key")
            if status == 200 and isinstance(info, dict) and ("internal_states" in info or "model_path" in info):
                return self.read_server_info(info) | await self._model_info()
        status, models = await self.json("/v1/models")
        if status in (401, 403):
            raise EndpointError(f"http-{status}", f"GET /v1/models: HTTP {status}: the server wants an API key")
        told: dict[str, Any] = {"kind": "openai"}
        if status == 200 and isinstance(models, dict) and isinstance(models.get("data"), list):
            told["models"] = [item.get("id") for item in models["data"] if isinstance(item, dict)]
            if any(isinstance(item, dict) and item.get("owned_by") == "vllm" for item in models["data"]):
                told["kind"] = "vllm"
                version_status, version = await self.json("/version")
                if version_status == 200 and isinstance(version, dict):
                    told["version"] = version.get("version")
        return told

    @staticmethod
    def read_server_info(info: Mapping[str, Any]) -> dict[str, Any]:
        """The part of /server_info that a run keeps: no secret, and the limits that hold rather than those asked for."""
        told: dict[str, Any] = {"kind": "sglang"}
        told |= {name: info[name] for name in PLAIN_FACTS if info.get(name) is not None}
        states = info.get("internal_states")
        states = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
        limits = [state.get("effective_max_running_requests_per_dp") for state in states]
        if limits and all(isinstance(limit, int) for limit in limits):
            told["effective_max_running_requests"] = sum(limits)
        if states:
            average = states[0].get("avg_spec_accept_length")
            if isinstance(average, (int, float)):
                told["avg_spec_accept_length"] = float(average)
            for name in ("max_mamba_cache_size", "random_seed"):
                if states[0].get(name) is not None:
                    told.setdefault(name, states[0][name])
            told["memory_usage"] = states[0].get("memory_usage")
            if isinstance(told["memory_usage"], dict):
                told["kv_tokens"] = told["memory_usage"].get("token_capacity")
        if info.get("stream_output"):  # its name before 0.5.10
            told["incremental_streaming_output"] = True
        if told.get("served_model_name"):
            told["models"] = [told["served_model_name"]]
        return told

    async def _model_info(self) -> dict[str, Any]:
        for path in ("/model_info", "/get_model_info"):
            with contextlib.suppress(EndpointError):
                status, info = await self.json(path)
                if status == 200 and isinstance(info, dict):
                    return {"model_type": info.get("model_type")}
        return {}

    async def scrape(self) -> Scrape | None:
        """The server's counters, or None where it has none (SGLang without --enable-metrics)."""
        if not self.metrics:
            return None
        try:
            status, body = await self.get("/metrics")
        except EndpointError:
            return None
        if status != 200:
            self.metrics = False
            return None
        read = parse(body.decode(errors="replace"))
        if not read.counters and not read.gauges:
            return None
        return read

    async def flush_cache(self) -> str | None:
        """Empties the prefix cache; returns why it could not."""
        assert self._session is not None
        try:
            async with self._session.post(self.base + "/flush_cache") as answer:
                body = await answer.read()
                return None if answer.status == 200 else f"HTTP {answer.status}: {error_text(body)}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as exc:
            return str(exc)


def process_identity(pid: int) -> dict[str, Any]:
    """Start time since boot of a process at this machine, as the kernel counts it: a pid alone is reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        state, started = fields[0], fields[19]
    except (OSError, IndexError):
        state = started = "X"
    if state in "ZX":  # a zombie serves nobody
        return {"pid": pid, "gone": f"process {pid} has ended"}
    return {"pid": pid, "started": started}
