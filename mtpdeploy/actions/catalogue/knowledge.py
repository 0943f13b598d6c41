"""What is true of a server that runs."""

from __future__ import annotations

from mtpdeploy.actions.verbs import HOST, INVENTORY, PROFILE, SET, Option, Verb

# What `logs` takes beside the options of a live log.
LOG_FILE: tuple[Option, ...] = (
    Option(
        "file",
        "Read this log instead of a host's: a file (.gz and .zst too) or - for stdin.",
        multiple=True,
        metavar="FILE",
    ),
    Option(
        "series",
        "With --file: the decode records as a time series instead of a summary.",
        choices=("csv", "json", "plot"),
    ),
)

VERBS = (
    Verb(
        "verify",
        "Prove that what runs is what was asked for: arguments, capacity, acceptance, freshness.",
        "mtpdeploy.actions.verify:verify",
        "mtpdeploy.report.verify:text",
        options=(
            HOST,
            PROFILE,
            INVENTORY,
            SET,
            Option(
                "file",
                "Verify from a log file that lies here (.gz, .zst, - for stdin); no host is asked.",
                metavar="FILE",
            ),
            Option(
                "command",
                "What was asked for, as an SGLang command line in quotes, instead of a profile.",
                metavar="CMD",
            ),
            Option("sglang_version", "SGLang's version, where the server does not say it, such as 0.5.17."),
            Option(
                "model_config",
                "A model's config.json, or its folder, for suggestions by the memory budget.",
                metavar="FILE",
            ),
            Option("gpu_memory_gb", "Total memory of one GPU, GiB, where neither host nor log tells it.", type=float),
            Option("want_concurrency", "Concurrency to suggest settings for.", type=int),
        ),
        examples=(
            "mtpdeploy verify --host gpu1",
            "mtpdeploy verify --host gpu1 --profile mtp --json",
            "mtpdeploy verify --file server.log --profile mtp",
            "mtpdeploy verify --file server.log --command 'python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B'",
        ),
        details=(
            "Without --profile or --command the request is what the host's own record of the launch says. Each argument is same, rewritten "
            "(by SGLang, with the rule), ignored, stale (the process was started by another command) or unknown. "
            "Exit code 0: same; 11: differs; 12: cannot tell."
        ),
    ),
)
