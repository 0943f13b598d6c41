"""The load from one real host to a server at another: its own Python, the network between, and the launch proven from here."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mtpdeploy.inventory.values import Simulate
from tests.lab.doors import Doors
from tests.lab.lab import Lab, Person

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

PLAYED = Simulate(clock=200)
KEY = "k-5e5a3e-between-hosts"


@pytest.fixture(scope="module")
def person(lab: Lab, doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """gpu1 serves and wants a key; cpu2 sends."""
    somebody = Person(tmp_path_factory.mktemp("home"), doors)
    (somebody.home / "key").write_text(KEY)
    key = {"api_key": {"from_file": str(somebody.home / "key")}, "service": "between"}
    somebody.knows(
        {
            "gpu1": lab.host("mtph1", "deploy", PLAYED, args={"port": 30077}, **key),
            "cpu2": lab.host("mtph2", "ops", PLAYED),
        }
    )
    yield somebody
    somebody.run("stop", "--host", "gpu1", code=None)


def test_another_host_sends_the_load_and_the_launch_is_proven_from_here(lab: Lab, person: Person) -> None:
    deployed = person.ask("deploy", "--host", "gpu1", "--profile", "mtp", "--set", "args.host=0.0.0.0")
    load = (
        "bench",
        "--host",
        "gpu1",
        "--from",
        "cpu2",
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--output-tokens",
        "32",
    )
    answer = person.ask(*load, code=None)
    (point,) = answer["points"]
    assert (point["completed"], point["failed"]) == (4, 0)
    told = answer["provenance"]
    assert (told["client_place"], told["launch_id"]) == ("cpu2", deployed["launch_id"])
    assert told["versions"]["sglang"] == told["sglang_version"]
    folder = person.home / "runs" / answer["run_id"]
    (facts,) = (json.loads(line) for line in (folder / "measured.jsonl").read_text().splitlines())
    for side in ("server_before", "server_after"):
        assert facts[side]["launch_id"] == deployed["launch_id"]
        assert facts[side]["pid"]
    assert lab.at("mtph2", "ls -A /home/ops/.mtpdeploy/bench") == ""  # nothing stays where it was sent from
    assert not [path for path in folder.iterdir() if KEY in path.read_text()]
