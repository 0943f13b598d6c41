"""A log that grows while it is followed and the line is cut again and again; what came is compared byte by byte."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from signal import SIGINT

from tests.lab.faults import until
from tests.lab.lab import Lab, Person, script


def follow_through_cuts(lab: Lab, person: Person, host: str, name: str, workdir: str, *, lines: int, cuts: int) -> int:
    """Follows a log that grows while the line is cut again and again; the bytes compared."""
    person.run("deploy", "--host", host, "--profile", "mtp")
    log = lab.at(name, f"readlink -f {workdir}/sglang/current/server.log").strip()
    follow = person.start("logs", "--host", host, "--follow", "--lines", "0")
    writer = (
        "import sys, time\n"
        f"with open({log!r}, 'a', buffering=1) as log:\n"
        f"    for n in range({lines}):\n"
        "        log.write(f'line {n:06d} ' + 'x' * (n % 97) + '\\n')\n"
        "        if n % 200 == 199: time.sleep(float(sys.argv[1]))\n"
        "    log.write('the last line\\n')\n"
    )
    time.sleep(1.5)
    seconds = max(4.0, cuts * 1.5)
    lab.at(
        name,
        shlex.join(
            [
                "systemd-run",
                "--quiet",
                "--collect",
                f"--uid={Path(workdir).parent.name}",
                "python3",
                "-c",
                writer,
                str(seconds * 200 / lines),
            ]
        ),
    )
    for number in range(cuts):
        time.sleep(seconds / cuts * 0.7)
        if number % 6 == 5:
            script("cut", name)
            time.sleep(5)
            script("heal", name)
        else:
            lab.at(name, "pkill -KILL -f '^sshd: .*' || true")
    until(lambda: "the last line\n" in follow.out, "the last line", 90)
    follow.signal(SIGINT)
    follow.wait(20)
    got, there = follow.out, lab.at(name, f"cat {log}")
    begin, end = there.index("line 000000 "), there.index("the last line\n") + len("the last line\n")
    assert there[begin:end].count("\nline ") == lines - 1
    assert got[got.index("line 000000 ") :][: end - begin] == there[begin:end]
    return end - begin
