"""Failure signatures: which words in an exception's message or in a plain line decide for which cause.

Order is rank: of two signatures in one traceback the earlier one wins, because it says more. `plain` ones also count
outside a traceback; the others occur in harmless lines and count only inside one. Sources: SGLang 0.5.6 … 0.5.23 (file named
in the comment), torch, triton, argparse, uvicorn, Hugging Face libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    cause: str
    pattern: re.Pattern[str]
    plain: bool


def _sign(cause: str, *patterns: str, plain: bool = False) -> Signature:
    return Signature(cause, re.compile("|".join(patterns)), plain)


OUT_OF_MEMORY = re.compile(
    r"torch\.(?:cuda\.)?OutOfMemoryError|(?:CUDA|HIP|NPU|XPU|MUSA) out of memory|out of memory\. Tried to allocate|cudaErrorMemoryAllocation|"
    r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|NPU OOM|hipErrorOutOfMemory|"
    r"Cuda failure (?:2 )?'out of memory'"
)
RUNTIME_OOM = re.compile(
    r"Prefill out of memory\. Try to lower|Decode out of memory\. Try to lower|alloc_req_slots runs out of memory|Out of memory even after retracting"
)
OTHER_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) (GiB|MiB) memory in use")
THIS_PROCESS = re.compile(r"this process has [\d.]+ (?:GiB|MiB) memory in use")
ALLOCATED = re.compile(r"Of the allocated memory ([\d.]+) (GiB|MiB) is allocated by PyTorch")
CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")

SIGNATURES: tuple[Signature, ...] = (
    # argparse: prog is launch_server.py up to 0.5.9, `sglang serve` from 0.5.10.
    _sign(
        "bad_arguments",
        r"(?:launch_server\.py|sglang serve|sglang(?:\.launch_server)?|__main__\.py): error: ",
        plain=True,
    ),
    _sign(
        "bad_arguments",
        # arg_groups/mamba_hook.py, server_args.py (0.5.10 to 0.5.13), configs/model_config.py
        r"is not compatible with radix cache when using --mamba-scheduler-strategy",
        r"mamba extra_buffer is not compatible with --disable-radix-cache",
        r"no_buffer do(?:es)? not support overlap schedule",
        r"no_buffer only supports page_size=1",
        r"no_buffer do(?:es)? not support trtllm_mha",
        r"extra_buffer_lazy unsupported",
        r"needs mamba state, got ",
        r"only supports topk ?= ?1",
        r"Unknown speculative algorithm name",
        r"User-specified context_length \(\d+\) is greater than the derived context_length",
        r"--language-model-only does not support",
        r"Unsupported config option '",
        r"speculative_num_steps.{0,60}(?:must|should|required|None)",
        r"chunked_prefill_size must be",
        r"max_mamba_cache_size must be",
        r"prepare_server_args|ServerArgs\.__init__\(\) got an unexpected keyword",
    ),
    _sign(
        "not_installed",
        r"No module named '?sglang'?(?:\.launch_server)?'?(?:$|[\s;.)])",
        r"sglang: (?:command )?not found",
        plain=True,
    ),
    # The kernel, a supervisor or a batch system tells of a kill.
    _sign(
        "killed_sigkill",
        r"Out of memory: Killed process \d+",
        r"Memory cgroup out of memory: Killed process",
        r"has been killed by the OOM killer|Failed with result 'oom-kill'|\bOOMKilled\b",
        r"Detected \d+ oom[_-]kill event",
        r"Signal 9 \(SIGKILL\) received by PID",
        r"srun: error: .*: Out Of Memory",
        plain=True,
    ),
    _sign(
        "no_accelerator",
        r"libcuda\.so\.1: cannot open shared object file",
        r"No accelerator \(CUDA",
        r"Found no NVIDIA driver",
        r"The NVIDIA driver on your system is too old",
        r"CUDA driver version is insufficient",
        r"no CUDA-capable device is detected",
        r"CUDA error: system not yet initialized",
        r"Torch not compiled with CUDA enabled",
        r"No CUDA GPUs are available",
        r"CUDA unknown error",
        r"CUDA error: invalid device ordinal",
    ),
    _sign(
        "transformers_version",
        r"Transformers does not recognize this architecture",
        r"does not recognize this architecture",
        r"Auto\w+\.register\(\) got (?:multiple values|an unexpected keyword)",
        r"is already used by a Transformers (?:config|model)",
        r"cannot import name '\w+' from 'transformers",
        r"module '?transformers[\w.]*'? has no attribute",
        r"No module named 'transformers\.",
    ),
    _sign(
        "package_version_mismatch",
        r"is less than the minimum required version",  # utils/common.py
        r"with minimum required version \S+ is not installed",
        r"Unsupported `?[\w.-]+`? version",
        r"Model architectures \[.*\] are not supported for now",  # models/registry.py
        r"undefined symbol: ",
        r"Unsupported architectures: ",
        r"lib[\w.+-]+\.so[\d.]*: cannot open shared object file",
        r"version `(?:GLIBC|GLIBCXX|CXXABI)\S*' not found",
        r"cannot import name '\w+' from '",
        r"requires (?:\w+ )?version",
        r"ContextualVersionConflict|VersionConflict|incompatible version",
        r"compiled (?:with|against|using) .{0,40}(?:different|older|newer|NumPy|CUDA|torch)",
    ),
    _sign("gpu_occupied", r"The memory capacity is unbalanced"),  # distributed/bootstrap.py
    _sign(
        "mamba_pool_too_small",
        r"state cache is too small to serve any requests",  # mem_cache/kv_cache_configurator.py
        r"Not enough GPU memory for hybrid \(mamba/linear-attention\) state cache",
        r"max_mamba_cache_size .{0,40}(?:too small|less than)",
    ),
    _sign(
        "kv_pool_too_small",
        r"Not enough memory\. Please try to increase --mem-fraction-static",  # model_executor/pool_configurator.py
        r"Loaded weights leave no GPU memory for the KV cache",  # mem_cache/kv_cache_configurator.py
        r"is larger than the profiled value -",
    ),
    _sign(
        "peer_rank_load_failed", r"could finish the model loading, but there are other ranks that didn't finish loading"
    ),
    _sign(
        "custom_allreduce_no_p2p",
        r"peer access is not supported between these two",
        r"peer mapping resources exhausted",
        r"custom_all_reduce\.cuh:\d+ '?invalid argument",
        plain=True,
    ),
    _sign("oom_runtime", RUNTIME_OOM.pattern),
    _sign(
        "jit_build_failed",
        r"cannot find -l\w+",
        r"fatal error: [\w/.+-]+\.(?:h|hpp|cuh): No such file",
        r"cuda_fp8\.h",
        r"ninja: build stopped",
        r"Ninja is required",
        r"No such file or directory: '(?:ninja|nvcc|\S*/nvcc|gcc|g\+\+|cc|c\+\+)'",
        r"nvcc: (?:command )?not found|Could not find nvcc|nvcc fatal",
        r"CUDA_HOME environment variable is not set|CUDA_HOME is not set",
        r"Failed to find C compiler",
        r"Error building extension|Error compiling objects for extension",
        r"Command '\[?'?(?:\S*ninja|\S*nvcc|\S*gcc)",
        r"hipcc: (?:command )?not found",
    ),
    _sign(
        "kernel_unsupported_arch",
        r"no kernel image is available",
        r"fp8e4nv not supported",
        r"type fp8e4\w* not supported in this architecture",
        r"[Uu]nsupported (?:GPU )?arch(?:itecture)?\b(?!s? \[)",
        r"[Uu]nsupported (?:compute capability|SM version|gpu arch|device arch)",
        r"not supported (?:on|for) (?:this|your|the current) (?:GPU|architecture|device arch|compute)",
        r"[Rr]equires (?:a GPU with )?(?:compute capability|SM ?\d+|sm_?\d+|Hopper|Blackwell|Ampere)",
        r"on Ampere/Ada cards only supports",
        r"only support(?:s|ed on)? (?:SM|sm_|sm\d|Ampere|Hopper|Blackwell|compute capability|Hopper|GPUs with)",
        r"No kernel .{0,40}(?:for|on) (?:sm_?\d+|arch)",
        r"sm_\d+a? is not (?:supported|compatible)",
        r"Not supported on device with compute capability|compute capability .{0,30}(?:not supported|unsupported|too low)",
    ),
    _sign(
        "op_unsupported_on_device",
        r"does not support opType",
        r"Could not run '[\w:.]+' with arguments from the '\w+' backend",
        r"not (?:currently )?implemented for the '?(?:NPU|MPS|XPU|HPU|CPU|CUDA|PrivateUse1|MUSA)'? (?:device|backend)",
        r"not implemented for '(?:Half|BFloat16|Float8_e4m3fn|Float8_e5m2|Char|Byte)'",
        r"(?:operator|op) \S+ (?:is )?not supported (?:on|by) (?:npu|xpu|cpu|hip|musa)",
    ),
    _sign(
        "kernel_compile_error",
        r"CompilationError",
        r"PassManager::run failed",
        r"ptxas (?:fatal|error)|PTXASError|`ptxas` failed|ptxas exited",
        r"LLVM ERROR",
        r"OutOfResources: out of resource",
        r"NVRTC_ERROR|nvrtc: error|NVRTC compilation failed",
        r"BackendCompilerFailed|InductorError|TileLang.{0,30}[Cc]ompil",
    ),
    _sign(
        "quant_dtype_unsupported",
        r"is not supported for quantization method",
        r"is not supported for the current GPU\. Minimum capability",
        r"[Qq]uantization method .{0,60}(?:not supported|does not match|unsupported|Unknown)",
        r"Unknown quantization method|Invalid quantization method|Unsupported quantization",
        r"Cannot find the config file for \w+",
        r"not supported (?:with|by|for) (?:\w+ )?quantization",
        r"torch\.\w+ is not supported for",
        r"(?:weight_block_size|block_n|block_k|group_size) ?=? ?\S+ (?:is|not) .{0,40}(?:support|divisible)",
        r"[Uu]nsupported (?:kv[_ ]cache[_ ])?dtype",
    ),
    _sign(
        "tp_shape_mismatch",
        r"is not divisible by",
        r"not divisible by (?:tp|tensor)",
        r"must be divisible by",
        r"not a multiple of (?:tp|tensor|the)",
        r"(?:num_attention_heads|num_heads|num_kv_heads|vocab_size|hidden_size|intermediate_size) ?% ",
        r"size of tensor a \(\d+\) must match the size of tensor b \(\d+\) at .*(?:weight_loader|load)",
    ),
    _sign(
        "model_not_found",
        r"is not a local folder and is not a valid model identifier",
        r"Repo id must (?:be in the form|use alphanumeric)",
        r"Repository Not Found|RepositoryNotFoundError|GatedRepoError|Cannot access gated repo",
        r"401 Client Error|403 Client Error|404 Client Error",
        r"Can't load (?:the )?(?:tokenizer|configuration|config|model|processor|feature extractor)",
        r"Unrecognized model in ",
        r"config file at '[^']*' is not a valid JSON file",
        r"Cannot find any model weights with",  # model_loader/loader.py
        r"does not appear to have (?:a file named|files named) (?:config\.json|pytorch_model|model\.safetensors)",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|Cannot find the requested files in the (?:disk cache|local cache)",
        r"[Cc]ouldn't connect to 'https://huggingface\.co'",
        r"No such file or directory: '[^']*(?:config\.json|\.safetensors|\.index\.json|tokenizer[\w.]*)'",
        r"Model .{0,80}(?:does not exist|not found)",
        r"Can't find a vocabulary file|Error no file named",
    ),
    _sign(
        "port_in_use",
        r"\[Errno 98\] error while attempting to bind on address",
        r"error while attempting to bind on address .*already in use",
        r"Port is already in use\. dist_init_port=",  # server_args.py
        r"[Pp]ort \d+ is (?:used by a process already|already in use|not available in \d+ seconds)",
        r"is used by a process already\. process\.name\(\)=",  # utils/network.py
        r"engine_info_bootstrap_port \d+ is already in use",
        r"EADDRINUSE",
        r"[Aa]ddress already in use",
        plain=True,
    ),
    _sign(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout",
        r"ran for \d+ milliseconds before timing out",
        r"NCCL (?:operation|communicator).{0,40}timed out",
        r"Some NCCL operations have failed or timed out",
        plain=True,
    ),
    _sign(
        "dist_init_hang",
        r"Rank \d+ is NOT connected to: \[",
        r"Gloo connectFullMesh failed",
        r"(?:DistStoreError|DistNetworkError): Timed out after",
        r"Timed out after \d+ seconds waiting for clients",
        r"The client socket has timed out after",
        r"wait timeout after \d+ms, keys",
        r"failed to connect to .{0,80}(?:TCPStore|init_method|dist)",
        plain=True,
    ),
    _sign(
        "peer_lost",
        r"(?:TCPStore|ProcessGroup|[Gg]loo|NCCL|c10d|DistBackendError|socket\.cpp|pair\.cc).*"
        r"(?:Connection (?:reset|closed) by peer|Broken pipe|Connection refused)",
        r"Connection closed by peer \[",
        r"remote process exited or there was a network error",
        r"ncclRemoteError",
        plain=True,
    ),
    _sign(
        "kernel_crash",
        r"illegal memory access",
        r"unspecified launch failure",
        r"Failed to initialize the TMA descriptor",
        r"HSA_STATUS_ERROR",
        r"Memory access fault by GPU",
        r"device-side assert triggered",
        r"CUDA error: (?:misaligned address|an illegal instruction|invalid program counter|hardware stack error|unknown error)",
        r"CUBLAS_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_INTERNAL_ERROR",
        r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error)",
        r"Segmentation fault",
        r"CUDA error: unspecified",
        plain=True,
    ),
)
_PLAIN = tuple(s for s in SIGNATURES if s.plain)
# One search tells whether any plain signature can be in a line.
_ANY_PLAIN = re.compile("|".join(f"(?:{s.pattern.pattern})" for s in _PLAIN))
# uvicorn and torch name these at error level without a traceback; as plain lines they decide only together with a death.
_PLAIN_OOM = re.compile(r"torch\.(?:cuda\.)?OutOfMemoryError|(?:CUDA|HIP|NPU) out of memory")


def plain_sign(line: str) -> str | None:
    """The cause that a line outside tracebacks points to, if any."""
    if _ANY_PLAIN.search(line):
        for signature in _PLAIN:
            if signature.pattern.search(line):
                return signature.cause
    if _PLAIN_OOM.search(line):
        return "oom"
    return None


def message_sign(messages: str) -> str | None:
    """The cause that a traceback's exception messages point to: a class, "oom" (the phase decides which), or None."""
    best = None
    for signature in SIGNATURES:
        if signature.pattern.search(messages):
            best = signature.cause
            break
    if OUT_OF_MEMORY.search(messages) and best not in (
        "gpu_occupied",
        "kv_pool_too_small",
        "mamba_pool_too_small",
        "bad_arguments",
        "oom_runtime",
    ):
        return "oom"
    return best
