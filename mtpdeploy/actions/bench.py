"""`bench`: decide the load, have it sent (here or beside the server), store what comes back, and answer with its figures."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mtpdeploy import __version__
from mtpdeploy.actions.report import BenchAnswer, limits, recomputed
from mtpdeploy.bench import load, prompting
from mtpdeploy.bench.values import SCHEMA, PointSpec, RunSpec, Stop
from mtpdeploy.errors import ConfigError, HostUnreachable, MtpError, RemoteError, UsageError
from mtpdeploy.progress import Talk
from mtpdeploy.secret import Secret
from mtpdeploy.store import Run, Store

if TYPE_CHECKING:
    from mtpdeploy.actions.benchservice import Service

NAMED_PROMPTS = (*prompting.CLASSES, "mixed", "random")
MOST_STREAMS = 65_000  # ports of one client
# A point's requests lie in memory.
MOST = {"requests": 1_000_000, "repeat": 1_000, "max_concurrency": MOST_STREAMS, "client_processes": 1024}
NO_CONNECTION = ("refused", "dns", "unreachable", "timeout", "tls")
UNKNOWN_LIMIT = 8  # the second concurrency of a plain `bench` where the server does not tell its limit


def bench(
    *,
    home: Path,
    talk: Talk,
    host: str | None = None,
    profile: str | None = None,
    inventory: Sequence[str] = (),
    set_: Sequence[str] = (),
    url: str | None = None,
    model: str | None = None,
    api: str | None = None,
    api_key_env: str | None = None,
    from_: str = "host",
    workload: str | None = None,
    concurrency: str | None = None,
    rate: str | None = None,
    arrivals: str = "poisson",
    trace: str | None = None,
    max_concurrency: int | None = None,
    requests: int | None = None,
    repeat: int | None = None,
    input_tokens: str | None = None,
    output_tokens: str | None = None,
    ignore_eos: bool = False,
    prompts: str | None = None,
    dataset: str | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    prefix_cache: str = "salt",
    sweep: Sequence[str] = (),
    slo: str | None = None,
    find: str | None = None,
    arms: str | None = None,
    order: str = "ABBA",
    client_processes: int | None = None,
    timeout: float = 600.0,
    attach: str | None = None,
) -> Any:
    """See the verb's help (actions/catalogue/benchmark.py). Answers a BenchAnswer."""
    wish = Wish.read(
        home, workload=workload, concurrency=concurrency, rate=rate, arrivals=arrivals, trace=trace,
        max_concurrency=max_concurrency, requests=requests, repeat=repeat, input_tokens=input_tokens,
        output_tokens=output_tokens, ignore_eos=ignore_eos, prompts=prompts, dataset=dataset, seed=seed,
        temperature=temperature, sweep=sweep, slo=slo, find=find, salt=prefix_cache == "salt", timeout=timeout,
        api=api, model=model, client_processes=client_processes,
    )  # fmt: skip
    if arms is None and order != "ABBA":
        raise UsageError(f"--order {order} is the order of --arms, such as --arms baseline,mtp")
    if url is not None:
        away = None if from_ == "host" else from_
        given: dict[str, object] = {
            "--host": host,
            "--profile": profile,
            "--set": set_,
            "--arms": arms,
            "--from": away,
            "--attach": attach,
        }
        for name, value in given.items():
            if value:
                raise UsageError(
                    f"{name} and --url exclude each other: an endpoint of somebody else's has no host of ours"
                )
        return _at_url(home, talk, wish, url, _key(api_key_env))
    from mtpdeploy.actions import benchhost

    if attach is not None:
        loads: dict[str, object] = {"--arms": arms, "--workload": workload, "--concurrency": concurrency, "--rate": rate, "--trace": trace,
                 "--requests": requests, "--sweep": sweep, "--find": find, "--profile": profile, "--host": host}  # fmt: skip
        for name, value in loads.items():
            if value:
                raise UsageError(
                    f"{name} says nothing to --attach, which follows the load that was begun; leave it out"
                )
        return benchhost.attach(home, talk, attach, inventory=inventory)
    if arms is not None:
        from mtpdeploy.actions.bencharms import by_turns

        if from_ != "host":
            raise UsageError("--arms measures beside the server; leave out --from")
        if find:
            raise UsageError("--find searches with one profile: leave out --arms, and search with each by --profile")
        return by_turns(home, talk, wish, arms, order, host=host, inventory=inventory, sets=set_, repeat=repeat)
    return benchhost.at_hosts(
        home, talk, wish, host=host, profile=profile, inventory=inventory, sets=set_, place=from_, key=_key(api_key_env)
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """The options, validated: everything about the load that does not depend on the server."""

    asked: load.Asked
    workload: str | None
    spec: RunSpec  # without url and points
    slo: str | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, home: Path, **given: Any) -> Wish:
        """Raises UsageError or ConfigError before anything is touched."""
        named = _workload(home, given["workload"])
        if named is not None:
            base = load.Asked(
                concurrency=named.concurrency,
                rate=named.rate,
                requests=named.requests,
                repeat=named.repeat,
                input_tokens=(named.input_tokens,),
                output_tokens=(named.output_tokens,),
                prompts=named.prompts,
                seed=named.seed,
            )
        else:
            base = load.Asked()
        for name, most in MOST.items():
            if given[name] is not None and not 1 <= given[name] <= most:
                raise UsageError(f"--{name.replace('_', '-')} {given[name]}: should be 1 or more, at most {most:,}")
        try:
            asked, stop = _asked(base, given)
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
        _check_prompts(asked, given)
        temperature = given["temperature"] if given["temperature"] is not None else getattr(named, "temperature", 0.0)
        if not 0 <= temperature < math.inf:
            raise UsageError(f"--temperature {temperature:g}: should be 0 or more")
        if not 0 < given["timeout"] < math.inf:
            raise UsageError(f"--timeout {given['timeout']:g}: should be above 0 seconds")
        _check_text("--model", given["model"])
        if given["slo"] is not None:
            limits(given["slo"])
        if given["find"]:
            _findable(asked, given["slo"])
        spec = RunSpec(
            url="",
            model=given["model"],
            points=(),
            api=given["api"],
            seed=asked.seed,
            temperature=temperature,
            ignore_eos=given["ignore_eos"] or getattr(named, "ignore_eos", False),
            timeout_s=given["timeout"],
            client_processes=given["client_processes"],
            salt=given["salt"],
            stop=stop,
        )
        notes = [prompting.RANDOM_WARNING] if asked.prompts == "random" else []
        return cls(asked, named.name if named is not None else None, spec, given["slo"], tuple(notes))

    def complete(self, server: Mapping[str, Any]) -> load.Asked:
        """Where no load was asked for: concurrency 1 and the server's effective maximum."""
        asked = self.asked
        if asked.concurrency or asked.rate or asked.trace:
            return asked
        limit = server.get("effective_max_running_requests")
        top = limit if isinstance(limit, int) and limit > 0 else UNKNOWN_LIMIT
        return replace(asked, concurrency=(1,) if top == 1 else (1, top))


