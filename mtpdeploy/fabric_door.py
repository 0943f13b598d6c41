"""The Fabric door: one Invoke task per verb, made from the same table as `mtpdeploy VERB`.

Fabric's own host selection (-H, --hosts) is refused: it would run a task once per host, each blind to the others, while a verb
knows its hosts, asks them in parallel and answers for all of them.
"""

from __future__ import annotations

import os
import sys
from inspect import Parameter, Signature
from types import TracebackType
from typing import Any

from fabric import Connection
from fabric.main import program
from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.parser.argument import Argument as ParserArgument
from invoke.parser.parser import ParseMachine
from invoke.tasks import Task

from mtpdeploy import door
from mtpdeploy.actions.verbs import COMMON, Verb, verbs
from mtpdeploy.cli import DEFAULT_NAME

HELP = ("-h", "--help")


class Positional(ParserArgument):
    """A positional argument that may be left out, or given several times; Invoke only knows required single ones.

    Until its task's words end it reads as "still missing" (None), which is how Invoke decides that the next word is for it.
    A required one that is missing is refused by the verb, as at the other door.
    """

    def __init__(self, name: str, help: str, multiple: bool) -> None:
        super().__init__(name=name, help=help, positional=True)
        self.multiple = multiple
        self.closed = False
        self.words: tuple[str, ...] = ()

    @property
    def value(self) -> Any:
        if self.multiple:
            return self.words if self.closed else None
        return self.words[0] if self.words else ("" if self.closed else None)

    @value.setter
    def value(self, word: str) -> None:
        self.words = (*self.words, word)


def _complete_context(machine: ParseMachine) -> None:
    for argument in machine.context.positional_args if machine.context else ():
        if isinstance(argument, Positional):
            argument.closed = True
    _invoke_complete_context(machine)


# Invoke asks here which positional arguments are still missing; ours close first.
_invoke_complete_context = ParseMachine.complete_context
setattr(ParseMachine, "complete_context", _complete_context)  # noqa: B010  (mypy: a method is not assigned to)


class VerbTask(Task):  # type: ignore[type-arg]
    """A task whose parameters come from the table."""

    verb: Verb

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[ParserArgument]:
        ours = {argument.name: argument for argument in self.verb.arguments}
        return [
            Positional(found.name, ours[found.name].help, ours[found.name].multiple) if found.name in ours else found
            for found in super().get_arguments(ignore_unknown_help)
        ]


def _task(verb: Verb, name: str) -> VerbTask:
    def body(context: Context, **given: object) -> None:
        if isinstance(context, Connection):
            raise Exit(
                "fab -H would repeat the task for each host, each blind to the others; choose hosts with --host", code=2
            )
        if any(word in HELP for argument in verb.arguments for word in _words(given[argument.name])):
            # Invoke takes any word for a positional argument that is still missing, -h included.
            program.print_task_help(verb.name)
            return
        code = door.perform(verb, {key: value if value != "" else None for key, value in given.items()})
        if code:
            raise Exit(code=code)

    options = (*verb.options, *COMMON)
    body.__name__ = name
    body.__doc__ = _help(verb)
    body.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter("context", Parameter.POSITIONAL_OR_KEYWORD),
            *(Parameter(a.name, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty) for a in verb.arguments),
            *(
                Parameter(o.name, Parameter.POSITIONAL_OR_KEYWORD, default=bool(o.default) if o.type is bool else None)
                for o in options
            ),
        ]
    )
    task = VerbTask(
        body,
        name=name,
        positional=[argument.name for argument in verb.arguments],
        iterable=[option.name for option in options if option.multiple],
        help={
            **{argument.name: argument.help for argument in verb.arguments},
            **{option.name.rstrip("_").replace("_", "-"): option.told for option in options},
        },
        auto_shortflags=False,
    )
    task.verb = verb
    return task


def _words(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def _help(verb: Verb) -> str:
    examples = "\n".join(f"  {_as_fab(line)}" for line in verb.examples)
    return "\n\n".join(part for part in (verb.summary, verb.details, examples and f"Examples:\n{examples}") if part)


def _as_fab(example: str) -> str:
    """`mtpdeploy runs show ID` → `fab runs.show ID`."""
    words = example.split()
    if words[:1] != ["mtpdeploy"]:
        return example
    dotted = ".".join(words[1:3])
    if any(verb.name == dotted for verb in verbs()):
        return " ".join(["fab", dotted, *words[3:]])
    return " ".join(["fab", *words[1:]])


def _told_of_nothing(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """`fab --list | head -1`: Invoke prints its own help, and would end with a traceback when the reader leaves."""
    if not issubclass(kind, BrokenPipeError):
        sys.__excepthook__(kind, value, trace)
        return
    door.silence_stdout()
    os._exit(door.BROKEN_PIPE)  # after this hook Python would exit with 1, whatever it does


sys.excepthook = _told_of_nothing


def collection() -> Collection:
    """All verbs: `fab runs` is the default task of the collection `runs`, `fab runs.show` a task in it."""
    table = {verb.name: verb for verb in verbs()}
    parents = {name.partition(".")[0] for name in table if "." in name}
    root = Collection()
    nested = {name: Collection(name) for name in parents}
    for name, verb in table.items():
        parent, _, below = name.partition(".")
        if below:
            nested[parent].add_task(_task(verb, below))
        elif name in parents:
            nested[name].add_task(_task(verb, DEFAULT_NAME), default=True)
        else:
            root.add_task(_task(verb, name))
    for each in nested.values():
        root.add_collection(each)
    return root
