"""The long and repeated forms of the fault rows, on real hosts: needs root and what `make host-packages` installs.

    python bench/faults.py follow                    # 20 cuts of the line during 100,000 followed lines, compared byte by byte
    python bench/faults.py kill --rounds 30          # a deploy's client killed at random moments, the order looked at after each
    python bench/faults.py cut --rounds 10           # the cable pulled at random moments of a deploy, and plugged in again
    python bench/faults.py reboot --rounds 5         # the host rebooted at random moments of a deploy

Prints what held and the seconds; exits 1 at the first thing that did not. `--seed` repeats a run. The hosts are simulated in their
engine only, so nothing here is a claim about SGLang.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors
from tests.lab.faults import Row, disorder, in_order, look, until
from tests.lab.following import follow_through_cuts
from tests.lab.lab import Lab, Person, script

HOST, NAME, WORKDIR = "gpu1", "mtph1", "/home/ops/.mtpdeploy"


def follow(lab: Lab, person: Person, rounds: int, chance: random.Random) -> str:
    written = follow_through_cuts(lab, person, HOST, NAME, WORKDIR, lines=100_000, cuts=20)
    return f"20 cuts during 100,000 lines: {written:,} bytes, each once and in order"


def _struck(
    person: Person, lab: Lab, rounds: int, chance: random.Random, strike: Callable[[], None], mend: Callable[[], None]
) -> None:
    """`rounds` deploys, each struck at a random moment; the order is looked at after each."""
    for number in range(rounds):
        deploy = person.start("deploy", "--host", HOST, "--profile", ("baseline", "mtp")[number % 2], "--force")
        moment = chance.uniform(0.05, 6.0)
        time.sleep(moment)
        if strike is kill_client:
            deploy.kill()
        else:
            strike()
            mend()
            deploy.wait(120)
        until(
            lambda: not disorder(look(lab, NAME, WORKDIR)), f"in order after {moment:.2f} s of round {number}", 60, 0.3
        )
        print(f"round {number}: struck after {moment:.2f} s, in order", file=sys.stderr)


def kill_client() -> None:
    """What `_struck` does with the client itself."""


def kill(lab: Lab, person: Person, rounds: int, chance: random.Random) -> str:
    _struck(person, lab, rounds, chance, kill_client, kill_client)
    return f"the client killed at {rounds} random moments of a deploy: the old or the new, never two, nothing half"


def cut(lab: Lab, person: Person, rounds: int, chance: random.Random) -> str:
    def mend() -> None:
        time.sleep(chance.uniform(0.5, 8.0))
        script("heal", NAME)

    _struck(person, lab, rounds, chance, lambda: script("cut", NAME), mend)
    return f"the cable pulled at {rounds} random moments of a deploy, for up to 8 s"


def reboot(lab: Lab, person: Person, rounds: int, chance: random.Random) -> str:
    _struck(person, lab, rounds, chance, lambda: script("reboot", NAME), lambda: None)
    return f"the host rebooted at {rounds} random moments of a deploy"


FORMS = {"follow": follow, "kill": kill, "cut": cut, "reboot": reboot}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", nargs="*", choices=[*FORMS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    lab, doors = Lab.up(1), Doors()
    try:
        with tempfile.TemporaryDirectory() as folder:
            person = Person(Path(folder), doors)
            person.knows({HOST: lab.host(NAME, "ops", Simulate(clock=40), supervisor="systemd")})
            for form in asked.form or FORMS:
                began = time.monotonic()
                person.run("deploy", "--host", HOST, "--profile", "mtp")
                said = FORMS[form](lab, person, asked.rounds, random.Random(asked.seed))
                row = Row(form, said, form)
                in_order(lab, person, HOST, NAME, WORKDIR, row)
                print(f"{form}: {said}; then the next deploy works ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        doors.close()
        lab.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
