"""`bench --arms A,B`: profiles take turns on one host, so that a drift of the day falls on both alike."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpdeploy.actions import serverlog
from mtpdeploy.actions.bench import Keeper, Wish
from mtpdeploy.actions.benchhost import take_all
from mtpdeploy.actions.benchservice import Service, remote_name, running, start
from mtpdeploy.actions.reach import agent, targets
from mtpdeploy.actions.report import BenchAnswer
from mtpdeploy.bench import load
from mtpdeploy.bench.values import PointSpec
from mtpdeploy.bench.wire import dump
from mtpdeploy.errors import MtpError, RemoteError, UsageError
from mtpdeploy.hosts.fanout import Outcomes
from mtpdeploy.progress import Talk

DEFAULT_LOADS = (1, 4)  # arms have different limits: the same load for all must be fixed before


def by_turns(
    home: Path,
    talk: Talk,
    wish: Wish,
    arms: str,
    order: str,
    *,
    host: str | None,
    inventory: Sequence[str],
    sets: Sequence[str],
    repeat: int | None,
) -> BenchAnswer:
    """Deploys and measures one arm after the other, all in one run. Raises what deploy raises; what was measured stays."""
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    plan = turns(names, order, repeat)
    found = targets(home, host, inventory, sets=sets)
    if len(found) != 1:
        raise UsageError(
            f"--arms takes turns on one host, and --host means {len(found)}: {', '.join(one.name for one in found)}"
        )
    where = found[0].name
    asked = wish.asked
    if not (asked.concurrency or asked.rate or asked.trace):
        asked = replace(asked, concurrency=DEFAULT_LOADS)
    points = _points(asked, plan)
    # Every launch begins with an empty cache, so the arms' requests can be the same to the byte, salt included.
    wish = replace(wish, spec=replace(wish.spec, nonce=secrets.token_hex(3)))
    whole = replace(wish.spec, points=tuple(point for turn in points for point in turn))
    keeper = Keeper(home, talk, wish, asked, whole, {"host": where, "profile": " / ".join(names)}, {"host": where})
    try:
        for place, (name, turn) in enumerate(zip(plan, points, strict=True), 1):
            if keeper.halt.asked:
                break
            talk.note(f"turn {place} of {len(plan)}: {name}")
            _turn(home, talk, wish, keeper, name, turn, where, inventory, sets)
    except BaseException as exc:
        keeper.fail(type(exc).__name__, exc.message if isinstance(exc, MtpError) else str(exc))
        raise
    return keeper.finish(unlike=True)


def turns(names: Sequence[str], order: str, repeat: int | None) -> tuple[str, ...]:
    """`ABBA` for (baseline, mtp): baseline, mtp, mtp, baseline. With `repeat` the pattern goes on until each had so many.

    UsageError for a letter without an arm, an arm without a letter, or one arm only.
    """
    letters = {chr(ord("A") + place): name for place, name in enumerate(names)}
    if len(names) < 2 or len(set(names)) != len(names):
        raise UsageError("--arms wants two profiles or more, each once, such as --arms baseline,mtp")
    pattern = order.strip().upper()
    if set(pattern) != set(letters):
        raise UsageError(f"--order {order}: should use each of {', '.join(letters)} and nothing else, such as ABBA")
    if repeat is None:
        return tuple(letters[letter] for letter in pattern)
    made: list[str] = []
    for letter in itertools.cycle(pattern):
        if len(made) == repeat * len(names):
            break
        if made.count(letters[letter]) < repeat:
            made.append(letters[letter])
    return tuple(made)


def _points(asked: load.Asked, plan: Sequence[str]) -> list[tuple[PointSpec, ...]]:
    """The points of every turn. A turn is one repeat of its arm, and repeat n of any arm sends what n of the others sends."""
    made: list[tuple[PointSpec, ...]] = []
    first = 0
    for place, name in enumerate(plan):
        try:
            turn = load.points(asked, arm=name, first=first, repeat=plan[:place].count(name))
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
        made.append(turn)
        first += len(turn)
    return made


def _turn(
    home: Path,
    talk: Talk,
    wish: Wish,
    keeper: Keeper,
    name: str,
    points: tuple[PointSpec, ...],
    where: str,
    inventory: Sequence[str],
    sets: Sequence[str],
) -> None:
    from mtpdeploy.actions.deploy import deploy

    deployed = deploy(home=home, talk=talk, host=where, profile=name, inventory=inventory, set_=sets)
    if isinstance(deployed, Outcomes):
        raise UsageError(f"--host {where} means several hosts")
    (target,) = targets(home, where, inventory, profile=name, sets=sets)
    with agent(target) as client:
        service = running(talk, target, client)
        spec = service.spec(replace(wish.spec, points=points))
        remote = remote_name()
        keeper.begin(service.server, remote)
        keeper.arm(name, _facts(service))
        take_all(client, keeper, start(service, dump(spec), remote))
        with contextlib.suppress(RemoteError):  # the figures stand without it
            serverlog.keep(client, keeper.made, name)


def _facts(service: Service) -> Mapping[str, Any]:
    """What differs from arm to arm, beside the run's common conditions."""
    server = service.server
    return {
        **service.provenance,
        "profile": service.target.profile,
        "client_place": "host",
        "capacity": {
            "max_running_requests": server.get("effective_max_running_requests"),
            "slots": server.get("max_mamba_cache_size"),
            "kv_tokens": server.get("kv_tokens"),
        },
    }