def _check_prompts(asked: load.Asked, given: Mapping[str, Any]) -> None:
    """Prompts are read now: a bad file or class is refused before a server is touched."""
    if given["prompts"] and given["prompts"] not in NAMED_PROMPTS:
        raise UsageError(
            f"--prompts {given['prompts']}: should be one of {', '.join(NAMED_PROMPTS)}; a file of your own goes with --dataset"
        )
    try:
        prompting.choose(asked.prompts, 1, seed=asked.seed)
    except ValueError as exc:
        raise UsageError(f"--dataset {exc}" if given["dataset"] else f"prompts of the workload: {exc}") from exc


def _check_text(option: str, value: str | None) -> None:
    """A shell hands over bytes that are no UTF-8 as lone surrogates, which nothing can be sent as."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"{option} {value!a}: is not UTF-8 text") from exc


def _findable(asked: load.Asked, slo: str | None) -> None:
    """A search needs limits that its points can decide."""
    if not slo:
        raise UsageError("--find max-goodput needs --slo, such as --slo 'ttft_p90_ms<500,tpot_p90_ms<20'")
    if (
        len(asked.concurrency or asked.rate) > 1
        or asked.repeat > 1
        or len(asked.input_tokens) * len(asked.output_tokens) > 1
    ):
        raise UsageError(
            "--find starts from one load with one length and no --repeat, and goes on by itself; give one value"
        )
    if asked.trace:
        raise UsageError("--find changes the load, and a trace fixes it; use --concurrency or --rate as the start")
    for limit in limits(slo):
        if why := limit.undecidable(asked.requests or 16, "point"):
            raise UsageError(f"--slo {why}")


def _workload(home: Path, name: str | None) -> Any:
    if name is None:
        return None
    from mtpdeploy.inventory import workload

    return workload(home, name)


def _asked(base: load.Asked, given: Mapping[str, Any]) -> tuple[load.Asked, Stop]:
    """The workload with the options over it. ValueError for what cannot be meant."""
    lists: dict[str, str] = {}
    said = {"concurrency": "--concurrency", "rate": "--rate", "input": "--input-tokens", "output": "--output-tokens"}
    swept = False
    for text in given["sweep"]:
        name, values = load.sweep(text)
        if name in lists:
            raise ValueError(f"--sweep {name} is given twice")
        lists[name], said[name] = values, f"--sweep {name}"
        swept = swept or name in ("concurrency", "rate")
    for option, name in (
        ("concurrency", "concurrency"),
        ("rate", "rate"),
        ("input_tokens", "input"),
        ("output_tokens", "output"),
    ):
        if given[option] is not None:
            if name in lists:
                raise ValueError(f"--{option.replace('_', '-')} and --sweep {name}=… say the same thing; keep one")
            lists[name] = str(given[option])
    asked = base
    if "concurrency" in lists and ("rate" in lists or given["trace"]):
        raise ValueError(
            "--concurrency is a closed loop, --rate and --trace are an open one; keep one "
            "(--max-concurrency caps an open loop)"
        )
    if "concurrency" in lists:
        found = load.numbers(lists["concurrency"], int, said["concurrency"])
        if max(found) > MOST_STREAMS:
            raise ValueError(f"{said['concurrency']} {max(found):.0f}: a client opens at most {MOST_STREAMS:,} streams")
        asked = replace(asked, concurrency=tuple(int(one) for one in found), rate=())
    if "rate" in lists:
        asked = replace(
            asked, rate=tuple(float(one) for one in load.numbers(lists["rate"], float, said["rate"])), concurrency=()
        )
    if "input" in lists:
        asked = replace(asked, input_tokens=tuple(int(n) for n in load.numbers(lists["input"], int, said["input"])))
    if "output" in lists:
        asked = replace(asked, output_tokens=tuple(int(n) for n in load.numbers(lists["output"], int, said["output"])))
    if given["trace"]:
        from mtpdeploy.bench.arrivals import from_trace

        try:
            lines = Path(given["trace"]).read_text(encoding="utf-8-sig").splitlines()
        except OSError as exc:
            raise ValueError(f"--trace {given['trace']}: cannot be read: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise ValueError(f"--trace {given['trace']}: not UTF-8 text; it should have one time a line") from exc
        try:
            due = from_trace(lines)
        except ValueError as exc:
            raise ValueError(f"--trace {given['trace']}: {exc}") from exc
        if not due:
            raise ValueError(f"--trace {given['trace']}: no arrival in it")
        if (given["requests"] or 0) > len(due):
            raise ValueError(f"--requests {given['requests']}: the trace has {len(due)} arrivals")
        asked = replace(asked, trace=due, concurrency=(), rate=())
    if given["max_concurrency"] is not None and not (asked.rate or asked.trace):
        raise ValueError("--max-concurrency caps an open loop; give --rate or --trace, or use --concurrency")
    if given["arrivals"] != "poisson" and not asked.rate:
        raise ValueError(
            f"--arrivals {given['arrivals']} shapes an open loop: give --rate with it (a trace has its own times)"
        )
    if given["prompts"] and given["dataset"]:
        raise ValueError("--prompts and --dataset exclude each other")
    asked = replace(
        asked,
        cap=given["max_concurrency"],
        process=given["arrivals"],
        requests=given["requests"] if given["requests"] is not None else asked.requests,
        repeat=given["repeat"] if given["repeat"] is not None else asked.repeat,
        prompts=given["dataset"] or given["prompts"] or asked.prompts,
        seed=given["seed"] if given["seed"] is not None else asked.seed,
    )
    return asked, Stop(at_saturation=swept, slo=tuple((given["slo"] or "").split(",")) if given["slo"] else (),
                       search=given["find"] is not None, requests_fixed=asked.requests is not None)  # fmt: skip


def _key(name: str | None) -> Secret | None:
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"--api-key-env {name}: there is no such environment variable, or it is empty")
    return Secret(value)


# -- an endpoint by its URL


def _at_url(home: Path, talk: Talk, wish: Wish, url: str, key: Secret | None) -> BenchAnswer:
    try:
        parts = urlsplit(url)
        meant = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, a port that is none
        meant = False
    if not meant:
        raise UsageError(f"--url {url!r}: should be such as http://127.0.0.1:30000")
    if parts.username or parts.password:
        raise UsageError("--url holds a user or password, which would be stored; use --api-key-env")
    server = identity(url, key)
    asked = wish.complete(server)
    return measured(
        home, talk, wish, asked, url, key,
        meta={"host": None, "profile": None},
        provenance={
            "client_place": "url",
            "endpoint": f"{parts.scheme}://{parts.netloc}",
            "effective_args": server.get("effective_args"),
        },
    )  # fmt: skip


def identity(url: str, key: Secret | None) -> dict[str, Any]:
    """Who answers at the URL, before any load is decided. effective_args: SGLang's resolved arguments, secrets masked."""
    from mtpdeploy.bench.client import EndpointError
    from mtpdeploy.bench.target import Target
    from mtpdeploy.sglang.api import server_info

    async def ask() -> dict[str, Any]:
        async with Target(url, key.reveal() if key else None) as target:
            server = await target.identity()
            if server.get("kind") != "sglang":
                return server
            for path in ("/server_info", "/get_server_info"):
                status, info = await target.json(path)
                if status == 200 and isinstance(info, dict):
                    return server | {"effective_args": dict(server_info(info).args)}
            return server

    try:
        return asyncio.run(ask())
    except EndpointError as exc:
        raise endpoint_failure(exc.kind, str(exc), url, keyed=key is not None) from exc


