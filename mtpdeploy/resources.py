"""Finds the home folder, and the shipped templates and inventories, in a checkout, an editable install and a wheel alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtpdeploy.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = Path(__file__).resolve().parent


def bundled(kind: str) -> Path:
    """The shipped `templates` or `inventories`. Installed: mtpdeploy/<kind>. Checkout or editable install: <repo>/<kind>."""
    packaged = PACKAGE / kind
    return packaged if packaged.is_dir() else PACKAGE.parent / kind


def find_home(
    option: str | None = None, *, environ: Mapping[str, str] | None = None, start: Path | None = None
) -> Path:
    """`--home`, else $MTPDEPLOY_HOME, else the nearest folder upwards that has `inventories/`, else ~/.local/share/mtpdeploy.

    The folder need not exist yet: an empty home is a fine place to start from. Raises UsageError where the current folder was deleted.
    """
    environ = os.environ if environ is None else environ
    if chosen := option or environ.get("MTPDEPLOY_HOME"):
        return Path(chosen).expanduser().absolute()
    try:
        here = (start or Path.cwd()).absolute()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more: cd to another one, or say --home") from None
    for folder in (here, *here.parents):
        if (folder / "inventories").is_dir():
            return folder
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mtpdeploy"


def variable(name: str) -> str | None:
    """One variable of this process's environment, for the pure packages that may not look themselves."""
    return os.environ.get(name)


def environment(home: Path | None = None) -> Environment:
    """Jinja over the home's own templates/ first, then ours; `shipped/NAME` always means ours, so an override can extend it.

    Templates hold no decisions: every value comes finished from the plan, and an unknown name is an error.
    """
    import shlex

    from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined

    shipped = FileSystemLoader(bundled("templates"))
    own = [FileSystemLoader(home / "templates")] if home and (home / "templates") != bundled("templates") else []
    env = Environment(
        loader=ChoiceLoader([*own, shipped, PrefixLoader({"shipped": shipped})]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=lambda name: bool(name) and ".html" in str(name),
    )
    env.filters["sh"] = lambda value: shlex.quote(value) if isinstance(value, str) else shlex.join(value)
    return env
