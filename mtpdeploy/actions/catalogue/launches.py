"""The launches' verbs."""

from __future__ import annotations

from mtpdeploy.actions.catalogue.knowledge import LOG_FILE
from mtpdeploy.actions.verbs import HOST, INVENTORY, PROFILE, SET, Option, Verb

SUDO = Option(
    "ask_sudo", "Ask once for the sudo password of the host(s); it is stored nowhere.", type=bool, default=False
)
NO_WAIT = Option(
    "no_wait", "Return when the server was started, without waiting until it is ready.", type=bool, default=False
)
ABORT = Option("abort_requests", "Abort running requests instead of draining them.", type=bool, default=False)
LAUNCH = Option("launch", "A launch by its id, or the beginning of it. Default: the current one.", metavar="ID")

VERBS = (
    Verb(
        "deploy",
        "Start a profile on a host and prove that it is ours, fresh and ready.",
        "mtpdeploy.actions.deploy:deploy",
        "mtpdeploy.report.launches:deployed",
        options=(
            HOST,
            PROFILE,
            INVENTORY,
            SET,
            Option("dry_run", "Show what would be done; no connection is opened.", type=bool, default=False),
            Option("force", "Start anew although the same runs and is ready.", type=bool, default=False),
            NO_WAIT,
            Option(
                "supervisor",
                "What keeps the server alive.",
                choices=("auto", "systemd", "systemd-user", "tmux", "detached"),
            ),
            Option("sglang_version", "SGLang's version at the host, if it is not to be asked, such as 0.5.17."),
            Option("ready_timeout", "Give up when the log was silent for so many seconds.", type=float),
            Option("drain_timeout", "Let the old server drain for at most so many seconds.", type=float),
            ABORT,
            Option(
                "skip_preflight", "Start although the preflight found something against it.", type=bool, default=False
            ),
            Option(
                "rollback_on_failure",
                "If the new launch fails, start the previous good one again.",
                type=bool,
                default=False,
            ),
            Option("keep", "Remove older releases and keep so many; 0 removes none.", type=int, default=0),
            SUDO,
        ),
        examples=(
            "mtpdeploy deploy --host gpu1 --profile mtp",
            "mtpdeploy deploy --host gpu1 --profile mtp --set args.max_mamba_cache_size=40 --set args.max_running_requests=8",
            "mtpdeploy deploy --host gpu1 --profile mtp --dry-run",
            "mtpdeploy deploy --host gpu1 --profile mtp --rollback-on-failure",
        ),
        details=(
            "An equal command, environment and SGLang that is ready already is left alone. The old server is stopped only when the "
            "preflight found nothing against the new one. Ends with 8 if the launch died, 9 if it went silent, 4 if it was refused."
        ),
    ),
    Verb(
        "status",
        "What runs, whose it is, and how it fares.",
        "mtpdeploy.actions.launches:status",
        "mtpdeploy.report.launches:status",
        options=(
            HOST,
            INVENTORY,
            Option(
                "proof", "Print each link between what answers on the port and the launch.", type=bool, default=False
            ),
            Option("generate", "Generate a token too.", type=bool, default=False),
            Option(
                "check",
                "Exit code by the state: 0 ready, 9 starting, 8 degraded or crashed, 10 stale, 12 unknown, 14 none.",
                type=bool,
                default=False,
            ),
        ),
        examples=("mtpdeploy status", "mtpdeploy status --host gpus --proof", "mtpdeploy status --check --quiet"),
        details=(
            "not deployed, starting (phase), ready, degraded (why), stopped, crashed (cause), stale (something else answers: who), "
            "unknown (why)."
        ),
    ),
    Verb(
        "logs",
        "A server's log: live from hosts, or a file that lies here, read as SGLang's.",
        "mtpdeploy.actions.logs:logs",
        "mtpdeploy.report.logfile:text",
        options=(
            HOST,
            INVENTORY,
            Option("follow", "Go on as the log grows; takes up a cut line where it was.", type=bool, default=False),
            Option("lines", "Begin so many lines before the end.", type=int, default=100),
            Option("since", "Only lines since then: 10m, 2h, or a UTC time.", metavar="WHEN"),
            Option("grep", "Only lines in which this regular expression is found.", metavar="REGEX"),
            Option(
                "level_guess",
                "Only lines that look like this level or worse, tracebacks whole; SGLang's lines name none, so it is guessed.",
                choices=("info", "warning", "error"),
            ),
            LAUNCH,
            Option("events", "What the lines mean instead of the lines.", type=bool, default=False),
            *LOG_FILE,
        ),
        examples=(
            "mtpdeploy logs --follow",
            "mtpdeploy logs --host gpu1,gpu2 --follow --grep 'Decode batch'",
            "mtpdeploy logs --since 2h --level-guess warning",
            "mtpdeploy logs --launch 20260131T --lines 1000",
            "mtpdeploy logs --file server.log --json",
        ),
        details=(
            "Several hosts are one stream, ordered by the lines' own times. With --json each line is one JSON document {host, "
            "launch_id, boot, line}; with --file the log's summary is."
        ),
        streams=True,
    ),
    Verb(
        "stop",
        "Drain and stop; ends when no process is left, the port is free and GPU memory is back.",
        "mtpdeploy.actions.launches:stop",
        "mtpdeploy.report.launches:text",
        options=(
            HOST,
            INVENTORY,
            LAUNCH,
            Option("drain_timeout", "Let running requests finish for at most so many seconds.", type=float),
            ABORT,
            Option("why", "Recorded with the stop.", default="asked for"),
            SUDO,
        ),
        examples=(
            "mtpdeploy stop",
            "mtpdeploy stop --host gpu1 --drain-timeout 300",
            "mtpdeploy stop --abort-requests",
        ),
        details="Only processes of the recorded launch are signalled, by pid, start time and boot id. Ends with 6 if one is left.",
    ),
    Verb(
        "start",
        "Start the current launch again, as its next boot.",
        "mtpdeploy.actions.launches:start",
        "mtpdeploy.report.launches:text",
        options=(HOST, INVENTORY, LAUNCH, NO_WAIT, SUDO),
        examples=("mtpdeploy start", "mtpdeploy start --launch 20260131T120000Z-1a2b3c"),
    ),
    Verb(
        "restart",
        "Stop and start the current launch.",
        "mtpdeploy.actions.launches:restart",
        "mtpdeploy.report.launches:text",
        options=(HOST, INVENTORY, NO_WAIT, ABORT, SUDO),
        examples=("mtpdeploy restart --host gpu1",),
    ),
    Verb(
        "rollback",
        "Start the newest earlier launch that was once ready.",
        "mtpdeploy.actions.launches:rollback",
        "mtpdeploy.report.launches:text",
        options=(HOST, INVENTORY, LAUNCH, NO_WAIT, ABORT, SUDO),
        examples=("mtpdeploy rollback", "mtpdeploy rollback --launch 20260131T120000Z-1a2b3c"),
    ),
    Verb(
        "history",
        "The launches of a service, newest first, and what became of each.",
        "mtpdeploy.actions.launches:history",
        "mtpdeploy.report.launches:text",
        options=(
            HOST,
            INVENTORY,
            Option("journal", "Every act on the service too: who, when, why.", type=bool, default=False),
        ),
        examples=("mtpdeploy history", "mtpdeploy history --journal --json"),
    ),
    Verb(
        "prune",
        "Remove old releases; never the current, a running one, or the last that served.",
        "mtpdeploy.actions.launches:prune",
        "mtpdeploy.report.launches:text",
        options=(
            HOST,
            INVENTORY,
            Option("keep", "Keep the newest so many.", type=int, default=5),
            Option("dry_run", "Only say which.", type=bool, default=False),
        ),
        examples=("mtpdeploy prune --keep 3", "mtpdeploy prune --dry-run"),
    ),
    Verb(
        "adopt",
        "Take over a server that somebody else started; it is not touched.",
        "mtpdeploy.actions.launches:adopt",
        "mtpdeploy.report.launches:text",
        options=(
            HOST,
            INVENTORY,
            Option("port", "The port that it listens on.", type=int, default=30000),
            Option("pid", "Only if this process holds the port.", type=int),
            Option("log", "Its log file at the host. Default: where its output goes.", metavar="FILE"),
        ),
        examples=("mtpdeploy adopt --host gpu1 --port 30000",),
        details="Afterwards status, logs and stop know it. How it was started is not repeated: start and restart refuse.",
    ),
    Verb(
        "unlock",
        "Remove a lock that an interrupted change left behind.",
        "mtpdeploy.actions.launches:unlock",
        "mtpdeploy.report.launches:text",
        options=(HOST, INVENTORY, Option("break_lock", "Also if its holder lives.", type=bool, default=False)),
        examples=("mtpdeploy unlock --host gpu1", "mtpdeploy unlock --host gpu1 --break-lock"),
    ),
    Verb(
        "doctor",
        "Find what would make a launch fail: what, why it matters, what to type.",
        "mtpdeploy.actions.doctor:doctor",
        "mtpdeploy.report.launches:doctor",
        options=(HOST, PROFILE, INVENTORY, SET),
        examples=("mtpdeploy doctor --host gpu1", "mtpdeploy doctor --host gpu1 --profile mtp"),
        details="Ends with 4 if a deploy would be refused.",
    ),
    Verb(
        "tunnel",
        "A host's server port on this machine, for as long as it runs.",
        "mtpdeploy.actions.tunnel:tunnel",
        "mtpdeploy.report.launches:text",
        options=(HOST, INVENTORY, Option("port", "The port at the host. Default: the service's.", type=int)),
        examples=("mtpdeploy tunnel --host gpu1",),
        streams=True,
    ),
)
