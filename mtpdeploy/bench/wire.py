"""A run's specification as JSON and back: to the host, and into the run's folder (without the texts, by name)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mtpdeploy.bench.values import Message, PointSpec, Prompt, Request, RunSpec, Stop


def dump(spec: RunSpec) -> dict[str, Any]:
    """Prompts once, by their place in a list: points share them."""
    prompts: dict[Prompt, int] = {}

    def request(one: Request) -> list[Any]:
        return [one.index, prompts.setdefault(one.prompt, len(prompts)), one.output_tokens, one.at_s]

    points = [
        {
            **{f.name: getattr(point, f.name) for f in fields(PointSpec) if f.name not in ("requests", "warmup")},
            "requests": [request(one) for one in point.requests],
            "warmup": [request(one) for one in point.warmup],
        }
        for point in spec.points
    ]
    plain = {f.name: getattr(spec, f.name) for f in fields(RunSpec) if f.name not in ("points", "stop")}
    return {
        **plain,
        "expect": dict(spec.expect),
        "extra_body": dict(spec.extra_body),
        "stop": {f.name: getattr(spec.stop, f.name) for f in fields(Stop)},
        "points": points,
        "prompts": [
            {"id": one.id, "kind": one.kind, "messages": [[m.role, m.content] for m in one.messages]} for one in prompts
        ],
    }


def load(value: Mapping[str, Any]) -> RunSpec:
    """Reads `dump`'s value back."""
    prompts = [
        Prompt(one["id"], one["kind"], tuple(Message(role, content) for role, content in one["messages"]))
        for one in value["prompts"]
    ]

    def requests(rows: Any) -> tuple[Request, ...]:
        return tuple(Request(index, prompts[prompt], limit, at) for index, prompt, limit, at in rows)

    points = tuple(
        PointSpec(**{**row, "requests": requests(row["requests"]), "warmup": requests(row["warmup"])})
        for row in value["points"]
    )
    stop = {**value["stop"], "slo": tuple(value["stop"].get("slo", ()))}
    known = {f.name: value[f.name] for f in fields(RunSpec) if f.name in value}
    return RunSpec(**{**known, "points": points, "stop": Stop(**stop)})
