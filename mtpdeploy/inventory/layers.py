"""defaults < group < host < profile < options < --set, resolved to one Deployment that knows where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mtpdeploy.errors import ConfigError, UsageError
from mtpdeploy.inventory.documents import Document, KeyPath, Problem, did_you_mean, parse, refuse
from mtpdeploy.inventory.hosts import Inventory
from mtpdeploy.inventory.profiles import load_profile
from mtpdeploy.inventory.schema import Settings, keys, validated
from mtpdeploy.inventory.settings import EnvValue, Layer, SecretSource, argument, layer, matches
from mtpdeploy.inventory.values import ArgValue, Deployment, Host, VersionedEnv
from mtpdeploy.resources import variable
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.versions import Version

NO_HOST = Host(name="any")  # plans that are made without a host
SET = "--set"

DEFAULTS = Layer(
    "default",
    {
        "python": "python3",
        "workdir": "~/.mtpdeploy",
        "service": "sglang",
        "supervisor": "auto",
        "ready_timeout_s": 600.0,
        "drain_timeout_s": 60.0,
    },
    {"host": "127.0.0.1", "port": 30000},
)


def resolve(
    inventory: Inventory,
    host: Host | None,
    profile: str | None,
    sets: Sequence[str] = (),
    overrides: Mapping[str, object] | None = None,
    *,
    reveal: bool = True,
) -> Deployment:
    """Everything that is said of `profile` on `host`, the strongest layer winning key by key.

    overrides: what the command's own options say, by key: `supervisor`, `sglang_version`, `args.port`; None is not said.
    reveal: secrets are read from where the files say, and a missing one is refused; without it each is an empty Secret.
    Raises ConfigError, NotFound.
    """
    said = [DEFAULTS, *(inventory.layers.get(host.name, ()) if host else ())]
    if profile is not None:
        said += load_profile(inventory.home, profile).layers
    said += [_options(overrides or {}), *_sets(sets)]
    return _Resolution(host or NO_HOST, profile, tuple(said), reveal).deployment()


def env_for(deployment: Deployment, version: Version | str | None) -> dict[str, str | Secret]:
    """The server's environment under that SGLang version: `deployment.env` and what only some versions need."""
    known = Version.parse(version) if isinstance(version, str) else version
    needed = {each.name: each.value for each in deployment.versioned_env if known and matches(each.versions, known)}
    return {**deployment.env, **needed}


class _Resolution:
    def __init__(self, host: Host, profile: str | None, layers: tuple[Layer, ...], reveal: bool) -> None:
        self._host = host
        self._profile = profile
        self._layers = layers
        self._reveal = reveal
        self._values: dict[str, Any] = {}
        self._args: dict[str, ArgValue] = {}
        self._env: dict[str, EnvValue] = {}
        self._origin: dict[str, str] = {}
        self._notes: list[str] = []
        self._api_key: Secret | SecretSource | None = None

    def deployment(self) -> Deployment:
        model_layer = path_layer = -1
        for rank, said in enumerate(self._layers):
            self._take(said)
            model_layer = rank if "model" in said.values else model_layer
            path_layer = rank if "model_path" in said.args else path_layer
        if model_layer > path_layer:
            self._args["model_path"] = self._place(self._values["model"])
            self._origin["args.model_path"] = self._origin["model"]
        self._refuse_what_is_missing()
        env: dict[str, str | Secret] = {}
        versioned: list[VersionedEnv] = []
        for name, value in self._env.items():
            if isinstance(value, VersionedEnv):
                versioned.append(value)
            else:
                env[name] = self._revealed(value) if isinstance(value, SecretSource) else value
        values = self._values
        return Deployment(
            host=self._host,
            profile=Path(self._profile).stem if self._profile else "",
            service=values["service"],
            args={name: value for name, value in self._args.items() if value is not None},
            env=env,
            python=values["python"],
            workdir=values["workdir"],
            supervisor=values["supervisor"],
            ready_timeout_s=values["ready_timeout_s"],
            drain_timeout_s=values["drain_timeout_s"],
            slots_for=values.get("slots_for"),
            api_key=self._revealed(self._api_key) if isinstance(self._api_key, SecretSource) else self._api_key,
            sglang_version=values.get("sglang_version"),
            model_config=values.get("model_config"),
            origin=self._origin,
            notes=tuple(self._notes),
            versioned_env=tuple(versioned),
        )

    def _take(self, said: Layer) -> None:
        for key, value in said.values.items():
            target, taken = ("python", f"{str(value).rstrip('/')}/bin/python") if key == "venv" else (key, value)
            self._values[target] = taken
            self._origin[target] = said.label
        for name, argument_value in said.args.items():
            self._args[name] = argument_value
            self._origin[f"args.{name}"] = said.label
        for name, env_value in said.env.items():
            self._env[name] = env_value
            self._origin[f"env.{name}"] = said.label
        if said.api_key is not None:
            self._api_key = said.api_key
            self._origin["api_key"] = said.label
        self._notes += said.notes

    def _place(self, model: str) -> str:
        """Where the host keeps the model: by its full id, else by the id's last part; else the id itself, which SGLang downloads.

        Without a host there is nowhere to look, and a bare name stays the model's name.
        """
        for said in reversed(self._layers):
            for name in (model, model.rpartition("/")[2]):
                if name in said.models:
                    return said.models[name]
        if "/" in model:
            return model
        if self._host is NO_HOST:
            self._notes.append(f"no host is given: {model} is taken as the model's name, where it lies is not known")
            return model
        raise ConfigError(
            f"model: host {self._host.name} does not say where {model} lies; write `models: {{{model}: /path}}` in the inventory, "
            f"or the Hugging Face id (such as Qwen/{model}) in the profile"
        )

    def _refuse_what_is_missing(self) -> None:
        if self._args.get("model_path") is None and self._profile is not None:
            label = self._layers[-1].label if len(self._layers) == 1 else f"profile {self._profile}"
            raise ConfigError(f"{label}: says no model; write `model: Qwen/Qwen3.6-27B`, or args.model_path")
        for name in ("host", "port"):
            if self._args.get(name) is None:
                self._args[name] = DEFAULTS.args[name]
                self._origin[f"args.{name}"] = DEFAULTS.label

    def _revealed(self, source: SecretSource) -> Secret:
        if not self._reveal:
            return Secret("")
        if source.from_env is not None:
            value = variable(source.from_env)
            if not value:
                raise ConfigError(
                    f"{source.key}: the environment variable {source.from_env} is not set here; export it, or use from_file"
                )
            return Secret(value)
        assert source.from_file is not None
        try:
            text = source.from_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{source.key}: {source.from_file} cannot be read: {reason}") from None
        if not text or any(c in text for c in "\n\r\0"):
            raise ConfigError(f"{source.key}: {source.from_file} should hold the secret in one line")
        return Secret(text)


