"""The log of a start, line by line as the played version writes it. Shapes: SGLang 0.5.6 to 0.5.23, see docs/log-summary.md.

A generator of (seconds until it appears, text): the server waits and writes. What only recordings of one version show
(`recorded`) is printed by that version alone. Text that ends in a carriage return is a
progress bar. What kills the launch is raised as `Died` after its last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtpdeploy.sglang.overrides import prefill_graph_sizes
from mtpdeploy.sim.arguments import shown
from mtpdeploy.sim.launch import Launch
from mtpdeploy.sim.phases import Phases, decode_sizes

Step = tuple[float, str]
BAR = "\r"


@dataclass
class Died(Exception):
    """The launch ends here; the process's exit status."""

    status: int = 1


@dataclass(frozen=True, slots=True)
class Held(Exception):
    """Marks how much GPU memory the server holds from here on; not an error."""

    gb: float


def raw(text: str) -> str:
    """A line without SGLang's time prefix."""
    return "\0" + text


def traceback(kind: str, message: str, where: str = "model_executor/model_runner.py") -> Iterator[Step]:
    """An exception in the scheduler, and the consequences that SGLang prints after it."""
    yield 0.0, "Scheduler hit an exception: Traceback (most recent call last):"
    for line in (
        '  File "/usr/lib/python3/dist-packages/sglang/srt/managers/scheduler.py", line 4711, in run_scheduler_process',
        "    scheduler = Scheduler(",
        f'  File "/usr/lib/python3/dist-packages/sglang/srt/{where}", line 381, in __init__',
        "    self.initialize(min_per_gpu_memory)",
        f"{kind}: {message}",
    ):
        yield 0.0, raw(line)
    yield 0.0, raw("")
    yield 0.05, "Received sigquit from a child process. It usually means the child failed."
    raise Died(-9)


