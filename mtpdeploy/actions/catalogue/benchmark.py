"""The benchmark's verbs."""

from __future__ import annotations

from mtpdeploy.actions.verbs import HOST, INVENTORY, PROFILE, SET, Argument, Option, Verb

BENCH = Verb(
    name="bench",
    summary="Measure a server: time to first token, time per token, throughput, acceptance; tokens, not chunks.",
    action="mtpdeploy.actions.bench:bench",
    text="mtpdeploy.report.bench:text",
    options=(
        HOST,
        PROFILE,
        INVENTORY,
        SET,
        Option("url", "Any endpoint instead of a host: SGLang, vLLM or another OpenAI-compatible server."),
        Option("model", "The model's name at the endpoint. Default: the one that it serves."),
        Option(
            "api",
            "Route. Default: SGLang's own with the model's chat template, else chat completions.",
            choices=("sglang", "openai-chat", "openai"),
        ),
        Option("api_key_env", "Name of the environment variable that holds the endpoint's API key.", metavar="VAR"),
        Option(
            "from_",
            "Where the client runs: `host` (beside the server), `here` (through a tunnel), or another host of the inventory, "
            "over the network between the two.",
            default="host",
            metavar="host|here|HOST",
        ),
        Option("workload", "A named workload, such as story, interactive, batch; options below win over it."),
        Option(
            "concurrency",
            "Closed loop: requests in flight, such as 1,2,4 or 1..16. Default: 1 and the effective maximum.",
        ),
        Option("rate", "Open loop: requests per second, such as 0.5,1,2."),
        Option(
            "arrivals",
            "Open loop: how the gaps are drawn.",
            default="poisson",
            choices=("poisson", "constant", "gamma", "ramp", "step"),
        ),
        Option(
            "trace", "Open loop: send at the times of this file (seconds a line, or JSON lines with timestamp in ms)."
        ),
        Option(
            "max_concurrency",
            "Open loop: at most this many in flight; the result is then a capped open loop.",
            type=int,
        ),
        Option(
            "requests", "Measured requests a point, exactly. Default: 16, or twice the concurrency if more.", type=int
        ),
        Option("repeat", "Measure every point so many times.", type=int),
        Option("input_tokens", "Pad prompts to about so many tokens, such as 512 or 512,4096.", type=str),
        Option("output_tokens", "Cap of the answer, in tokens, such as 256 or 128,1024.", type=str),
        Option(
            "ignore_eos",
            "Always generate up to the cap. Past the natural end acceptance is not real work's.",
            type=bool,
            default=False,
        ),
        Option("prompts", "Shipped class (code, maths, chat, summary, long, structured), mixed, or random."),
        Option("dataset", "Your own prompts: JSON lines with OpenAI messages, ShareGPT conversations or prompt."),
        Option("seed", "Seed of prompts and arrivals.", type=int),
        Option("temperature", "Sampling temperature.", type=float),
        Option(
            "prefix_cache",
            "`salt` makes every prompt new to the prefix cache; `keep` sends them as they are.",
            default="salt",
            choices=("salt", "keep"),
        ),
        Option(
            "sweep",
            "concurrency=1,2,4 | rate=1,2 | input=512,4096 | output=128,1024; stops at saturation.",
            multiple=True,
        ),
        Option("slo", "Objectives for goodput, such as ttft_p90_ms<500,tpot_p90_ms<20."),
        Option("find", "Search the highest load that keeps --slo.", choices=("max-goodput",)),
        Option("arms", "Profiles that take turns on one host, such as baseline,mtp; each turn deploys."),
        Option("order", "Order of the turns, such as ABBA.", default="ABBA"),
        Option(
            "client_processes",
            "Client processes that share the load, one core each. Default: by the load, at most half of the cores.",
            type=int,
        ),
        Option("timeout", "Seconds without a byte after which a request has failed.", type=float, default=600.0),
        Option("attach", "Follow a benchmark that goes on at the host after the line was cut: its run id."),
    ),
    examples=(
        "mtpdeploy bench",
        "mtpdeploy bench --host gpu1 --workload story",
        "mtpdeploy bench --url http://127.0.0.1:30000 --model qwen3.6-27b --concurrency 4 --requests 8 --output-tokens 1024",
        "mtpdeploy bench --host gpu1 --from cpu2 --rate 4",
        "mtpdeploy bench --host gpu1 --arms baseline,mtp --concurrency 1,4 --repeat 3",
        "mtpdeploy bench --sweep rate=0.5,1,2,4 --slo 'ttft_p90_ms<500,tpot_p90_ms<20'",
    ),
    details=(
        "Raw records of every request are stored in runs/<id>/ and `report` computes every figure again from them. docs/metrics.md "
        "has the formulas. Ends with 13 if a point broke a rule that makes its numbers meaningless; the answer says which."
    ),
)

REPORT = Verb(
    name="report",
    summary="A benchmark's figures, computed again from its raw records; needs no server.",
    action="mtpdeploy.actions.report:report",
    text="mtpdeploy.report.bench:text",
    arguments=(Argument("run", "Run id, a prefix of one, or `last`.", required=False),),
    options=(Option("slo", "Objectives for goodput, such as ttft_p90_ms<500,tpot_p90_ms<20."),),
    examples=("mtpdeploy report last", "mtpdeploy report 20261130-101500-3fa9 --slo 'tpot_p90_ms<20' --json"),
)

VERBS: tuple[Verb, ...] = (BENCH, REPORT)