def _options(overrides: Mapping[str, object]) -> Layer:
    """The layer of a command's own options. Programs write these keys, so an unknown one is a fault of ours."""
    args: dict[str, ArgValue] = {}
    env: dict[str, EnvValue] = {}
    values: dict[str, object] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        if key.startswith("args."):
            name, typed = argument(key[5:], value)
            args[name] = typed
        elif key.startswith("env."):
            env[key[4:]] = value if isinstance(value, Secret) else str(value)
        else:
            values[key] = value
    return Layer("option", values, args, env)


def _sets(sets: Sequence[str]) -> list[Layer]:
    """Each `--set KEY=VALUE` is a layer of one value. Raises UsageError for what is no assignment, ConfigError for a wrong value."""
    layers: list[Layer] = []
    problems: list[Problem] = []
    for word in sets:
        key, equals, text = word.partition("=")
        kind, _, name = key.partition(".")
        if not equals or not key or (kind in ("args", "env")) != bool(name):
            raise UsageError(f"{SET}: should be args.NAME=VALUE, env.NAME=VALUE or SETTING=VALUE, not {word!r}")
        document = _assignment(kind, name, text)
        content, wrong = validated(Settings, document)
        problems += wrong
        if content:
            layers.append(layer(f"{SET} {key}", content, document, (), problems))
    refuse(Problem(SET, None, problem.key, problem.message) for problem in problems)
    return layers


def _assignment(kind: str, name: str, text: str) -> Document:
    """`args.NAME=VALUE` as if it stood in a profile. An environment's value is text as typed; others are read as YAML."""
    nowhere = Path(SET)
    if kind == "env":
        return Document(nowhere, {"env": {name: text}}, raw={("env", name): text})
    if kind not in keys(Settings):
        raise UsageError(f"{SET}: {kind} is no setting{did_you_mean(kind, (*keys(Settings), 'args.NAME', 'env.NAME'))}")
    try:
        value = parse(f"value: {text}", nowhere).data["value"] if "\n" not in text else text
    except (ConfigError, yaml.YAMLError):
        value = text  # `a: b` and the like are no YAML scalar; the argument's own type decides what becomes of it
    if kind == "args":
        raw: dict[KeyPath, str] = {("args", name): text} if not isinstance(value, (dict, list)) else {}
        return Document(nowhere, {"args": {name: value}}, raw=raw)
    return Document(nowhere, {kind: value})
