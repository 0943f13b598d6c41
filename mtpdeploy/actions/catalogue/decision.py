"""Verbs of the run store and of the decision: what was measured, what it means, what to run."""

from __future__ import annotations

from mtpdeploy.actions.verbs import HOST, INVENTORY, PROFILE, SET, Argument, Option, Verb

RUN = "Run id, a prefix of one, or `last`."
OF_HOST = Option("host", "Only runs on this host.")
OF_WORKLOAD = Option("workload", "Only runs under this workload.")

COMPARE = Verb(
    name="compare",
    summary="Two runs or two profiles side by side: what was not alike first, then a ratio with an interval.",
    action="mtpdeploy.actions.compare:compare",
    text="mtpdeploy.report.compare:text",
    arguments=(
        Argument("a", "The baseline: run id, `last`, RUN:ARM, several with commas, or a profile.", required=False),
        Argument("b", "What is compared with it. Left out: the two arms of run A.", required=False),
    ),
    options=(OF_HOST, OF_WORKLOAD, Option("seed", "Seed of the bootstrap.", type=int, default=0)),
    examples=(
        "mtpdeploy compare baseline mtp",
        "mtpdeploy compare 20261130-101500-3fa9 last",
        "mtpdeploy compare last            # a run with two arms (bench --arms baseline,mtp)",
        "mtpdeploy compare 20261130-10,20261130-12 mtp --json",
    ),
    details=(
        "Ratios are B over A. Prompts are paired and resampled, and so are the runs; the interval holds 95 %. "
        "Ends with 12 where the evidence does not decide."
    ),
)

RUNS = (
    Verb(
        name="runs",
        summary="What was measured and done from this home, newest first.",
        action="mtpdeploy.actions.runs:runs",
        text="mtpdeploy.report.runs:listed",
        options=(
            Option("kind", "Only this kind.", choices=("bench", "deploy", "campaign", "tune", "demo")),
            OF_HOST,
            Option("profile", "Only runs of this profile."),
            OF_WORKLOAD,
            Option("status", "Only this status.", choices=("running", "done", "failed", "interrupted", "unreadable")),
            Option("limit", "At most this many.", type=int, default=20),
        ),
        examples=("mtpdeploy runs", "mtpdeploy runs --kind bench --profile mtp --json"),
    ),
    Verb(
        name="runs.show",
        summary="One run: its conditions, figures and files.",
        action="mtpdeploy.actions.runs:show",
        text="mtpdeploy.report.runs:shown",
        arguments=(Argument("run", RUN),),
        examples=("mtpdeploy runs show last", "mtpdeploy runs show 20261130-1015 --json"),
    ),
    Verb(
        name="runs.report",
        summary="The report over one or more runs: one self-contained HTML page, or the same as Markdown or JSON.",
        action="mtpdeploy.actions.runs:report",
        text="mtpdeploy.report.runs:written",
        arguments=(Argument("run", RUN + " Several: a comparison of the first with the rest.", False, True),),
        options=(
            Option("format", "html, md or json: the same figures.", default="html", choices=("html", "md", "json")),
            Option(
                "output", "File to write. Default: report.html (.md, .json) in the last run's folder.", metavar="FILE"
            ),
        ),
        examples=(
            "mtpdeploy runs report last",
            "mtpdeploy runs report last --format md --output report.md",
            "mtpdeploy runs report 20261130-1015 20261130-1040 --output mtp.html",
        ),
    ),
    Verb(
        name="runs.export",
        summary="The figures of runs for other tools, on stdout or in a file.",
        action="mtpdeploy.actions.runs:export",
        text="mtpdeploy.report.runs:exported",
        arguments=(Argument("run", RUN, multiple=True),),
        options=(
            Option(
                "format",
                "md, csv, json and parquet (which needs pyarrow): a line a point; bench-serving: the rows of "
                "sglang.bench_serving; archive: the whole runs, for `runs import`.",
                default="json",
                choices=("md", "csv", "json", "bench-serving", "parquet", "archive"),
            ),
            Option("output", "File to write instead of stdout.", metavar="FILE"),
        ),
        examples=(
            "mtpdeploy runs export last --format csv > points.csv",
            "mtpdeploy runs export 20261130-1015 last --format archive --output runs.tar.gz",
        ),
    ),
    Verb(
        name="runs.import",
        summary="Takes in runs of another home: a run folder, a folder of such, or an archive.",
        action="mtpdeploy.actions.runs:import_",
        text="mtpdeploy.report.runs:imported",
        arguments=(Argument("source", "Folder or archive (.tar, .tar.gz, .zip).", multiple=True),),
        examples=("mtpdeploy runs import runs.tar.gz", "mtpdeploy runs import ~/other-home/runs/20261130-101500-3fa9"),
        details="What is not understood is refused whole, with file and reason. A run that is here already is passed over.",
    ),
    Verb(
        name="runs.delete",
        summary="Deletes run folders by their full ids.",
        action="mtpdeploy.actions.runs:delete",
        text="mtpdeploy.report.runs:deleted",
        arguments=(Argument("run", "Full run id.", multiple=True),),
        examples=("mtpdeploy runs delete 20261130-101500-3fa9",),
    ),
)