def endpoint_failure(kind: str, message: str, url: str, *, keyed: bool = False) -> MtpError:
    """Why an endpoint cannot be measured, as an error with its exit code and the next step."""
    look = f"curl -i {shlex.quote(url.rstrip('/').removesuffix('/v1') + '/v1/models')}"
    if kind in NO_CONNECTION:
        return HostUnreachable(
            message, runbook="server-never-ready", next_commands=["mtpdeploy status", look], details={"kind": kind}
        )
    hints = {
        "http-401": "the server refuses the key in that variable"
        if keyed
        else "put its key into an environment variable and name it: --api-key-env VAR",
        "http-403": "the server refuses this API key",
        "http-404": "the route or the model is not there: see --api and --model",
    }
    hint = f"; {hints[kind]}" if kind in hints else ""
    return RemoteError(f"{message}{hint}", next_commands=[look], details={"kind": kind})


def measured(
    home: Path,
    talk: Talk,
    wish: Wish,
    asked: load.Asked,
    url: str,
    key: Secret | None,
    *,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    expect: Mapping[str, Any] | None = None,
    service: Service | None = None,
) -> BenchAnswer:
    """Sends the load from here and stores what comes back. `service`: the launch behind the URL, proven again after each point."""
    from mtpdeploy.bench import protocol
    from mtpdeploy.bench.client import EndpointError

    points = point_specs(asked)
    spec = replace(wish.spec, url=url, points=points, expect=dict(expect or {}), gpu_samples=False)
    keeper = Keeper(home, talk, wish, asked, spec, meta, {**provenance, "client": _client_here()})
    if service is not None:
        keeper.prove_by(service.witness, service.proven)
        keeper.stand_beside(service.look())
    try:
        protocol.run(spec, keeper.take, key=key.reveal() if key else None, halt=keeper.halt)
    except EndpointError as exc:
        keeper.fail(exc.kind, str(exc))
        raise endpoint_failure(exc.kind, str(exc), url, keyed=key is not None) from exc
    except BaseException as exc:
        keeper.fail(type(exc).__name__, str(exc))
        raise
    return keeper.finish()


