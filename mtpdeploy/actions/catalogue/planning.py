"""What would be done, before it is done."""

from __future__ import annotations

from mtpdeploy.actions.verbs import INVENTORY, PROFILE, SET, Argument, Option, Verb

VERBS = (
    Verb(
        "plan",
        "Show what a deploy would do and cost: command, files, steps, memory, what would kill it. Touches nothing.",
        "mtpdeploy.actions.plan:plan",
        "mtpdeploy.report.plan:text",
        options=(
            Option("host", "Host, group or comma list to plan for; may be left out when the GPU's memory is given."),
            PROFILE,
            INVENTORY,
            SET,
            Option(
                "command",
                "An SGLang command line to plan as it stands, environment assignments included, in quotes.",
                metavar="CMD",
            ),
            Option("gpu_memory_gb", "Total memory of one GPU, GiB, as nvidia-smi reports it.", type=float),
            Option(
                "available_gb",
                "Free memory just before the weights load, GiB (the log's 'Load weight begin. avail mem').",
                type=float,
            ),
            Option("model_config", "A model's config.json, or its folder; overrides the model path.", metavar="FILE"),
            Option("sglang_version", "SGLang's version, such as 0.5.17; default: what is known of the host."),
            Option("want_concurrency", "Find the flags that let this many requests run at once.", type=int),
            Option("tokens_per_request", "With it: tokens of prompt and output that each of them needs.", type=int),
        ),
        examples=(
            "mtpdeploy plan --profile mtp --host gpu1",
            "mtpdeploy plan --profile mtp --gpu-memory-gb 96 --sglang-version 0.5.17",
            "mtpdeploy plan --profile mtp --gpu-memory-gb 96 --want-concurrency 16 --tokens-per-request 8192",
            "mtpdeploy plan --gpu-memory-gb 80 --command 'python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B'",
        ),
        details=(
            "No connection is opened. SGLang's version is taken from --sglang-version, what was last read from the host, "
            "or the inventory; otherwise it is assumed, and the plan says so. Exit code 4: this would not start."
        ),
    ),
    Verb(
        "profiles.import",
        "Make a profile of the command line of a server that runs already.",
        "mtpdeploy.actions.adopt_command:import_command",
        "mtpdeploy.report.adopt_command:text",
        options=(
            Option("command", "The SGLang command line, environment assignments included, in quotes.", metavar="CMD"),
            Option("sglang_version", "The SGLang that it is written for; default: the newest in the table."),
            Option("force", "Replace a profile of that name.", type=bool, default=False),
        ),
        arguments=(Argument("name", "Name of the profile."),),
        examples=(
            "mtpdeploy profiles import mine --command 'python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --tp 2'",
        ),
        details="Names become canonical, abbreviations full. Secrets are not written: they are read from the environment.",
    ),
)