FRONTIER = Verb(
    name="frontier",
    summary="Speed for one user against speed of the GPU, for every profile and concurrency; where MTP stops paying.",
    action="mtpdeploy.actions.frontier:frontier",
    text="mtpdeploy.report.frontier:text",
    arguments=(Argument("run", "Runs or profiles. Default: all on the newest one's host and workload.", False, True),),
    options=(OF_HOST, OF_WORKLOAD, Option("baseline", "Profile that the others are compared with.")),
    examples=("mtpdeploy frontier", "mtpdeploy frontier baseline mtp mtp-throughput --json"),
)

RECOMMEND = Verb(
    name="recommend",
    summary="The profile for a workload, from what was measured: evidence, what it gives up, what would change it.",
    action="mtpdeploy.actions.recommend:recommend",
    text="mtpdeploy.report.recommend:text",
    options=(
        Option("host", "For this host. Default: the last deployed, else the newest benchmark's."),
        Option("workload", "interactive, batch, mixed, or a workload by name or file.", default="mixed"),
        Option("slo", "Objectives, such as ttft_p90_ms<500,tpot_p90_ms<20."),
        Option("rate", "Requests a second that must be served.", type=float),
        Option("baseline", "Profile that the others are compared with."),
        Option("measured_under", "Only benchmarks under this workload.", metavar="WORKLOAD"),
        Option("run", "Only these runs, repeatable; a campaign stands for its own.", multiple=True),
        Option(
            "figures",
            "Figures that somebody tells, in place of runs: ARM@CONCURRENCY=TOK_S and ARM.KEY=VALUE, such as "
            "'baseline@1=26.7 mtp@1=62..77 mtp@4=234 mtp.accept_length=3.2'. They decide nothing; what they leave open is said.",
        ),
        Option("file", "With --figures: the log of the launch that they are of.", metavar="LOG"),
        Option("sglang_version", "With --file: SGLang's version, where the log does not tell it."),
        Option("gpu_memory_gb", "With --file: memory of the GPU in GiB, where the log does not tell it.", type=float),
    ),
    examples=(
        "mtpdeploy recommend --workload interactive --slo 'ttft_p90_ms<500,tpot_p90_ms<20'",
        "mtpdeploy recommend --workload batch --host gpu1 --json",
        "mtpdeploy recommend --workload mixed --rate 2",
        "mtpdeploy recommend --file server.log --figures 'baseline@1=26.7 mtp@1=62..77 mtp@4=234 mtp.accept_length=3.2 "
        "mtp.accept_rate=0.84'",
    ),
    details=(
        "Rests on measurements of that host only; simulated ones speak for simulated hosts only. "
        "Ends with 12 where no measured profile meets the objectives."
    ),
)

