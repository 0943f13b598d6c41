"""Reads a command as a person types it, against the doors' own parser, without running it."""

from __future__ import annotations

import shlex

import click

from mtpdeploy.actions.verbs import verbs
from mtpdeploy.cli import main

TABLE = {verb.name for verb in verbs()}


def parse(line: str) -> None:
    """Raises click.UsageError, or AssertionError for a verb that there is not. What follows a pipe or a redirection is not ours."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    for end in ("|", ">", "2>", "&&", "||", ";", "&", "\\"):
        words = words[: words.index(end)] if end in words else words
    door, *rest = words
    if door == "fab" and rest and not rest[0].startswith("-"):
        rest = [*rest[0].split("."), *rest[1:]]
    command: click.Command = main
    context = click.Context(main, info_name=door)
    while isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command = command.commands[rest[0]]
        context = click.Context(command, info_name=rest[0], parent=context)
        rest = rest[1:]
    assert command is not main or not rest or rest[0].startswith("-"), f"no verb {rest[0]}"
    if command is not main:
        command.make_parser(context).parse_args(list(rest))
