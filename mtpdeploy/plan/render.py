"""The files of a release, rendered from templates/. Every value comes finished; a template only places it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mtpdeploy.errors import ConfigError, PlanRefused
from mtpdeploy.inventory.values import Deployment
from mtpdeploy.resources import environment
from mtpdeploy.secret import Secret
from mtpdeploy.sglang.masking import is_secret

RESTART_LIMIT = 3  # restarts after which a crash loop is given up …
RESTART_WINDOW_S = 1800.0  # … if they fall into this time: a load takes minutes
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Set by the launch itself; a value from elsewhere would break the proof of whose process it is.
_RESERVED = ("MTPDEPLOY_LAUNCH_ID", "MTPDEPLOY_BOOT", "SPT_NOENV")


@dataclass(frozen=True, slots=True)
class File:
    """A file of the release folder. secret: its content is never shown, only its hash and length."""

    path: str
    mode: int
    content: str
    secret: bool = False

    def as_json(self) -> dict[str, object]:
        shown: dict[str, object] = {"path": self.path, "mode": f"{self.mode:04o}"}
        if self.secret:
            return {**shown, "bytes": len(self.content.encode()), "secret": True}
        return {**shown, "content": self.content, "sha256": sha256(self.content.encode()).hexdigest()}


def render(
    deployment: Deployment,
    argv: Sequence[str],
    env: Mapping[str, str | Secret],
    secrets: Mapping[str, Secret],
    *,
    sglang_version: str | None,
    launch_id: str,
    home: Path | None = None,
) -> tuple[File, ...]:
    """launch.sh, env, server.yml (only with secrets), both units, tmux.sh. Pure but for reading the templates.

    secrets: SGLang settings that must not stand in a process list, by canonical name (api_key).
    Raises ConfigError for a name or value that no environment can hold.
    """
    templates = environment(home)
    supervised = {
        "service": deployment.service,
        "drain_timeout_s": deployment.drain_timeout_s,
        "restart_limit": RESTART_LIMIT,
        "restart_window_s": int(RESTART_WINDOW_S),
    }
    script = templates.get_template("launch.sh.j2").render(
        launch_id=launch_id, argv=list(argv), sglang_version=sglang_version, config_file=bool(secrets)
    )
    files = [
        File("launch.sh", 0o700, script),
        File(
            "env",
            0o600,
            _environment_file(env),
            secret=any(isinstance(v, Secret) or is_secret(n) for n, v in env.items()),
        ),
    ]
    if secrets:
        if "--config" in argv:
            raise PlanRefused(
                "args.config and an API key cannot stand together: SGLang reads one --config, and the key goes into one. "
                "Put the settings of that file under args: instead"
            )
        files.append(File("server.yml", 0o600, _server_file(secrets), secret=True))
    for name, template in (
        ("system.service", "systemd/system.service.j2"),
        ("user.service", "systemd/user.service.j2"),
        ("tmux.sh", "tmux/start.sh.j2"),
    ):
        mode = 0o700 if name.endswith(".sh") else 0o644
        files.append(File(name, mode, templates.get_template(template).render(**supervised)))
    return tuple(files)


def _environment_file(env: Mapping[str, str | Secret]) -> str:
    lines = []
    for name, value in sorted(env.items()):
        if not _NAME.match(name):
            raise ConfigError(
                f"env.{name}: is no name of an environment variable; letters, digits and _ would be right"
            )
        if name in _RESERVED:
            raise ConfigError(f"env.{name}: is set by the launch itself and proves whose process it is; leave it out")
        text = value.reveal() if isinstance(value, Secret) else value
        if "\0" in text:
            raise ConfigError(f"env.{name}: an environment variable cannot hold a NUL byte")
        lines.append(f"{name}={shlex.quote(text)}\n")
    return "".join(lines)


def _server_file(secrets: Mapping[str, Secret]) -> str:
    """SGLang's --config: flat, dashes, double-quoted text (JSON strings are YAML) so that no key is read as a number.

    SGLang puts the value back into a command line of its own, where a leading dash would make it an option.
    """
    for name, value in secrets.items():
        if value.reveal().startswith("-"):
            raise ConfigError(
                f"{name}: begins with a dash, which SGLang reads as an option and refuses; another key would be right"
            )
    return "".join(
        f"{name.replace('_', '-')}: {json.dumps(value.reveal())}\n" for name, value in sorted(secrets.items())
    )
