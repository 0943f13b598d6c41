"""The HTTP interface of the played version, over the engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from mtpdeploy.sglang.overrides import prefill_graph_sizes
from mtpdeploy.sim.engine import Engine, Job
from mtpdeploy.sim.launch import Launch
from mtpdeploy.sim.metrics import exposition
from mtpdeploy.sim.phases import Phases, listed_sizes
from mtpdeploy.sim.startup import recorded

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN = ("/health", "/ready", "/metrics")
_ADMIN = ("/flush_cache", "/abort_request", "/set_internal_state")  # the admin key's, where there is one
_SUCCESSORS = {"/get_server_info": "/server_info", "/get_model_info": "/model_info", "/get_load": "/v1/loads"}
_SSE = {"Content-Type": "text/event-stream; charset=utf-8"}


class Refused(Exception):
    """A bad request; told in the words of the route that it came to."""

    def __init__(self, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.message, self.kind = message, kind


class Api:
    """Routes and answers. `status`: Starting, Up, ShuttingDown, as SGLang's own."""

    def __init__(self, launch: Launch, engine: Engine, say: Callable[[str], None]) -> None:
        self.launch, self.engine, self._say = launch, engine, say
        self.status = "Starting"
        self._phases = Phases.of(launch)
        self._key = str(launch.given.get("api_key") or "") or None
        self._admin = str(launch.given.get("admin_api_key") or "") or None
        excluded = launch.given.get("uvicorn_access_log_exclude_prefixes")
        self._quiet = tuple(str(prefix) for prefix in excluded) if isinstance(excluded, tuple) else ()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=64 << 20)
        get, post = app.router.add_get, app.router.add_post
        for path in ("/health", "/health_generate"):
            get(path, self._health)
        if self.launch.version.at_least("0.5.20"):
            get("/ready", self._ready)
        for path in ("/server_info", "/get_server_info"):
            get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            get(path, self._model_info)
        get("/v1/models", self._models)
        get("/v1/loads", self._loads)
        get("/get_load", self._load)
        if self.launch.given.get("enable_metrics"):
            get("/metrics", self._metrics)
        post("/generate", self._generate)
        post("/v1/completions", self._completions)
        post("/v1/chat/completions", self._chat)
        for path in ("/flush_cache",):
            app.router.add_route("*", path, self._flush)
        post("/abort_request", self._abort)
        post("/set_internal_state", self._set_state)
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authorisation, and uvicorn's access line."""
        try:
            if not self._allowed(request):
                return self._log(request, web.json_response({"error": "Unauthorized"}, status=401))
            successor = _SUCCESSORS.get(request.path)
            if successor and self.launch.version.at_least("0.5.11"):
                self._say(
                    f"Endpoint '{request.path}' is deprecated and will be removed in a future version. "
                    f"Please use '{successor}' instead."
                )
            return self._log(request, await handler(request))
        except Refused as refused:
            body: dict[str, Any] = (
                {"error": {"message": refused.message}}
                if request.path == "/generate"
                else {"object": "error", "message": refused.message, "type": refused.kind, "param": None, "code": 400}
            )
            return self._log(request, web.json_response(body, status=400))
        except web.HTTPNotFound:
            return self._log(request, web.json_response({"detail": "Not Found"}, status=404))

    def _allowed(self, request: web.Request) -> bool:
        """SGLang's rule (utils/auth.py): the API key opens everything but what the admin key, if there is one, alone opens."""
        if request.method == "OPTIONS" or request.path.startswith(_OPEN):
            return True
        wanted = self._admin if self._admin and request.path in _ADMIN else self._key
        kind, _, offered = request.headers.get("Authorization", "").partition(" ")
        return wanted is None or (kind.lower() == "bearer" and hmac.compare_digest(offered.encode(), wanted.encode()))

    def _log(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if request.path != "/metrics":
            key = (request.method, request.path, response.status)
            self.engine.totals.http[key] = self.engine.totals.http.get(key, 0) + 1
        if not (self._quiet and request.path.startswith(self._quiet)):
            peer = request.transport.get_extra_info("peername") if request.transport else None
            where = f"{peer[0]}:{peer[1]}" if peer else "-"
            phrase = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}
            self._say(
                f'INFO:     {where} - "{request.method} {request.path_qs} HTTP/1.1" '
                f"{response.status} {phrase.get(response.status, '')}"
            )
        return response

    # ------------------------------------------------------------ questions

    async def _health(self, request: web.Request) -> web.Response:
        if self.status != "Up":
            return web.Response(status=503)
        await asyncio.sleep(1.0)
        return web.Response(status=503 if self.engine.stuck else 200)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.status == "Up" else 503)

    def _memory(self) -> dict[str, Any]:
        pools = self.launch.pools
        old = self.launch.version.before("0.5.11")
        graphs = {name: round(gb, 3) for name, gb in self._phases.graphs_gb.items()}
        return {
            "weight": round(pools.weights_gb, 3),
            "kvcache": round(pools.k_gb + pools.v_gb, 3),
            **({} if old else {"startup_available": round(pools.avail_end_gb, 3)}),
            "token_capacity": pools.kv_tokens,
            **({} if old else {"token_capacity_swa": None}),
            "graph": round(sum(graphs.values()), 2) if old else graphs,
        }

    def _graph_config(self) -> dict[str, Any]:
        """Both phases as resolved; the sizes are those that could be captured, before what can run cuts them."""
        settings = self.launch.settings
        rest = {"tc_compiler": "eager", "full_prefill_max_req": None, "full_prefill_prefix_chunk_tokens": None}
        decode = listed_sizes(bool(self.launch.draft_tokens), settings.decode_max_bs)
        prefill = prefill_graph_sizes(settings.chunk)
        return {
            "decode": {
                "backend": "full" if settings.decode_graphs else "disabled",
                "max_bs": settings.decode_max_bs,
                "bs": decode,
                **rest,
            },
            "prefill": {
                "backend": "breakable" if settings.prefill_graphs else "disabled",
                "max_bs": settings.chunk,
                "bs": prefill,
                **rest,
            },
        }

    async def _server_info(self, request: web.Request) -> web.Response:
        launch, engine, version = self.launch, self.engine, self.launch.version
        from mtpdeploy.sim.arguments import shown

        values = shown(launch.in_force, version)
        if recorded(launch):
            values |= {
                "cuda_graph_config": self._graph_config(),
                "disable_cuda_graph": bool(launch.given.get("disable_cuda_graph")),
                "uses_mamba_radix_cache": launch.settings.radix and launch.model.hybrid,
            }
        inner: dict[str, Any] = {
            **values,
            "last_gen_throughput": engine.throughput,
        }
        inner["memory_usage"] = self._memory()
        if "max_mamba_cache_size" in inner:
            inner["max_mamba_cache_size"] = launch.pools.slots
        if version.at_least("0.5.8"):
            inner["effective_max_running_requests_per_dp"] = launch.pools.max_running
        if version.at_least("0.5.17"):
            inner["startup_time"] = {
                name: value for name, value in self._phases.startup_time().items() if name != "tokenizer_e2e"
            }
        if launch.draft_tokens and version.at_least("0.5.14"):
            inner["max_speculative_num_draft_tokens"] = launch.draft_tokens
        if engine.accept_length is not None:
            inner["avg_spec_accept_length"] = engine.accept_length
        answer: dict[str, Any] = {
            **values,
            "status": "ready",
            "max_total_num_tokens": launch.pools.kv_tokens,
            "max_req_input_len": launch.context - 6,
            "internal_states": [inner],
            "version": str(version),
            "simulated": True,
        }
        if version.at_least("0.5.17"):
            answer |= {"startup_time": self._phases.startup_time(), "kv_events": None}
        return web.json_response(answer)

    async def _model_info(self, request: web.Request) -> web.Response:
        launch = self.launch
        return web.json_response(
            {
                "model_path": launch.given["model_path"],
                "tokenizer_path": launch.in_force["tokenizer_path"],
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": launch.model.multimodal,
                "has_audio_understanding": False,
                "model_type": "qwen3_5" if launch.model.hybrid else "llama",
                "architectures": [launch.model.architecture],
                **({} if recorded(launch) else {"served_model_name": launch.served_name}),
                "simulated": True,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.launch.served_name, "object": "model", "created": int(time.time()), "owned_by": "sglang",
            "root": self.launch.served_name, "parent": None, "max_model_len": self.launch.context,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [card]})

    async def _loads(self, request: web.Request) -> web.Response:
        engine, pools = self.engine, self.launch.pools
        load = {
            "dp_rank": 0, "num_running_reqs": len(engine.running), "num_waiting_reqs": len(engine.waiting),
            "num_used_tokens": engine.used_tokens, "max_total_num_tokens": pools.kv_tokens,
            "max_running_requests": pools.max_running, "token_usage": round(engine.kv_usage, 4),
            "gen_throughput": round(engine.throughput, 2),
        }  # fmt: skip
        return web.json_response({"version": str(self.launch.version), "loads": [load]})

    async def _load(self, request: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response(
            [{"dp_rank": 0, "num_reqs": len(engine.running) + len(engine.waiting), "num_waiting_reqs": len(engine.waiting),
              "num_tokens": engine.used_tokens}]
        )  # fmt: skip

    async def _metrics(self, request: web.Request) -> web.Response:
        engine, launch = self.engine, self.launch
        pools, phases = launch.pools, self._phases
        speculative = bool(launch.draft_tokens)
        proposed = max(1, launch.draft_tokens - 1)
        gauges = {
            "max_total_num_tokens": pools.kv_tokens, "weight_memory_usage_gb": pools.weights_gb,
            "kv_cache_memory_usage_gb": pools.k_gb + pools.v_gb, "page_size": launch.number("page_size", 1),
            "num_pages": pools.kv_tokens // launch.number("page_size", 1), "context_len": launch.context,
            "startup_available_gpu_memory_gb": pools.avail_end_gb,
            "num_running_reqs": len(engine.running), "num_queue_reqs": len(engine.waiting), "num_grammar_queue_reqs": 0,
            "gen_throughput": engine.throughput, "cache_hit_rate": 0, "decode_sum_seq_lens": engine.used_tokens,
            "token_usage": max(engine.kv_usage, engine.state_usage), "full_token_usage": engine.kv_usage,
            "swa_token_usage": 0, "mamba_usage": engine.state_usage, "num_used_tokens": engine.used_tokens,
            "kv_available_tokens": pools.kv_tokens - engine.used_tokens, "kv_used_tokens": engine.used_tokens,
            "mamba_available_tokens": (pools.slots or 0) - engine.used_slots, "mamba_used_tokens": engine.used_slots,
            "spec_accept_length": engine.accept_length or 0.0,
            "spec_accept_rate": ((engine.accept_length or 1.0) - 1) / proposed if speculative else 0.0,
            "spec_num_steps": launch.settings.steps if speculative else 0, "spec_num_draft_tokens": launch.draft_tokens,
            "new_token_ratio": engine.ratio, "is_cuda_graph": float(bool(engine.running and launch.settings.decode_graphs)),
        }  # fmt: skip
        started = {name: value for name, value in phases.startup_time().items() if isinstance(value, float)}
        phased = {
            "startup_time_seconds": started,
            "startup_cuda_graph_time_seconds": phases.graphs_s,
            "graph_memory_usage_gb": phases.graphs_gb,
        }
        text = exposition(launch.served_name, gauges, phased, engine.totals)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    # ------------------------------------------------------------ administration

    async def _flush(self, request: web.Request) -> web.Response:
        if not self.engine.flush():
            self._say("Cache not flushed because there are pending requests. #queue-req: "
                      f"{len(self.engine.waiting)}, #running-req: {len(self.engine.running)}")  # fmt: skip
            return web.Response(status=400)
        self._say("Cache flushed successfully!")
        return web.Response(
            text="Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    async def _abort(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        self.engine.abort(None if asked.get("abort_all") else str(asked.get("rid")))
        return web.Response()

    async def _set_state(self, request: web.Request) -> web.Response:
        asked = await _body(request)
        if "speculative_accept_threshold_single" in (asked.get("server_args") or {}):
            self.engine.totals.spec_tokens = self.engine.totals.spec_steps = 0
        return web.json_response({"updated": True, "server_args": asked.get("server_args")})

    # ------------------------------------------------------------ generation

    def _job(self, prompt: str, tokens: int, limit: int, sampling: Mapping[str, Any], streaming: bool) -> Job:
        temperature = sampling.get("temperature", 1.0)
        if not isinstance(temperature, int | float) or temperature < 0 or not math.isfinite(temperature):
            raise Refused(f"temperature must be a non-negative finite number, got {temperature}.")
        if tokens > self.launch.context:
            raise Refused(
                f"The input ({tokens} tokens) is longer than the model's context length ({self.launch.context} tokens)."
            )
        if tokens + limit > self.launch.context:
            raise Refused(
                f"Requested token count exceeds the model's maximum context length of {self.launch.context} tokens. You requested "
                f"a total of {tokens + limit} tokens: {tokens} tokens from the input messages and {limit} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit."
            )
        return self.engine.submit(
            uuid.uuid4().hex,
            prompt,
            tokens,
            max(1, limit),
            bool(sampling.get("ignore_eos")),
            float(temperature),
            streaming,
        )

    def _meta(self, job: Job) -> dict[str, Any]:
        """meta_info with the speculative keys of the played version (tokenizer_manager.py)."""
        version = self.launch.version
        reason: dict[str, Any] | None = None
        if job.finished == "length":
            reason = {"type": "length", "length": job.emitted}
        elif job.finished:
            reason = {
                "type": job.finished,
                **({"matched": 151643} if job.finished == "stop" else {"message": "Aborted"}),
            }
        meta: dict[str, Any] = {
            "id": job.rid, "finish_reason": reason, "prompt_tokens": job.prompt_tokens, "weight_version": "default",
            "num_retractions": job.retractions, "completion_tokens": job.emitted, "cached_tokens": job.cached_tokens, "dp_rank": None,
        }  # fmt: skip
        if job.started is not None:
            meta["queue_time"] = job.started - job.arrived
        if job.finished:
            meta["e2e_latency"] = time.perf_counter() - job.arrived
            if self.launch.draft_tokens and job.verify_steps:
                meta |= self._spec(job, version)
        return meta

    def _spec(self, job: Job, version: Any) -> dict[str, Any]:
        proposed = job.verify_steps * (self.launch.draft_tokens - 1)
        values: dict[str, Any] = {
            "spec_verify_ct": job.verify_steps,
            "spec_accept_length": job.emitted / job.verify_steps,
            "spec_accept_rate": job.accepted / max(1, proposed),
        }
        if version.before("0.5.11"):
            values |= {"spec_accept_token_num": job.accepted, "spec_draft_token_num": proposed}
        if version.at_least("0.5.11") and version.before("0.5.21"):
            values |= {"spec_accepted_drafts": job.accepted, "spec_proposed_drafts": proposed}
        if version.at_least("0.5.9") and version.before("0.5.21"):
            values["spec_accept_histogram"] = job.histogram
        if version.at_least("0.5.12"):
            values |= {
                "spec_num_correct_drafts": job.accepted,
                "spec_num_proposed_drafts": proposed,
                "spec_correct_drafts_histogram": job.histogram,
            }
        return values

    async def _stream(
        self, request: web.Request, job: Job, chunk: Callable[[int, int], bytes], tail: Callable[[], bytes]
    ) -> web.StreamResponse:
        """Sends a chunk whenever tokens came; `chunk(before, now)` makes it. A client that leaves aborts its request."""
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(request)
        sent = 0
        try:
            while True:
                await job.changed.wait()
                job.changed.clear()
                now, over = job.emitted, job.finished
                if now > sent or over:
                    await response.write(chunk(sent, now))
                    sent = now
                if over:
                    break
            await response.write(tail() + b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            if job.finished is None:
                self.engine.abort(job.rid)
        return response

    async def _finish(self, job: Job) -> None:
        try:
            while job.finished is None:
                await job.changed.wait()
                job.changed.clear()
        finally:
            if job.finished is None:
                self.engine.abort(job.rid)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request)
        sampling = asked.get("sampling_params") or {}
        ids = asked.get("input_ids")
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            prompt, tokens = ",".join(map(str, ids)), len(ids)
        elif isinstance(asked.get("text"), str):
            prompt = asked["text"]
            tokens = count(prompt)
        else:
            raise Refused("Either text, input_ids or input_embeds should be provided.")
        job = self._job(prompt, tokens, int(sampling.get("max_new_tokens", 128)), sampling, bool(asked.get("stream")))
        whole = not self.launch.given.get("incremental_streaming_output")
        pieces: list[str] = []
        identities: list[int] = []

        def upto(before: int, now: int) -> tuple[str, list[int]]:
            fresh = [job.text.token(i) for i in range(before, now)]
            numbers = [job.text.token_id(i) for i in range(before, now)]
            pieces.extend(fresh)
            identities.extend(numbers)
            return ("".join(pieces), identities) if whole else ("".join(fresh), numbers)

        if not asked.get("stream"):
            await self._finish(job)
            text, numbers = upto(0, job.emitted)
            return web.json_response({"text": text, "output_ids": numbers, "meta_info": self._meta(job)})

        def chunk(before: int, now: int) -> bytes:
            text, numbers = upto(before, now)
            return (
                b"data: "
                + json.dumps({"text": text, "output_ids": numbers, "meta_info": self._meta(job)}).encode()
                + b"\n\n"
            )

        return await self._stream(request, job, chunk, lambda: b"")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request)
        prompt = asked.get("prompt")
        if prompt is None:
            raise Refused(
                f"[{{'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required', 'input': {asked!r}}}]",
                "Bad Request",
            )
        if isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt):
            text, tokens = ",".join(map(str, prompt)), len(prompt)
        else:
            text = str(prompt[0] if isinstance(prompt, list) and prompt else prompt)
            tokens = count(text)
        return await self._openai(request, asked, text, tokens, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request)
        messages = asked.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused("[{'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'}]", "Bad Request")
        text = "\n".join(
            content if isinstance(content := message.get("content"), str) else json.dumps(content)
            for message in messages
            if isinstance(message, dict)
        )
        return await self._openai(request, asked, text, count(text) + 8 * len(messages), chat=True)

    async def _openai(
        self, request: web.Request, asked: Mapping[str, Any], prompt: str, tokens: int, *, chat: bool
    ) -> web.StreamResponse:
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or (2048 if chat else 16)
        job = self._job(prompt, tokens, int(limit), asked, bool(asked.get("stream")))
        options = asked.get("stream_options") or {}
        model = str(asked.get("model") or self.launch.served_name)
        kind = ("chat.completion.chunk" if asked.get("stream") else "chat.completion") if chat else "text_completion"
        head = {"id": job.rid, "object": kind, "created": int(time.time()), "model": model}
        field = "reasoning_content" if chat and self.launch.given.get("reasoning_parser") else "content"

        def usage() -> dict[str, Any]:
            details = {"cached_tokens": job.cached_tokens} if self.launch.given.get("enable_cache_report") else None
            return {
                "prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens + job.emitted,
                "completion_tokens": job.emitted, "prompt_tokens_details": details, "reasoning_tokens": 0,
            }  # fmt: skip

        def extra() -> dict[str, Any]:
            if (
                asked.get("return_spec_tokens_details")
                and self.launch.draft_tokens
                and job.verify_steps
                and self.launch.version.at_least("0.5.20")
            ):
                return {"sglext": {"spec_tokens_details": self._spec(job, self.launch.version)}}
            return {}

        if not asked.get("stream"):
            await self._finish(job)
            text = "".join(job.text.token(i) for i in range(job.emitted))
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": job.finished, "matched_stop": None}
            if chat:
                message = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
                choice["message"] = {**message, field: text}
            else:
                choice["text"] = text
            return web.json_response(
                {**head, "choices": [choice], "usage": usage(), "metadata": {"weight_version": "default"}, **extra()}
            )

        opened = False

        def event(
            choices: list[dict[str, Any]], use: dict[str, Any] | None, more: dict[str, Any] | None = None
        ) -> bytes:
            return b"data: " + json.dumps({**head, "choices": choices, "usage": use, **(more or {})}).encode() + b"\n\n"

        def chunk(before: int, now: int) -> bytes:
            nonlocal opened
            use = usage() if options.get("continuous_usage_stats") else None
            text = "".join(job.text.token(i) for i in range(before, now))
            base = {"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None}
            out = b""
            if chat and not opened:
                out += event([{**base, "delta": {"reasoning_content": None, "role": "assistant", "content": ""}}], use)
                opened = True
            body = {"delta": {"content": None, field: text}} if chat else {"text": text}
            if text:
                # the last tokens and the reason come in one chunk on /v1/completions, in two on chat
                reason = job.finished if not chat else None
                out += event([{**base, **body, "finish_reason": reason}], use)
            if job.finished and chat:
                out += event(
                    [{**base, "delta": {"content": None, "reasoning_content": None}, "finish_reason": job.finished}],
                    use,
                    extra(),
                )
            return out

        def tail() -> bytes:
            return event([], usage(), None if chat else extra()) if options.get("include_usage") else b""

        return await self._stream(request, job, chunk, tail)


def count(text: str) -> int:
    """Tokens of a text: four characters each."""
    return max(1, math.ceil(len(text) / 4))


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        value = await request.json()
    except ValueError:
        raise Refused(
            "[{'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error', 'input': {}, "
            "'ctx': {'error': 'unexpected end of data'}}]",
            "Bad Request",
        ) from None
    if not isinstance(value, dict):
        raise Refused("the body should be an object", "Bad Request")
    return value