MODEL = Verb(
    name="model",
    summary="Step time fitted to what was measured: how well it predicts settings not run, and what it predicts of them.",
    action="mtpdeploy.actions.model:model",
    text="mtpdeploy.report.model:text",
    arguments=(Argument("run", "Runs or profiles. Default: all on the newest one's host and GPU.", False, True),),
    options=(
        OF_HOST,
        OF_WORKLOAD,
        Option("measurements", "Fit to a file of measured loads instead, a line of JSON each.", metavar="FILE"),
        Option("profile", "Whose memory budget decides what fits. Default: the newest run's with MTP."),
        INVENTORY,
        SET,
        Option("space_", "What to predict, as for tune. Default: draft_steps=0,1,2,3,4 at the most requests that fit."),
        Option("concurrency", "Loads to predict, such as 1,4,16. Default: 1,4,8,16,32."),
        Option("input_tokens", "Of a predicted request. Default: the measured mean.", type=int),
        Option("output_tokens", "Of a predicted request. Default: the measured mean.", type=int),
        Option("gpu_memory_gb", "Memory of the GPU in GiB.", type=float),
        Option("available_gb", "Of it free before the load, in GiB.", type=float),
        Option("sglang_version", "Whose memory arithmetic holds."),
    ),
    examples=(
        "mtpdeploy model --host gpu1",
        "mtpdeploy model --profile mtp --gpu-memory-gb 95 --space 'draft_steps=1,2,3 state_dtype=float32,bfloat16'",
        "mtpdeploy model --measurements grid.jsonl --json",
    ),
    details=(
        "The error is of settings that the fit had not seen, one left out at a time; the intervals are 95 %. "
        "Combinations that the memory budget refuses are not predicted."
    ),
)

TUNE = Verb(
    name="tune",
    summary="Searches the best settings of a profile on its host, launch by launch, and writes them as a new profile.",
    action="mtpdeploy.actions.tune:tune",
    text="mtpdeploy.report.tune:text",
    options=(
        HOST,
        PROFILE,
        INVENTORY,
        SET,
        Option(
            "objective",
            "throughput (default): output tok/s of the best load; latency: tok/s of one user; mixed: both.",
            choices=("throughput", "latency", "mixed"),
        ),
        Option("slo", "Loads that break these objectives count for nothing, such as ttft_p90_ms<500,tpot_p90_ms<20."),
        Option("concurrency", "Loads to measure, such as 1,4,16. Default: the workload's, else 1,4,8,16."),
        Option("workload", "A named workload."),
        Option("requests", "Measured requests a load.", type=int),
        Option("output_tokens", "Cap of the answer, in tokens.", type=int),
        Option(
            "space_",
            "What to search, as FACTOR=LEVEL,LEVEL …: draft_steps, mamba_slots, running, mem_fraction, state_dtype, strategy, "
            "kv_dtype, radix, context, draft_model, chunked_prefill, graph_max_batch. Default: --dry-run shows it.",
        ),
        Option(
            "give_up",
            "What the profile has and the winner need not have, such as precision,prefix-reuse,context. Default: nothing.",
        ),
        Option("budget_launches", "At most so many launches (12); the confirmation is apart.", type=int),
        Option("budget_minutes", "No launch that would end after so many minutes of search.", type=float),
        Option("confirm", "Rounds of ABBA, profile against winner (1); 0: none.", type=int),
        Option(
            "leave", "What the host serves at the end: chosen (default) or original.", choices=("chosen", "original")
        ),
        Option("name", "Name of the new profile. Default: PROFILE-tuned."),
        Option("gpu_memory_gb", "Memory of the GPU in GiB, where the host does not tell.", type=float),
        Option("resume", "Goes on with a search that was broken off: its run id, or `last`.", metavar="RUN"),
        Option(
            "dry_run",
            "Says what would be searched, what is ruled out and why, and what would be launched first; launches nothing.",
            type=bool,
            default=False,
        ),
    ),
    examples=(
        "mtpdeploy tune --host gpu1 --profile mtp --objective throughput --dry-run",
        "mtpdeploy tune --host gpu1 --profile mtp --objective mixed --slo 'tpot_p90_ms<20' --budget-launches 8",
        "mtpdeploy tune --give-up precision --budget-launches 6 --budget-minutes 30",
        "mtpdeploy tune --space 'draft_steps=1,2,3 running=8,16 state_dtype=bfloat16'",
        "mtpdeploy tune --resume last",
    ),
    details=(
        "Settings that the memory budget or a launch rule refuses are never launched. A launch that dies is a result. "
        "Each launch is written down before the next one starts, so that --resume goes on after a kill."
    ),
)