def _client_here() -> dict[str, Any]:
    import aiohttp

    from mtpdeploy.bench import surroundings

    return {"mtpdeploy": __version__, "aiohttp": aiohttp.__version__, **surroundings.client()}


def point_specs(asked: load.Asked) -> tuple[PointSpec, ...]:
    try:
        return load.points(asked)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


class Keeper:
    """Takes the events of a running benchmark: stores the raw part at once, tells the rest."""

    def __init__(
        self,
        home: Path,
        talk: Talk,
        wish: Wish,
        asked: load.Asked,
        spec: RunSpec,
        meta: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        from mtpdeploy.bench.protocol import Halt

        self._home = home
        self._talk = talk
        self._wish = wish
        self._asked = asked
        self._spec = spec
        self._meta = dict(meta)
        self._provenance = dict(provenance)
        self._notes: list[str] = []
        self._skipped: list[dict[str, object]] = []
        self._finished = 0
        self.halt = Halt()
        self.run: Run | None = None
        self.failure: MtpError | None = None
        self.seen = 0  # events of a client at a host that were taken
        self._labels = {point.index: point.label for point in spec.points}
        self._told: dict[str, set[str]] = {}  # lines that a run held when it was taken up
        self._told_measured: set[tuple[object, object]] = set()
        self._witness: Callable[[], Mapping[str, Any]] | None = None
        self._proven: Mapping[str, Any] = {}
        self._beside: dict[str, Any] | None = None  # what stands beside the server, where the client does not
        self._arm: str | None = None

    def prove_by(self, witness: Callable[[], Mapping[str, Any]], proven: Mapping[str, Any]) -> None:
        """For a client that is not beside the server: who answers is asked of the server's host after every point."""
        self._witness, self._proven = witness, proven

    def stand_beside(self, told: Mapping[str, Any]) -> None:
        """Versions and model at the server's host, read there; what the client tells is then of its own machine."""
        self._beside = dict(told)
        if self.run is not None:
            self._keep_beside(self._beside)

    @classmethod
    def of(cls, home: Path, talk: Talk, run: Run, seen: int) -> Keeper:
        """Takes up a run whose client went on alone."""
        from mtpdeploy.bench.wire import load as read_spec

        stored = run.read_json("spec.json")
        if not isinstance(stored, Mapping):
            raise ConfigError(f"run {run.id}: spec.json is missing")
        spec = read_spec(stored)
        slo = run.meta.get("slo")
        wish = Wish(load.Asked(), None, spec, ",".join(slo) if isinstance(slo, list) and slo else None, ())
        keeper = cls(home, talk, wish, wish.asked, spec, {}, {})
        keeper.run, keeper.seen = run, seen
        names = ("records.jsonl", "outputs.jsonl", "dropped.jsonl")
        keeper._told = {name: {_line(row) for row in run.read_jsonl(name)} for name in names}
        keeper._told_measured = {(row.get("point"), row.get("duration_s")) for row in run.read_jsonl("measured.jsonl")}
        return keeper

    @property
    def made(self) -> Run:
        """The run, once `begin` or the server's answer has made it."""
        assert self.run is not None
        return self.run

    @property
    def run_id(self) -> str | None:
        return self.run.id if self.run else None

    def begin(self, server: Mapping[str, Any], remote: str, *, client: str | None = None) -> None:
        """Makes the run before the client at the host starts: a line that is cut at once must leave its name.

        client: the host where it runs, if that is not the server's.
        """
        self._server({"server": server})
        assert self.run is not None
        self.seen = 0  # of this client; an arm's turn begins with another one
        self.run.update_meta(remote_run=remote, remote_host=client, seen=0)

    def arm(self, name: str, facts: Mapping[str, Any]) -> None:
        """The conditions of one arm, where the run has several."""
        assert self.run is not None
        self._arm = name
        arms = self.run.meta.get("arms")
        self.run.update_meta(arms={**(arms if isinstance(arms, Mapping) else {}), name: dict(facts)})

    def remember(self) -> None:
        """How far the events were taken, for `--attach`."""
        if self.run is not None:
            self.run.update_meta(seen=self.seen)

    def say(self, text: str) -> None:
        self._talk.note(text)

    def take(self, event: Mapping[str, Any]) -> None:
        what = event.get("what")
        take: Callable[[Mapping[str, Any]], None] | None = getattr(self, f"_{what}", None)
        if take is not None:
            take(event)

    def _server(self, event: Mapping[str, Any]) -> None:
        server = event["server"]
        told = [*self._wish.notes, *(str(note) for note in event.get("notes", ()))]
        fresh = [note for note in told if note not in self._notes]
        self._notes += fresh
        meta = self._meta_of(event, server)
        if self.run is None:
            self.run = Store(self._home).new_run("bench", meta)
            self.run.write_json("spec.json", stored_spec(self._spec))
            if self._beside is not None:
                self._keep_beside(self._beside)
        else:
            self.run.update_meta(**{name: event.get(name) for name in ("api", "template")})
        self.run.write_json("server_before.json", server)
        for note in fresh:
            self._talk.note(f"note: {note}")

    def _surroundings(self, event: Mapping[str, Any]) -> None:
        """Of the client's machine, which is the server's unless that was looked at by itself."""
        assert self.run is not None
        told = {key: value for key, value in event.items() if key != "what"}
        if self._witness is not None:
            self.run.update_meta(client_surroundings=told)
        else:
            self._keep_beside(told)

    def _keep_beside(self, told: Mapping[str, Any]) -> None:
        assert self.run is not None
        meta = self.run.meta
        facts = {
            "model_hash": told.get("model_hash"),
            "versions": told.get("versions"),
            "cuda": told.get("cuda"),
            "host_load": told.get("load_1m"),
        }
        known, arms = meta.get("provenance"), meta.get("arms")
        provenance = {**(known if isinstance(known, Mapping) else {}), **facts}
        if self._arm is not None and isinstance(arms, Mapping):
            of_arm = arms.get(self._arm)
            arms = {**arms, self._arm: {**(of_arm if isinstance(of_arm, Mapping) else {}), **facts}}
            self.run.update_meta(surroundings=dict(told), provenance=provenance, arms=arms)
        else:
            self.run.update_meta(surroundings=dict(told), provenance=provenance)

    def _client(self, event: Mapping[str, Any]) -> None:
        """What sends the load."""
        assert self.run is not None
        known = self.run.meta.get("provenance")
        told = {"mtpdeploy": __version__, **{key: event.get(key) for key in ("python", "aiohttp", "uvloop")}}
        self.run.update_meta(provenance={**(known if isinstance(known, Mapping) else {}), "client": told})

    def _failed(self, event: Mapping[str, Any]) -> None:
        """The client at the host cannot measure: kept until its end is heard of."""
        self.failure = endpoint_failure(str(event["kind"]), str(event["message"]), self._spec.url, keyed=True)

    def _meta_of(self, event: Mapping[str, Any], server: Mapping[str, Any]) -> dict[str, Any]:
        asked, spec = self._asked, self._spec
        simulated = server.get("simulated")
        if simulated is None and server.get("kind") == "sglang":
            simulated = False
        one_length = asked.input_tokens[0] if len(asked.input_tokens) == 1 else None
        known: dict[str, Any] = {
            "sglang_version": server.get("version") if server.get("kind") == "sglang" else None,
            "model": spec.model or (server.get("models") or [None])[0],
            "capacity": {
                "max_running_requests": server.get("effective_max_running_requests"),
                "slots": server.get("max_mamba_cache_size"),
                "kv_tokens": server.get("kv_tokens"),
            },
            "workload": self._wish.workload,
            "output_tokens": asked.output_tokens[0] if len(asked.output_tokens) == 1 else None,
            "input_tokens": one_length,
            "ignore_eos": spec.ignore_eos,
            "temperature": spec.temperature,
            "seed": spec.seed,
            "prompts": asked.prompts,
            "prompts_sha256": prompting.fingerprint(load.prompts_of(spec.points)),
            "simulated": simulated,
            "mtpdeploy_version": __version__,
        }
        return {
            "workload": self._wish.workload,
            "simulated": simulated,
            "schema": SCHEMA,
            "api": event.get("api"),
            "template": event.get("template"),
            "slo": self._wish.slo.split(",") if self._wish.slo else [],
            "notes": self._notes,
            "skipped": [],
            "server_kind": server.get("kind"),
            **self._meta,
            "provenance": {**known, **{k: v for k, v in self._provenance.items() if v is not None}},
        }

    def _note(self, event: Mapping[str, Any]) -> None:
        self._notes.append(str(event["text"]))
        self._talk.note(f"note: {event['text']}")

    def _skip(self, event: Mapping[str, Any]) -> None:
        name = self._labels.get(event["point"], "more load")
        self._skipped.append({"load": name, "why": event["why"]})
        self._talk.done("bench", f"{name}: not measured: {event['why']}")

    def _progress(self, event: Mapping[str, Any]) -> None:
        name = self._labels.setdefault(event["point"], str(event.get("label", "")))
        total = max(len(self._labels), 1)
        if event["stage"] == "warm-up":
            self._talk.stage("bench", f"{name}: warm-up", self._finished / total)
            return
        share = event["done"] / max(event["requests"], 1)
        speed = f", {event['tok_s']:.0f} tok/s" if event.get("tok_s") else ""
        left = f", {event['left_s']:.0f} s left" if event.get("left_s") is not None else ""
        failed = f", {event['failed']} failed" if event.get("failed") else ""
        self._talk.stage(
            "bench",
            f"{name}: {event['done']}/{event['requests']} requests{speed}{failed}{left}",
            (self._finished + share) / total,
        )

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Each row once: a killed process leaves no word of how far it had read, so the host tells some of it again."""
        assert self.run is not None
        held = self._told.get(name)
        self.run.append_jsonl(name, rows if not held else [row for row in rows if _line(row) not in held])

    def _records(self, event: Mapping[str, Any]) -> None:
        assert self.run is not None
        self._append("records.jsonl", event["records"])

    def _outputs(self, event: Mapping[str, Any]) -> None:
        assert self.run is not None
        self._append("outputs.jsonl", event["outputs"])

    def _dropped(self, event: Mapping[str, Any]) -> None:
        """A window that does not count stays as evidence, in a file that no figure is computed from."""
        assert self.run is not None
        self._append("dropped.jsonl", [{key: value for key, value in event.items() if key != "what"}])

    def _measured(self, event: Mapping[str, Any]) -> None:
        assert self.run is not None
        measured = event["measured"]
        if (measured.get("point"), measured.get("duration_s")) in self._told_measured:
            return  # stored before this process took the run up
        if self._witness is not None:
            before, self._proven = self._proven, self._witness()
            measured = {
                **measured,
                "server_before": {**measured["server_before"], **before},
                "server_after": {**measured["server_after"], **self._proven},
            }
        self.run.append_jsonl("measured.jsonl", [measured])
        self.run.write_json("server_after.json", measured["server_after"])
        self._finished += 1
        name = self._labels.get(event["measured"]["point"], "")
        self._talk.done("bench", f"{name}: {event['measured']['duration_s']:.1f} s")

    def _end(self, event: Mapping[str, Any]) -> None:
        if event.get("interrupted"):
            self.halt.ask()

    def fail(self, kind: str, message: str) -> None:
        """The run ends without its last points; what was measured stays."""
        if self.run is not None:
            self.run.finish({"failure": {"error": kind, "message": message}}, "failed")

    def finish(self, *, unlike: bool = False) -> BenchAnswer:
        """Stores the figures and closes the run. `unlike`: says what differs between its arms beside their settings."""
        assert self.run is not None
        interrupted = self.halt.asked
        self.run.update_meta(interrupted=interrupted, notes=self._notes, skipped=self._skipped)
        if not self.run.file("measured.jsonl").exists():
            self.run.finish({"failure": {"error": "interrupted", "message": "before the first point"}}, "interrupted")
            raise KeyboardInterrupt
        self._settle(self.run, recomputed(self.run))
        if unlike:
            self.run.update_meta(
                not_like_for_like=unlike_arms(self.run), provenance=shared_by_arms(self.run, self._known())
            )
        return recomputed(self.run)

    def _known(self) -> dict[str, Any]:
        assert self.run is not None
        known = self.run.meta.get("provenance")
        return {key: value for key, value in known.items() if value is not None} if isinstance(known, Mapping) else {}

    def _settle(self, run: Run, answer: BenchAnswer) -> None:
        foreign = [why for point in answer.points for why in point.invalid_because if why.startswith("other work")]
        looked = any(row.get("foreign") is not None for row in run.read_jsonl("measured.jsonl"))
        sources = {point.accept_length_source for point in answer.points}
        shares = [point.cached_share for point in answer.points if point.cached_share is not None]
        known = run.meta.get("provenance")
        run.update_meta(
            provenance={
                **(known if isinstance(known, Mapping) else {}),
                "contention": foreign if looked else None,
                "accept_length_source": sources.pop() if len(sources) == 1 else None,
                "prefix_cache_hit_rate": sum(shares) / len(shares) if shares else None,
            }
        )
        run.write_json("points.json", {"schema": SCHEMA, "points": [point.as_json() for point in answer.points]})
        best = max((p.output_tok_s for p in answer.points if p.valid and p.output_tok_s is not None), default=None)
        accepted = [point.accept_length for point in answer.points if point.accept_length is not None]
        run.finish(
            {
                "points": len(answer.points),
                "invalid": sum(not point.valid for point in answer.points),
                "output_tok_s": best,
                "accept_length": accepted[-1] if accepted else None,
            },
            "interrupted" if answer.interrupted else "done",
        )


def shared_by_arms(run: Run, known: Mapping[str, Any]) -> dict[str, Any]:
    """`known` with the conditions that are the same for every arm, and without those that are not: they stand with the arms."""
    arms = run.meta.get("arms")
    facts = [one for one in arms.values() if isinstance(one, Mapping)] if isinstance(arms, Mapping) else []
    told = {key for one in facts for key in one}
    same = {key for key in told if all(one.get(key) == facts[0].get(key) for one in facts)}
    kept = {key: value for key, value in known.items() if key not in told or key in same}
    return {**kept, **{key: facts[0][key] for key in same if facts[0].get(key) is not None}}


def _line(row: object) -> str:
    return json.dumps(row, sort_keys=True)


def unlike_arms(run: Run) -> list[str]:
    """What differs between the arms of a run beside the settings compared, in sentences."""
    from mtpdeploy.analysis.likeness import likeness
    from mtpdeploy.store.measured import arms_of
    from mtpdeploy.store.measured import measured as read

    arms = [read(run, name) for name in arms_of(run)]
    told = [one.text for other in arms[1:] for one in likeness([arms[0]], [other]).differences]
    return list(dict.fromkeys(told))


def stored_spec(spec: RunSpec) -> dict[str, Any]:
    """spec.json: the whole load, without what only the process needs."""
    from mtpdeploy.bench.wire import dump

    return {"schema": SCHEMA, **dump(spec)}