def before_args(launch: Launch) -> Iterator[Step]:
    """What stands before the arguments: warnings of the parser and of the resolution."""
    version, settings = launch.version, launch.settings
    yield Phases.of(launch).imports_s, ""
    if version.at_least("0.5.17"):
        yield (
            0.0,
            raw(
                "sglang/launch_server.py:56: UserWarning: 'python -m sglang.launch_server' is still supported, "
                "but 'sglang serve' is the recommended entrypoint."
            ),
        )
        yield 0.0, raw("  Example: sglang serve --model-path <model> [options]")
        yield 0.0, raw("  warnings.warn(")
    for option, use in launch.deprecated:
        successor = f" Use '{use}' instead." if use else ""
        yield 0.0, raw(f"\x1b[1;33m'{option}' is deprecated and will be removed in a future release.{successor}\x1b[0m")
    if launch.refused is not None:
        kind = "ValueError" if version.before("0.5.14") else "AssertionError"
        yield 1.0, raw("Traceback (most recent call last):")
        yield 0.0, raw('  File "/usr/lib/python3/dist-packages/sglang/srt/server_args.py", line 2207, in __post_init__')
        yield 0.0, raw("    self._handle_mamba_radix_cache(model_arch)")
        yield 0.0, raw(f"{kind}: {_refusal(launch)}")
        raise Died(1)
    if recorded(launch) and launch.settings.replayssm:
        yield (
            0.0,
            "--enable-linear-replayssm-spec: setting --mamba-ssm-dtype float32 (the closed-loop exact fold keeps the SSM "
            "checkpoint bit-identical to the recurrent baseline).",
        )
    if settings.algorithm and settings.running_is_default:
        yield (
            0.0,
            (
                "Max running requests is reset to 48 for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            ),
        )
    if launch.given.get("attention_backend") is None:
        yield 0.0, "Attention backend not specified. Use fa3 backend by default."
    if recorded(launch) and launch.model.multimodal:
        yield (
            0.0,
            (
                "Multimodal feature transport auto-resolved to cuda_ipc (single-node CUDA). Pass --mm-feature-transport=cpu to opt out."
            ),
        )
        yield (
            0.0,
            (
                "Using CUDA IPC for multimodal features: reserving up to 1024 MiB on base GPU 0 across 1 tokenizer worker(s). "
                "This reduces KV cache headroom; a full pool falls back to CPU transport."
            ),
        )
        yield (
            0.0,
            (
                "CUDA IPC pool-handle caching is enabled. It reuses mappings to the existing bounded pool without reserving "
                "another pool; set SGLANG_USE_IPC_POOL_HANDLE_CACHE=0 to disable it."
            ),
        )


def _refusal(launch: Launch) -> str:
    """The words of SGLang where they are known, else the rule's own."""
    assert launch.refused is not None
    version, strategy = launch.version, launch.given.get("mamba_radix_cache_strategy") or "no_buffer"
    if version.at_least("0.5.10") and version.before("0.5.14") and launch.draft_tokens and launch.model.hybrid:
        if strategy == "extra_buffer" and launch.given.get("disable_radix_cache"):
            return "mamba extra_buffer is not compatible with --disable-radix-cache"
        if strategy != "extra_buffer" and not launch.given.get("disable_radix_cache"):
            return (
                f"Speculative decoding for {launch.model.architecture} is not compatible with radix cache when using "
                "--mamba-scheduler-strategy no_buffer. To use radix cache with speculative decoding, please use "
                "--mamba-scheduler-strategy extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
            )
    if version.at_least("0.5.14") and launch.settings.strategy == "no_buffer" and launch.draft_tokens:
        return "no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True."
    return launch.refused.message


def server_args(launch: Launch) -> str:
    """The one long line. It holds an API key in clear, as SGLang's does: whoever reads logs has to mask it."""
    values = shown(launch.in_force, launch.version)
    if launch.version.at_least("0.5.19"):
        return f"server_args={values!r}"
    return "server_args=ServerArgs(" + ", ".join(f"{name}={value!r}" for name, value in values.items()) + ")"


def recorded(launch: Launch) -> bool:
    """Whether logs of a real start of this version are at hand (tests/data/h200)."""
    return launch.version.at_least("0.5.17") and launch.version.before("0.5.18")


def load(launch: Launch) -> Iterator[Step | Held]:
    """From the process group to the last pool and graph."""
    pools, version, phases = launch.pools, launch.version, Phases.of(launch)
    late_draft = version.before("0.5.14") and bool(launch.draft_tokens)
    yield from _tokenizer(launch, phases.scheduler_s)
    yield from _distributed(launch, 0.09)
    yield from _weights(launch, draft=False)
    if launch.draft_tokens and not late_draft:
        yield phases.before_draft_s, ""
        yield from _distributed(launch, 0.0, again=True)
        yield from _weights(launch, draft=True)
    yield from _pools(launch)
    if late_draft:
        yield from _graphs(launch, "target")
        yield from _weights(launch, draft=True)
        yield from _draft_pool(launch)
        yield from _graphs(launch, "draft")
    else:
        if launch.draft_tokens:
            yield from _draft_pool(launch)
        for _ in range(2 if launch.draft_tokens else 1):
            yield from _attention(launch)
        yield from _graphs(launch, "target")
        yield from _graphs(launch, "draft")
    yield (
        0.1,
        f"max_total_num_tokens={pools.kv_tokens}, chunked_prefill_size={launch.settings.chunk}, "
        f"max_prefill_tokens={launch.number('max_prefill_tokens', 16384)}, max_running_requests={pools.max_running}, "
        f"context_len={launch.context}, available_gpu_mem={pools.avail_end_gb:.2f} GB",
    )
    if launch.fault == "crash-loop":
        yield from traceback(
            "RuntimeError", "CUDA error: an illegal memory access was encountered", "managers/scheduler.py"
        )


def _tokenizer(launch: Launch, seconds: float) -> Iterator[Step]:
    """What the tokenizer's process says while the scheduler's imports."""
    yield seconds / 2, ""
    if recorded(launch):
        if launch.model.multimodal:
            yield 0.0, "Multimodal data loading enabled with 16 worker threads (auto)."
            yield 0.0, "Multimodal processor concurrency enabled with 2 isolated worker threads (auto)."
            yield (
                0.0,
                (
                    "CUDA IPC multimodal feature pools reserve 1024 MiB total on GPU 0 "
                    "(1024 MiB per tokenizer worker × 1; configured budget 1024 MiB)."
                ),
            )
        yield 0.0, "Using default HuggingFace chat template with detected content format: openai"
    yield seconds / 2, ""


def _attention(launch: Launch) -> Iterator[Step]:
    """The kernels of a hybrid model's linear layers."""
    if recorded(launch) and launch.model.hybrid:
        yield 0.0, "Linear attention kernel backend: decode=triton, prefill=triton, verify=triton"
        yield 0.0, "Using hybrid linear attention backend for hybrid GDN models."
        yield (
            0.0,
            (
                "GDN kernel dispatcher: decode=TritonGDNKernel, extend=TritonGDNKernel, verify=TritonGDNKernel packed_decode=True"
            ),
        )


def caches(launch: Launch) -> Iterator[Step]:
    """The prefix cache, after everything else of the scheduler."""
    if not recorded(launch):
        return
    if launch.settings.radix and launch.model.hybrid:
        yield 0.0, "Init Unified RadixTree with components (<ComponentType.FULL: 0>, <ComponentType.MAMBA: 2>)"
    if launch.model.hybrid:
        kind = "UnifiedRadixCache" if launch.settings.radix else "ChunkCache"
        yield (
            0.0,
            (
                f"Tree cache initialized: source=default impl={kind} hybrid_swa=False hybrid_ssm=True "
                "hierarchical=False streaming_wrapped=False"
            ),
        )


def _distributed(launch: Launch, mem: float, again: bool = False) -> Iterator[Step | Held]:
    if launch.version.at_least("0.5.21"):
        yield 0.3, "Init parallel begin."
        yield 0.4, "Init parallel ends. elapsed=0.41 s"
        if not again:
            yield 0.0, f"Memory baseline taken. mem usage={mem:.2f} GB"
    else:
        yield 0.3, "Init torch distributed begin."
        elapsed = "elapsed=0.41 s, " if launch.version.at_least("0.5.8") else ""
        yield 0.4, f"Init torch distributed ends. {elapsed}mem usage={mem:.2f} GB"
    if not again and not launch.simulate.fault:
        yield Held(0.6)


def _weights(launch: Launch, *, draft: bool) -> Iterator[Step | Held]:
    pools, phases = launch.pools, Phases.of(launch)
    late = launch.version.before("0.5.14")
    if draft:
        before = (pools.avail_after_pools_gb + pools.draft_weights_gb) if late else pools.pre_load_gb - pools.weights_gb
        size, kind, seconds, shards = pools.draft_weights_gb, launch.model.draft_architecture, phases.draft_weights_s, 2
    else:
        before, size, kind, shards = pools.pre_load_gb, pools.weights_gb, launch.model.architecture, 12
        seconds = phases.weights_s
    if launch.fault == "slow-load":
        seconds *= 10
    yield 0.0, f"Load weight begin. avail mem={before:.2f} GB"
    if recorded(launch) and not draft:
        backend = launch.given.get("mm_attention_backend")
        if launch.model.multimodal and backend:
            yield 0.0, f"Using {backend} as multimodal attention backend."
        if launch.model.hybrid:
            yield 0.0, "using attn output gate!"
    if not draft and (launch.fault == "oom-load" or size > before):
        yield 1.0, _bar("Loading safetensors checkpoint shards", 3, shards)
        yield from traceback(
            "torch.OutOfMemoryError",
            f"CUDA out of memory. Tried to allocate 170.00 MiB. GPU 0 has a total capacity of "
            f"{launch.simulate.gpu_memory_gb:.2f} GiB of which 12.00 MiB is free.",
            "model_loader/loader.py",
        )
    dummy = launch.in_force.get("load_format") == "dummy"
    for shard in range(shards + 1):
        yield seconds / (shards + 1), "" if dummy else _bar("Loading safetensors checkpoint shards", shard, shards)
        if launch.fault == "hang" and not draft and shard == shards // 2:
            yield 1e9, ""
    if not dummy:
        yield 0.0, raw("")
    elapsed = f"elapsed={seconds:.2f} s, " if launch.version.at_least("0.5.8") else ""
    dtype = "dtype=torch.bfloat16, " if launch.version.before("0.5.8") else ""
    quant = f"quant={launch.settings.quantization}, " if launch.settings.quantization else ""
    yield (
        0.1,
        f"Load weight end. {elapsed}type={kind}, {quant}{dtype}avail mem={before - size:.2f} GB, mem usage={size:.2f} GB"
        + ("." if launch.version.at_least("0.5.7") else ""),
    )
    yield Held(launch.simulate.gpu_memory_gb - (before - size))


def _bar(what: str, done: int, total: int) -> str:
    percent = 100 * done // total
    return f"{what}: {percent:3d}% Completed | {done}/{total} [00:{done:02d}<00:{total - done:02d},  1.41it/s]{BAR}"


def _pools(launch: Launch) -> Iterator[Step | Held]:
    pools, version = launch.pools, launch.version
    fault = launch.fault
    if fault == "kv-pool-too-small":
        yield from traceback(
            "RuntimeError",
            "Not enough memory. Please try to increase --mem-fraction-static. "
            f"Current value: mem_fraction_static={launch.settings.fraction}",
            "model_executor/pool_configurator.py",
        )
    if fault == "state-slots":
        yield from traceback(
            "RuntimeError",
            "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=2, "
            f"mamba_ratio={pools.slots_per_request}, resulting max_num_reqs=0.",
            "mem_cache/kv_cache_configurator.py",
        )
    if pools.failure is not None:
        kind, _, message = pools.failure.line.partition(": ")
        yield from traceback(kind, message, "mem_cache/kv_cache_configurator.py")
    if version.at_least("0.5.17") and pools.bound_by == "state_slots":
        yield (
            0.1,
            f"max_running_requests is capped to {pools.max_running} by the mamba state cache "
            f"(max_mamba_cache_size={pools.slots}, {pools.slots_per_request} state slots per request). To raise it: increase "
            "--mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16.",
        )
    if pools.slots:
        line = (
            f"Mamba Cache is allocated. max_mamba_cache_size: {pools.slots}, conv_state size: {pools.conv_gb:.2f}GB, "
            f"ssm_state size: {pools.ssm_gb:.2f}GB "
        )
        if launch.draft_tokens:
            line += (
                f"intermediate_ssm_state_cache size: {pools.intermediate_ssm_gb:.2f}GB "
                f"intermediate_conv_window_cache size: {pools.intermediate_conv_gb:.2f}GB "
            )
        yield Phases.of(launch).pools_s, line
        if recorded(launch) and pools.ring_gb:
            yield (
                0.0,
                (
                    f"GDN ReplaySSM ring buffers allocated (record_len={launch.draft_tokens}, fold=True): d=0.000GB, k=0.000GB, "
                    f"g={0.008 * pools.ring_gb:.3f}GB rawv={0.738 * pools.ring_gb:.3f}GB, rawk={0.246 * pools.ring_gb:.3f}GB, "
                    f"beta={0.008 * pools.ring_gb:.3f}GB "
                ),
            )
    dtype = "dtype: torch.bfloat16, " if version.at_least("0.5.7") else ""
    yield (
        0.2,
        (
            f"KV Cache is allocated. {dtype}#tokens: {pools.kv_tokens}, K size: {pools.k_gb:.2f} GB, V size: {pools.v_gb:.2f} GB"
        ),
    )
    yield 0.0, f"Memory pool end. avail mem={pools.avail_after_target_pools_gb:.2f} GB"
    yield Held(launch.simulate.gpu_memory_gb - pools.avail_after_target_pools_gb)


def _draft_pool(launch: Launch) -> Iterator[Step | Held]:
    pools = launch.pools
    dtype = "dtype: torch.bfloat16, " if launch.version.at_least("0.5.7") else ""
    half = pools.draft_kv_gb / 2
    yield 0.1, f"KV Cache is allocated. {dtype}#tokens: {pools.kv_tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB"
    yield 0.0, f"Memory pool end. avail mem={pools.avail_after_pools_gb:.2f} GB"


def _graphs(launch: Launch, who: str) -> Iterator[Step | Held]:
    pools, version, settings = launch.pools, launch.version, launch.settings
    speculative = bool(launch.draft_tokens)
    if who == "draft" and not speculative:
        return
    new = version.at_least("0.5.14")
    avail = pools.avail_after_pools_gb + pools.released_gb
    sizes, phases = list(decode_sizes(launch)), Phases.of(launch)
    if who == "target" and settings.prefill_graphs and pools.prefill_graph_gb > 0:
        tokens = list(prefill_graph_sizes(settings.chunk))
        if new:
            yield (
                0.1,
                f"Capture target prefill CUDA graph begin. backend=breakable, num_tokens={tokens}, avail mem={avail:.2f} GB",
            )
        else:
            yield 0.1, f"Capture piecewise CUDA graph begin. avail mem={avail:.2f} GB"
        for done in range(0, len(tokens) + 1, 8):
            yield (
                phases.graphs_s["prefill"] / (len(tokens) // 8 + 1),
                _capture(
                    "Capturing num tokens (num_tokens",
                    tokens[-1 - min(done, len(tokens) - 1)],
                    avail,
                    done,
                    len(tokens),
                ),
            )
        yield 0.0, raw("")
        avail -= pools.prefill_graph_gb
        if new:
            yield (
                0.1,
                (
                    f"Capture target prefill CUDA graph end. elapsed={phases.graphs_s['prefill']:.2f} s, mem usage={pools.prefill_graph_gb:.2f} GB, "
                    f"avail mem={avail:.2f} GB."
                ),
            )
        else:
            yield (
                0.1,
                (
                    f"Capture piecewise CUDA graph end. Time elapsed: {phases.graphs_s['prefill']:.2f} s. mem usage={pools.prefill_graph_gb:.2f} GB. "
                    f"avail mem={avail:.2f} GB."
                ),
            )
    else:
        if recorded(launch):
            why = (
                "some layers do not apply Standard GQA"
                if who == "draft" and settings.prefill_graphs
                else "cuda_graph_config resolved prefill.backend='disabled' "
                "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
            )
            yield 0.0, f"Disable prefill CUDA graph because {why}"
        if who == "draft":
            avail -= pools.prefill_graph_gb
    if not settings.decode_graphs:
        return
    names = (
        ("target verify" if speculative else "target decode",)
        if who == "target"
        else (("draft decode", "draft extend") if settings.steps > 1 else ("draft extend",))
    )
    if who == "draft":
        avail -= phases.graphs_gb["target_verify"]
    per_request = {"target verify": launch.draft_tokens, "draft decode": 1, "draft extend": launch.draft_tokens}
    for name in names:
        key = "decode" if name == "target decode" else name.replace(" ", "_")
        seconds, size_gb = phases.graphs_s[key], phases.graphs_gb[key]
        if new:
            # a real log of 0.5.17 has the sizes in every begin line, the source of 0.5.23 has those of the target at the end
            at_begin = who == "draft" or version.before("0.5.18")
            listed = f"bs={sizes}, " if at_begin else ""
            yield (
                0.1,
                (
                    f"Capture {name} CUDA graph begin. backend=full, num_tokens_per_req={per_request.get(name, 1)}, {listed}"
                    f"avail mem={avail:.2f} GB"
                ),
            )
        else:
            old = {
                "target verify": "cuda",
                "target decode": "cuda",
                "draft decode": "draft cuda",
                "draft extend": "draft extend cuda",
            }
            yield (
                0.1,
                f"Capture {old[name]} graph begin. This can take up to several minutes. avail mem={avail:.2f} GB",
            )
        for done, size in enumerate(reversed(sizes)):
            yield seconds / len(sizes), _capture("Capturing batches (bs", size, avail, done, len(sizes))
            if launch.fault == "graph-capture" and done == len(sizes) // 2:
                yield 0.0, raw("")
                yield from traceback(
                    "Exception",
                    "Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB.\n"
                    "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
                    "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)",
                    "model_executor/cuda_graph_runner.py",
                )
        yield 0.0, raw("")
        avail -= size_gb
        if new:
            listed = "" if at_begin else f"bs={sizes}, "
            yield (
                0.1,
                f"Capture {name} CUDA graph end. {listed}elapsed={seconds:.2f} s, mem usage={size_gb:.2f} GB, avail mem={avail:.2f} GB.",
            )
        else:
            yield (
                0.1,
                f"Capture {old[name]} graph end. Time elapsed: {seconds:.2f} s. mem usage={size_gb:.2f} GB. avail mem={avail:.2f} GB.",
            )
    yield Held(launch.simulate.gpu_memory_gb - avail)


def _capture(what: str, size: int, avail: float, done: int, total: int) -> str:
    percent = 100 * done // total
    return f"{what}={size} avail_mem={avail:.2f} GB): {percent:3d}%|{'█' * (percent // 10):<10}| {done}/{total} [00:00<00:00,  4.70it/s]{BAR}"


def timings(launch: Launch) -> str | None:
    """The summary that 0.5.17 and later print."""
    if launch.version.before("0.5.17"):
        return None
    phases = Phases.of(launch)
    graphs = ", ".join(f"{name}={seconds:.2f}" for name, seconds in phases.graphs_s.items())
    return (
        f"Engine startup timings (s): load_weight={phases.weights_s + phases.draft_weights_s:.2f}, "
        f"kv_cache_allocation={phases.pools_s:.2f}, scheduler_e2e={phases.scheduler_e2e_s:.2f}, "
        f"cuda_graph={{{graphs}}}, tokenizer_e2e={phases.tokenizer_e2e_s:.2f}"
    )