CAMPAIGN = Verb(
    name="campaign",
    summary="The whole story unattended: doctor, plan, baseline and MTP deployed and measured in turns, compared, decided, reported.",
    action="mtpdeploy.actions.campaign:campaign",
    text="mtpdeploy.report.campaign:text",
    options=(
        HOST,
        Option("baseline", "Profile that the others are compared with.", default="baseline"),
        Option("profile", "Profile to compare with it, or several with commas.", default="mtp"),
        INVENTORY,
        SET,
        Option(
            "workload",
            "interactive, batch, mixed, or a workload by name or file: the load that is sent, and what is recommended for.",
        ),
        Option("concurrency", "Loads, such as 1,4,16. Default: the workload's, else 1,4,16."),
        Option("requests", "Measured requests a load.", type=int),
        Option("input_tokens", "Pad prompts to about so many tokens."),
        Option("output_tokens", "Cap of the answer, in tokens."),
        Option("prompts", "Shipped class (code, maths, chat, summary, long, structured), or mixed."),
        Option("order", "Order of the turns. Default: ABBA for two arms, there and back for more."),
        Option("repeat", "Turns of each arm. Default: as the order has it.", type=int),
        Option("slo", "Objectives, such as ttft_p90_ms<500,tpot_p90_ms<20."),
        Option("rate", "Requests a second that must be served.", type=float),
        Option("tune", "Search the best settings of the MTP profiles too, and measure them.", type=bool, default=False),
        Option(
            "tune_baseline", "Search those of the baseline as well, under the same budget.", type=bool, default=False
        ),
        Option("space_", "What to search; see `tune`."),
        Option("budget_launches", "At most so many launches a search.", type=int, default=12),
        Option("budget_minutes", "At most so many minutes a search.", type=float),
        Option(
            "leave",
            "How the host is left: with the recommended profile, with what it served before, or stopped.",
            default="chosen",
            choices=("chosen", "original", "stopped"),
        ),
        Option("resume", "Goes on with a campaign that was broken off: its run id, or `last`.", metavar="RUN"),
        Option("fresh", "Begin anew, even where the same campaign was broken off today.", type=bool, default=False),
        Option("dry_run", "Says the steps; touches nothing.", type=bool, default=False),
    ),
    examples=(
        "mtpdeploy campaign --host gpu1",
        "mtpdeploy campaign --host gpu1 --workload interactive --slo 'ttft_p90_ms<500,tpot_p90_ms<20' --leave original",
        "mtpdeploy campaign --host gpu1 --tune --budget-launches 8",
        "mtpdeploy campaign --host gpu1 --dry-run",
        "mtpdeploy campaign --resume last",
    ),
    details=(
        "Each step is written down before the next one begins: after a kill, a cut line or a reboot the same command goes on, and "
        "what was measured is not measured again. An arm that does not start, or dies under its load, is a result with its cause, and "
        "the campaign goes on. Ends with 12 where the evidence does not decide."
    ),
)

VERBS: tuple[Verb, ...] = (COMPARE, *RUNS, FRONTIER, RECOMMEND, MODEL, TUNE, CAMPAIGN)
