# ruff: noqa: E501 - log lines are as long as SGLang prints them
"""Every way in which SGLang dies: the cause is named, the consequence is not, and the advice points in the right direction."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mtpdeploy.actions.logfile import LogsRead, logfile
from mtpdeploy.progress import Silent
from mtpdeploy.sglang.failures import CLASSES, Attempt, diagnose, runbook_of
from mtpdeploy.sglang.logs import Summary, summarise

RUNBOOKS = Path(__file__).resolve().parent.parent / "docs" / "runbooks"

ARGS = (
    "[2026-05-01 10:00:00] server_args=ServerArgs(model_path='/m/x', mem_fraction_static=0.8, tp_size=1, max_running_requests=None, "
    "chunked_prefill_size=8192)\n"
)
DIST = "[2026-05-01 10:00:10] Init torch distributed begin.\n[2026-05-01 10:00:11] Init torch distributed ends. elapsed=0.3 s, mem usage=0.09 GB\n"
BEGIN = "[2026-05-01 10:00:12] Load weight begin. avail mem=92.82 GB\n"
END = "[2026-05-01 10:01:12] Load weight end. elapsed=60.00 s, type=XForCausalLM, avail mem=41.76 GB, mem usage=51.06 GB.\n"
POOL = (
    "[2026-05-01 10:01:13] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 8.00 GB, V size: 8.00 GB\n"
    "[2026-05-01 10:01:13] Memory pool end. avail mem=3.00 GB\n"
)
CAPTURE = "[2026-05-01 10:01:14] Capture target decode CUDA graph begin. backend=full, bs=[1, 2], avail mem=2.90 GB\n"
CAPTURED = "[2026-05-01 10:01:20] Capture target decode CUDA graph end. bs=[1, 2], elapsed=6.00 s, mem usage=0.50 GB, avail mem=2.40 GB.\n"
SIZES = (
    "[2026-05-01 10:01:21] max_total_num_tokens=1000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=40, "
    "context_len=4096, available_gpu_mem=2.40 GB\n"
)
HTTP = "[2026-05-01 10:01:22] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n"
READY = "[2026-05-01 10:01:25] The server is fired up and ready to roll!\n"
DECODE = (
    "[2026-05-01 10:05:00] Decode batch, #running-req: 3, #token: 500, token usage: 0.50, cuda graph: True, "
    "gen throughput (token/s): 100.00, #queue-req: 0\n"
)
LOADED = ARGS + DIST + BEGIN + END
UP = LOADED + POOL + CAPTURE + CAPTURED + SIZES + HTTP
SERVING = UP + READY + DECODE
HIT = "[2026-05-01 10:06:00] Scheduler hit an exception: Traceback (most recent call last):\n"
FRAME = '  File "/opt/env/lib/python3.12/site-packages/sglang/srt/{}", line 12, in {}\n    code()\n'
SIGQUIT = "[2026-05-01 10:06:01] Received sigquit from a child process. It usually means the child failed.\n"
DEAD = "[2026-05-01 10:06:01] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 94.97 GiB of which 338.75 MiB is free. "
    "Including non-PyTorch memory, this process has 94.00 GiB memory in use.\n"
)


def hit(message: str, file: str = "managers/scheduler.py", function: str = "run_scheduler_process") -> str:
    return (
        HIT
        + FRAME.format("managers/scheduler.py", "run_scheduler_process")
        + FRAME.format(file, function)
        + message
        + "\n\n"
        + SIGQUIT
    )


# name of the case, cause, phase it struck in, text
CASES: list[tuple[str, str | None, str | None, str]] = [
    # from outside
    ("killed while loading", "killed_sigkill", "weights", ARGS + DIST + BEGIN
     + "[2026-05-01 10:00:50] Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9, run `dmesg -T | grep -i oom`.\n" + SIGQUIT),
    ("shell says killed", "killed_sigkill", "weights", ARGS + DIST + BEGIN
     + "\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<00:00,  2.71it/s]\nKilled\n"),
    ("bash says killed", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "run.sh: line 12:  4711 Killed                  python -m sglang.launch_server\n"),
    ("wrapper says 137", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "container exited with code 137\n"),
    ("leak line only", "killed_silently", "weights", ARGS + DIST + BEGIN + "\rMulti-thread loading shards:  25% Completed | 1/4 [00:00<00:01,  2.45it/s]"
     "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects\n"),
    ("sigquit and nothing else", "killed_silently", "weights", ARGS + DIST + BEGIN + SIGQUIT),
    ("killed in service", "killed_sigkill", "serving", SERVING
     + "[2026-05-01 10:06:01] Subprocess scheduler_0 (pid=1015) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n" + DEAD),
    # pools
    ("fraction too small", "kv_pool_too_small", "pools", LOADED + hit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
     "Current value: mem_fraction_static=0.8", "model_executor/pool_configurator.py", "configure")),
    ("weights leave nothing", "kv_pool_too_small", "pools", LOADED + hit("RuntimeError: Loaded weights leave no GPU memory for the KV cache under "
     "--mem-fraction-static=0.55. Raise --mem-fraction-static above 0.571, or use more GPUs.", "mem_cache/kv_cache_configurator.py", "profile")),
    ("state slots", "mamba_pool_too_small", "pools", LOADED + hit("RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
     "requests. max_mamba_cache_size=2, mamba_ratio=5, resulting max_num_reqs=0.")),
    # out of memory, by place
    ("loading", "oom_weights", "weights", ARGS + DIST + BEGIN + hit(OOM, "model_loader/loader.py", "load_model")),
    ("after the pool", "oom_after_pool", "pools", LOADED + POOL + hit(OOM, "layers/attention/flashinfer_backend.py", "__init__")),
    ("capture", "oom_graph_capture", "graphs", LOADED + POOL + CAPTURE + hit(OOM, "model_executor/cuda_graph_runner.py", "capture")),
    ("capture, chained", "oom_graph_capture", "graphs", LOADED + POOL + CAPTURE + HIT + FRAME.format("model_executor/cuda_graph_runner.py", "capture")
     + OOM + "\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
     + FRAME.format("managers/scheduler.py", "run_scheduler_process")
     + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.50 GiB.\nPossible solutions:\n"
       "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n2. set --cuda-graph-max-bs to a smaller value (e.g., 16)\n\n" + SIGQUIT),
    ("in service", "oom_runtime", "serving", SERVING + hit(OOM, "models/x.py", "forward")),
    ("prefill", "oom_runtime", "serving", SERVING + hit("RuntimeError: Prefill out of memory. Try to lower your batch size.", "mem_cache/allocation.py", "alloc")),
    ("other process", "gpu_occupied", "weights", ARGS + DIST + BEGIN + hit(
     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 170.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 75.19 MiB is free. "
     "Process 467 has 44.79 GiB memory in use. Including non-PyTorch memory, this process has 39.98 GiB memory in use.", "model_loader/loader.py", "load_model")),
    ("own helpers hold little", "oom_weights", "weights", ARGS + DIST + BEGIN + hit(
     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 170.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 75.19 MiB is free. "
     "Process 467 has 1.51 GiB memory in use. Including non-PyTorch memory, this process has 93.00 GiB memory in use.", "model_loader/loader.py", "load_model")),
    ("own process by number in a container", "oom_weights", "weights", ARGS + DIST + BEGIN + hit(
     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 540.00 MiB. GPU 0 has a total capacity of 14.76 GiB of which 298.75 MiB is free. "
     "Process 63729 has 14.46 GiB memory in use. Of the allocated memory 14.35 GiB is allocated by PyTorch, and 1.52 MiB is reserved by PyTorch but "
     "unallocated.", "model_loader/loader.py", "load_model")),
    ("old card", "kernel_unsupported_arch", "graphs", LOADED + POOL + CAPTURE + hit(
     "RuntimeError: FlashAttention on Ampere/Ada cards only supports fp16 and bf16 data type")),
    ("unbalanced", "gpu_occupied", "dist_init", ARGS + "[2026-05-01 10:00:10] Init torch distributed begin.\n"
     + hit("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=7.2")),
    # ranks and nodes
    ("not connected", "dist_init_hang", "dist_init", ARGS + "[2026-05-01 10:00:10 TP1] Init torch distributed begin.\n"
     + hit("RuntimeError: Gloo connectFullMesh failed with timed out, Rank 8 is NOT connected to: [1, 2]")),
    ("store", "dist_init_hang", "dist_init", ARGS + "[2026-05-01 10:00:10 TP1] Init torch distributed begin.\n"
     + hit("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.")),
    ("victim of a peer", "peer_lost", "serving", SERVING
     + hit("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:35631")),
    ("victim and cause", "kernel_crash", "serving", SERVING
     + "[2026-05-01 10:06:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n" + FRAME.format("managers/scheduler.py", "event_loop")
     + "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.2]:35631\n\n"
     + "[2026-05-01 10:06:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n" + FRAME.format("managers/scheduler.py", "event_loop")
     + "RuntimeError: CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA\n\n" + DEAD),
    ("collective", "nccl_timeout", "serving", SERVING + "[rank1]:[E501 10:06:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
     "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.\nAborted (core dumped)\n"),
    ("others did not load", "peer_rank_load_failed", "weights", ARGS + DIST + BEGIN + END + hit(
     "ValueError: TP rank 2 could finish the model loading, but there are other ranks that didn't finish loading.")),
    ("watchdog", "watchdog_hang", "serving", SERVING
     + "[2026-05-01 10:11:00 TP1] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n" + DEAD),
    ("no peer access", "custom_allreduce_no_p2p", "graphs", LOADED + POOL + CAPTURE
     + hit("RuntimeError: CUDA error: peer access is not supported between these two devices")),
    # kernels and builds
    ("illegal access in capture", "kernel_crash", "graphs", LOADED + POOL + CAPTURE + hit(
     "Exception: Capture cuda graph failed: CUDA error: an illegal memory access was encountered\nPossible solutions:\n"
     "1. set --mem-fraction-static to a smaller value")),
    ("segfault", "kernel_crash", "graphs", LOADED + POOL + CAPTURE + "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n" + SIGQUIT),
    ("native exit", "kernel_crash", "serving", SERVING
     + "[2026-05-01 10:06:01] Subprocess scheduler_0 (pid=10) crashed with exit code -6. Triggering SIGQUIT for cleanup...\n" + DEAD),
    ("amd fault", "kernel_crash", "serving", SERVING + "Memory access fault by GPU node-1 (Agent handle: 0x5) on address 0x7f. Reason: Unknown.\n" + DEAD),
    ("no image", "kernel_unsupported_arch", "graphs", LOADED + POOL + CAPTURE + hit(
     "RuntimeError: CUDA error: no kernel image is available for execution on the device")),
    ("fp8 on ampere", "kernel_unsupported_arch", "graphs", LOADED + POOL + CAPTURE + hit(
     "triton.compiler.errors.CompilationError: at 1:0:\nValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5',)\")")),
    ("npu op", "op_unsupported_on_device", "pools", LOADED + POOL + hit("RuntimeError: call aclnnX failed: AclNN_Parameter_Error: Ascend910 does not support opType [X]")),
    ("triton", "kernel_compile_error", "graphs", LOADED + POOL + CAPTURE + hit(
     "triton.compiler.errors.CompilationError: at 322:24:\n        x = tl.load(p)\n        ^\nAssertionError('bad')")),
    ("ptxas", "kernel_compile_error", "graphs", LOADED + POOL + CAPTURE + hit("RuntimeError: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'")),
    ("linker", "jit_build_failed", "graphs", LOADED + POOL + CAPTURE + hit(
     "Exception: Capture cuda graph failed: Ninja build failed. Ninja output:\n/usr/bin/ld: cannot find -lcudart: No such file or directory\n"
     "collect2: error: ld returned 1 exit status\nninja: build stopped: subcommand failed.\nPossible solutions:\n1. set --mem-fraction-static to a smaller value")),
    ("no nvcc", "jit_build_failed", "pools", LOADED + POOL + hit("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")),
    ("code", "backend_code_error", "graphs", LOADED + POOL + CAPTURE + hit("TypeError: forward() missing 1 required positional argument: 'q'", "layers/x.py", "forward")),
    ("code at first decode", "backend_code_error", "serving", SERVING + hit("KeyError: 'model.layers.0.mlp.gate_proj.weight'", "models/x.py", "forward")),
    ("tp", "tp_shape_mismatch", "weights", ARGS + DIST + BEGIN + hit("AssertionError: 25 is not divisible by 2", "distributed/utils.py", "divide")),
    ("quant", "quant_dtype_unsupported", "weights", ARGS + DIST + BEGIN + hit("ValueError: torch.bfloat16 is not supported for quantization method gptq. Supported dtypes: [torch.float16]")),
    # environment
    ("architecture unknown to transformers", "transformers_version", "before_args", "Traceback (most recent call last):\n"
     + FRAME.format("../launch_server.py", "<module>") + "ValueError: The checkpoint you are trying to load has model type `qwen3_9` but Transformers does not "
     "recognize this architecture. This could be because of an issue with the checkpoint\n"),
    ("old kernel package", "package_version_mismatch", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "Exception: sglang-kernel is installed with version 0.3.0, which is less than the minimum required version 0.4.9. Please reinstall.\n"),
    ("symbol", "package_version_mismatch", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "ImportError: /opt/env/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN3c10\n"),
    ("arch unknown to SGLang", "package_version_mismatch", "weights", ARGS + DIST + BEGIN + hit(
     "ValueError: Model architectures ['NewForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])")),
    ("argparse", "bad_arguments", "before_args", "usage: sglang serve [-h] --model-path MODEL_PATH\nsglang serve: error: unrecognized arguments: --nope\n"),
    ("argparse, old", "bad_arguments", "before_args", "usage: launch_server.py [-h]\nlaunch_server.py: error: ambiguous option: --cuda-graph-max-bs could match a, b\n"),
    ("rule", "bad_arguments", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + FRAME.format("server_args.py", "_handle_mamba") + "ValueError: Speculative decoding for Qwen3_5ForConditionalGeneration is not compatible with radix cache "
     "when using --mamba-scheduler-strategy no_buffer.\n"),
    ("bare assertion", "bad_arguments", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + FRAME.format("server_args.py", "__post_init__") + "AssertionError\n"),
    ("context", "bad_arguments", "args", ARGS + "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "ValueError: User-specified context_length (999999) is greater than the derived context_length (262144).\n"),
    ("no gpu", "no_accelerator", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.\n"),
    ("old driver", "no_accelerator", "dist_init", ARGS + "[2026-05-01 10:00:10] Init torch distributed begin.\n"
     + hit("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).")),
    ("no sglang", "not_installed", "before_args", "/usr/bin/python3: No module named sglang\n"),
    ("no sglang, module", "not_installed", "before_args", "/usr/bin/python3: Error while finding module specification for 'sglang.launch_server' "
     "(ModuleNotFoundError: No module named 'sglang')\n"),
    ("no shell command", "not_installed", "before_args", "bash: line 1: sglang: command not found\n"),
    ("path", "model_not_found", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "OSError: /models/x is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'\n"),
    ("empty folder", "model_not_found", "weights", ARGS + DIST + BEGIN + hit("RuntimeError: Cannot find any model weights with `/models/x`", "model_loader/loader.py", "load_model")),
    ("gated", "model_not_found", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "OSError: You are trying to access a gated repo.\n401 Client Error. (Request ID: Root=1)\nCannot access gated repo for url https://huggingface.co/x.\n"),
    # the end of the start
    ("port", "port_in_use", "http_up", UP.replace(HTTP, "") + "[2026-05-01 10:01:22] INFO:     Started server process [10045]\n"
     "[2026-05-01 10:01:22] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use\n"
     "[2026-05-01 10:01:22] INFO:     Waiting for application shutdown.\n"),
    ("dist port", "port_in_use", "args", ARGS + "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "RuntimeError: Port is already in use. dist_init_port=30233\n"),
    ("warm-up, proxy", "warmup_failed", "warmup", UP + "[2026-05-01 10:01:40] Initialization failed. warmup error: Traceback (most recent call last):\n"
     + FRAME.format("entrypoints/http_server.py", "_execute_server_warmup") + "AssertionError: res=<Response [502]>, res.text=''\n\nKilled\n"),
    ("warm-up, kernel", "kernel_crash", "http_up", UP + hit("RuntimeError: CUDA error: an illegal memory access was encountered", "models/x.py", "forward")
     + "[2026-05-01 10:06:40] Initialization failed. warmup error: Traceback (most recent call last):\n"
     + FRAME.format("entrypoints/http_server.py", "_execute_server_warmup") + "requests.exceptions.ConnectionError: ('Connection aborted.', None)\n"),
    ("nccl says out of memory", "oom_runtime", "serving", SERVING + hit(
     "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled cuda error, NCCL version 2.21.5\nLast error:\n"
     "Cuda failure 2 'out of memory'", "managers/scheduler.py", "event_loop_overlap")),
    ("kernel log", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "[ 8123.45] Out of memory: Killed process 4711 (sglang::schedul) total-vm:1kB\n"),
    ("systemd", "killed_sigkill", "weights", "".join("Jun 03 10:00:00 gpu python3[7]: " + line + "\n" for line in (ARGS + DIST + BEGIN).splitlines())
     + "Jun 03 10:01:00 gpu systemd[1]: mtpdeploy-sglang.service: Main process exited, code=killed, status=9/KILL\n"),
    ("docker", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "sglang-1 exited with code 137\n"),
    ("slurm", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"),
    ("elastic", "killed_sigkill", "weights", ARGS + DIST + BEGIN + "  exitcode  : -9 (pid: 123)\n"),
    ("parent at its pipe", "killed_sigkill", "weights", ARGS + DIST + BEGIN
     + "[2026-05-01 10:00:50] Rank 0 scheduler is dead. Please check if there are relevant logs.\n[2026-05-01 10:00:51] Exit code: -9\n"
       "Traceback (most recent call last):\n" + FRAME.format("entrypoints/engine.py", "_launch_subprocesses") + "EOFError\n"),
    ("no driver library", "no_accelerator", "before_args", "Traceback (most recent call last):\n" + FRAME.format("../launch_server.py", "<module>")
     + "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory\n"),
    ("gave up waiting", "launch_timeout", "weights", ARGS + DIST + BEGIN + "TimeoutError: Server failed to start within the timeout period.\n"),
]  # fmt: skip


def read(text: str) -> Summary:
    return summarise([text.encode()])


@pytest.mark.parametrize(("cause", "failed_in", "text"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_cause_and_phase_of_a_failure(cause: str, failed_in: str | None, text: str) -> None:
    s = read(text)
    assert (s.cause, s.failed_in, s.is_sglang) == (cause, failed_in, True)
    assert s.ready is ("fired up" in text)
    if cause != "launch_timeout":
        assert s.phase == "crashed"
    assert s.evidence
    assert (
        not any(
            word in line
            for line in s.evidence
            for word in ("Received sigquit", "SIGQUIT received", "kill_process_tree")
        )
        or "nothing else" in text
        or s.cause == "killed_silently"
    )


OF_RANKS = [c for c in CASES if "] Scheduler hit" in c[3] and "TP0]" not in c[3]]


@pytest.mark.parametrize(("cause", "text"), [(c[1], c[3]) for c in OF_RANKS], ids=[c[0] for c in OF_RANKS])
def test_a_failure_in_eight_ranks_is_still_one_failure(cause: str, text: str) -> None:
    """N ranks print N copies of the same traceback."""
    lines = text.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if "Scheduler hit" in line)
    stop = next((i for i, line in enumerate(lines) if "igquit" in line or "SIGQUIT" in line), len(lines))
    block = lines[start:stop]
    copies = [line.replace("10:06:00]", f"10:06:00 TP{n}]") for n in range(8) for line in block]
    s = read("".join([*lines[:start], *copies, *lines[stop:]]))
    assert s.cause == cause
    assert len(s.failed_ranks) == 8


def test_every_class_has_a_meaning_and_a_page() -> None:
    told = {c[1] for c in CASES}
    assert set(CLASSES) - told == set(), "no case for these"
    missing = [cause for cause in CLASSES if not (RUNBOOKS / f"{runbook_of(cause)}.md").exists()]
    assert missing == []


# -- what is no failure --------------------------------------------------------------------------------------------------

HARMLESS = [
    "[2026-05-01 10:05:10] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 10, #new_token_ratio: 0.4 -> 0.9\n",
    "[2026-05-01 10:05:10] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 1\n",
    "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects\n",
    "Traceback (most recent call last):\n  File \"/opt/env/torchcodec/_core/ops.py\", line 57, in load\nRuntimeError: Could not load libtorchcodec. Likely causes:\n",
    "Traceback (most recent call last):\n  File \"/opt/env/torch/_dynamo/x.py\", line 57, in f\ntorch._dynamo.exc.Unsupported: call to lru_cache\n",
    "Traceback (most recent call last):\n" + FRAME.format("entrypoints/openai/serving_base.py", "handle") + "ValueError: messages must not be empty\n\n",
    "[2026-05-01 10:05:10] Error in request: CUDA out of memory is what the user wrote\n",
    "[2026-05-01 10:05:10] Ignore import error when loading sglang.srt.models.x: No module named 'helion'\n",
    "[2026-05-01 10:05:10 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)\n",
    "[2026-05-01 10:05:10] max_total_tokens=65536 is larger than the profiled value 60000. Use the profiled value instead.\n",
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_a_server_that_goes_on_has_not_failed(text: str) -> None:
    s = read(SERVING + text + DECODE.replace("10:05:00", "10:07:00"))
    assert (s.phase, s.cause, s.ready, s.evidence) == ("serving", None, True, ())


def test_pressure_is_a_warning_and_counted() -> None:
    s = read(SERVING + HARMLESS[0] + HARMLESS[0] + HARMLESS[1] + DECODE)
    assert (s.retractions, set(s.warnings)) == (2, {"retracted", "health_check_failed"})


def test_a_negative_draft_budget_is_no_failure() -> None:
    text = LOADED + "[2026-05-01 10:01:13] available memory for KV cache is -0.15 GB\n" + POOL
    assert read(text).cause is None


@pytest.mark.parametrize(
    "end",
    [
        "[2026-05-01 10:09:00] SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n"
        "[2026-05-01 10:09:01] Subprocess scheduler_0 (pid=7) crashed with exit code -15. Triggering SIGQUIT for cleanup...\n" + DEAD,
        "[2026-05-01 10:09:00] Gracefully exiting... Remaining number of requests 3. Remaining requests remaining_rids=['x'].\n" + DEAD + "Killed\n",
        "[2026-05-01 10:09:00] INFO:     Shutting down\n[2026-05-01 10:09:00] INFO:     Finished server process [12]\n",
    ],
)  # fmt: skip
def test_a_server_that_was_asked_to_stop_has_not_crashed(end: str) -> None:
    s = read(SERVING + end)
    assert (s.phase, s.cause, s.ready) == ("stopped", None, True)


def test_a_crash_before_the_stop_is_still_a_crash() -> None:
    s = read(
        SERVING
        + hit(OOM.strip(), "models/x.py", "forward")
        + "[2026-05-01 10:09:00] SIGTERM received. signum=None frame=None. Draining\n"
    )
    assert (s.phase, s.cause) == ("crashed", "oom_runtime")


def test_formats_that_some_give_the_prefix_change_nothing() -> None:
    text = (
        "[2025-05-25 19:45:03] [ERROR] Scheduler hit an exception: Traceback (most recent call last):\n"
        + FRAME.format("x.py", "f")
        + "KeyError: 'x'\n"
    )
    assert (
        read(
            text + "[2025-01-20 19:10:07] Received sigquit from a child proces. It usually means the child failed.\n"
        ).cause
        == "backend_code_error"
    )
    s = read(text.replace("[2025-05-25 19:45:03] [ERROR]", "[TP5 EP5]"))
    assert (s.cause, s.failed_ranks) == ("backend_code_error", ("TP5 EP5",))


def test_a_traceback_without_a_headline_names_its_rank() -> None:
    """0.3 logged the traceback alone."""
    text = "[2024-10-22 06:31:49 TP0] Capture cuda graph begin. This can take up to several minutes.\n[2024-10-22 06:31:49 TP0] Traceback (most recent call last):\n"
    s = read(
        text
        + FRAME.format("model_executor/cuda_graph_runner.py", "capture")
        + "RuntimeError: CUDA error: no kernel image is available for execution\n"
    )
    assert (s.phase, s.cause, s.failed_ranks, s.ready) == ("crashed", "kernel_unsupported_arch", ("TP0",), False)


def test_ctrl_c_is_a_stop() -> None:
    text = (
        SERVING
        + "^CTraceback (most recent call last):\n"
        + FRAME.format("entrypoints/http_server.py", "launch")
        + "KeyboardInterrupt\n"
    )
    assert read(text).phase in ("stopped", "serving")
    text = (
        SERVING
        + "Traceback (most recent call last):\n"
        + FRAME.format("entrypoints/http_server.py", "launch")
        + "KeyboardInterrupt\n"
    )
    assert (read(text).phase, read(text).cause) == ("stopped", None)


def test_health_checks_that_fail_and_fail_with_nothing_between_are_a_hang() -> None:
    failed = "[2026-05-01 10:0{}:10] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 1\n"
    s = read(SERVING + "".join(failed.format(i) for i in range(6, 9)))
    assert (s.phase, s.cause, s.ready) == ("hung", "watchdog_hang", True)
    busy = read(SERVING + failed.format(6) + failed.format(7) + DECODE + failed.format(8))
    assert (busy.phase, busy.cause) == ("serving", None)


def test_running_out_of_memory_nobody_knows_where_has_no_class() -> None:
    s = read(OOM + SIGQUIT)
    assert (s.phase, s.cause) == ("crashed", None)


def test_a_message_of_sglang_alone_is_recognised() -> None:
    s = read("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n")
    assert (s.is_sglang, s.phase, s.cause, s.ready) == (True, "crashed", "kv_pool_too_small", False)


def test_another_programs_traceback_and_arguments_are_not_sglangs() -> None:
    for text in (
        'Traceback (most recent call last):\n  File "/home/u/sglang-test/run.py", line 3, in <module>\nKeyError: 1\n',
        "usage: prog [-h]\n__main__.py: error: unrecognized arguments: --x\n",
        'Traceback (most recent call last):\n  File "/x/vllm/engine.py", line 3, in f\ntorch.OutOfMemoryError: CUDA out of memory.\n',
    ):
        assert read(text).is_sglang is False, text


# -- remedies ------------------------------------------------------------------------------------------------------------


def case(name: str) -> Summary:
    return read(next(c[3] for c in CASES if c[0] == name))


def test_the_printed_minimum_becomes_a_fraction_a_little_above_it() -> None:
    text = next(c[3] for c in CASES if c[0] == "weights leave nothing").replace(
        "mem_fraction_static=0.8", "mem_fraction_static=0.55"
    )
    remedy = diagnose(read(text)).remedy
    assert remedy.direction == "raise"
    assert remedy.set == {"mem_fraction_static": pytest.approx(0.61)}
    assert "0.571" in remedy.why


def test_a_minimum_below_the_value_in_force_sizes_the_state_pools_instead() -> None:
    """SGLang prints a minimum that is already exceeded when state pools, not weights, take the memory."""
    capped = "[2026-05-01 10:01:12] max_running_requests is capped to 3 by the mamba state cache (max_mamba_cache_size=15, 5 state slots per request). To\n"
    text = (
        LOADED
        + capped
        + hit(
            "RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8. Raise --mem-fraction-static above 0.57."
        )
    )
    remedy = diagnose(read(text), wanted_concurrency=6).remedy
    assert remedy.direction == "neither"
    assert remedy.set == {"max_running_requests": 6, "max_mamba_cache_size": 30}
    assert "state pools" in remedy.why


def test_state_for_requests_that_nobody_needs_is_given_back() -> None:
    """Up to 0.5.12 the state of the default 48 requests is set aside: 27.5 GiB of a 27B."""
    args = ARGS.replace(
        "mem_fraction_static=0.8",
        "mem_fraction_static=0.85, mamba_scheduler_strategy='extra_buffer', max_mamba_cache_size=24",
    )
    text = (
        args
        + DIST
        + BEGIN
        + END
        + hit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    )
    remedy = diagnose(read(text)).remedy
    assert (remedy.direction, remedy.set) == ("neither", {"max_running_requests": 4, "max_mamba_cache_size": 20})


def test_slots_are_slots_per_request_times_the_wanted_concurrency() -> None:
    remedy = diagnose(case("state slots"), wanted_concurrency=8).remedy
    assert remedy.set == {"max_running_requests": 8, "max_mamba_cache_size": 40}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("capture", "oom_graph_capture"), ("after the pool", "oom_after_pool"), ("in service", "oom_runtime")],
)
def test_what_follows_the_pools_wants_a_lower_fraction(name: str, cause: str) -> None:
    d = diagnose(case(name))
    assert (d.cause, d.remedy.direction) == (cause, "lower")
    fraction = d.remedy.set["mem_fraction_static"]
    assert isinstance(fraction, float)
    assert 0.7 < fraction < 0.8


@pytest.mark.parametrize("name", ["other process", "unbalanced", "linker", "illegal access in capture", "loading"])
def test_no_fraction_is_advised_where_none_helps(name: str) -> None:
    remedy = diagnose(case(name)).remedy
    assert remedy.direction == "neither"
    assert "mem_fraction_static" not in remedy.set


def test_opposite_failures_at_neighbouring_fractions_leave_no_value() -> None:
    lower = Attempt({"model_path": "/m/x", "mem_fraction_static": 0.78, "tp_size": 1}, "kv_pool_too_small")
    remedy = diagnose(case("capture"), attempts=[lower]).remedy
    assert remedy.set == {}
    assert "no value fits" in remedy.why
    other_model = Attempt({"model_path": "/m/y", "mem_fraction_static": 0.78}, "kv_pool_too_small")
    assert "no value fits" not in diagnose(case("capture"), attempts=[other_model]).remedy.why
    higher = Attempt({"mem_fraction_static": 0.82}, "kv_pool_too_small")
    assert "no value fits" not in diagnose(case("capture"), attempts=[higher]).remedy.why


def test_two_logs_read_together_are_attempts_at_the_same_server(tmp_path: Path) -> None:
    too_small = next(c[3] for c in CASES if c[0] == "fraction too small").replace(
        "fraction_static=0.8", "fraction_static=0.78"
    )
    too_large = next(c[3] for c in CASES if c[0] == "capture")
    for name, text in (("low.log", too_small), ("high.log", too_large)):
        (tmp_path / name).write_text(text)
    answer = logfile(talk=Silent(), file=(str(tmp_path / "low.log"), str(tmp_path / "high.log")), out=print)
    assert isinstance(answer, LogsRead)
    assert all(log.diagnosis and "no value fits" in log.diagnosis.remedy.why for log in answer.logs)


# -- facts from outside the log -------------------------------------------------------------------------------------------


def test_exit_status_and_oom_kill_name_what_no_line_says() -> None:
    silent = read(ARGS + DIST + BEGIN)
    assert diagnose(silent).cause is None
    assert diagnose(silent, exit_status=-9).cause == "killed_sigkill"
    killed = diagnose(silent, exit_status=137, oom_killed=True)
    assert "OOM killer" in killed.meaning
    assert diagnose(silent, exit_status=-11).cause == "kernel_crash"
    assert diagnose(read(SERVING), child_dead="sglang::scheduler").facts == (
        "sglang::scheduler is gone while the main process still lives",
    )


def test_facts_do_not_replace_an_exception_that_came_first() -> None:
    assert diagnose(case("capture"), exit_status=-9, oom_killed=False).cause == "oom_graph_capture"


def test_next_commands_are_complete_and_quoted() -> None:
    d = diagnose(case("state slots"), host="gpu 1", profile="mtp", wanted_concurrency=2)
    assert d.next_commands[1] == (
        "mtpdeploy deploy --host 'gpu 1' --profile mtp --set args.max_running_requests=2 --set args.max_mamba_cache_size=10"
    )
    assert d.as_json()["runbook"] == "docs/runbooks/mamba-pool-too-small.md"


def test_a_stranger_s_log_is_planned_by_the_very_command_that_it_shows() -> None:
    command = "python3 -m sglang.launch_server --model-path /m --api-key sk-topsecret12 --mamba-radix-cache-strategy big_buffer"
    refused = "sglang serve: error: argument --mamba-radix-cache-strategy: invalid choice: 'big_buffer' (choose from auto, no_buffer)\n"
    log = summarise([f"# 2026-11-30T03:21:22Z {command}\nusage: sglang serve [-h]\n{refused}".encode()])
    (told,) = diagnose(log).next_commands
    words = shlex.split(told)
    assert words[:3] == ["mtpdeploy", "plan", "--command"]
    assert words[3] == command.replace("sk-topsecret12", "***")
    (hosted,) = diagnose(log, host="gpu1", profile="mtp").next_commands
    assert hosted == "mtpdeploy plan --host gpu1 --profile mtp"
