"""The Click door: `mtpdeploy VERB`, made from the same table as `fab VERB`.

Only Click and that table are imported here; what a verb needs is imported when it runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from mtpdeploy import __version__, door
from mtpdeploy.actions.verbs import COMMON, Argument, Option, Verb, verbs
from mtpdeploy.errors import UsageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EARLY = ("home", "quiet", "no_color")  # also accepted before the verb
DEFAULT_NAME = "list"  # `runs list` is `runs`: Fabric's door has to give a collection's default task a name


class VerbCommand(click.Command):
    """A verb with its examples below the options."""

    examples: tuple[str, ...] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tell_examples(self.examples, formatter)


class VerbGroup(click.Group):
    """A verb that has others below it: `runs` lists, `runs show ID` shows one."""

    examples: tuple[str, ...] = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tell_examples(self.examples, formatter)


def tell_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"  {line}\n")


class Door(click.Group):
    """The root. Click's own complaints end as ours do: exit 2, and JSON on stdout if --json was among the words."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, prog_name or "mtpdeploy", complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as shown:
            click.echo(shown.format_message(), err=True)
            code = 2
        except click.ClickException as error:
            code = _refuse(error, as_json="--json" in words)
        except click.Abort:
            code = door.INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _quiet_end():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _quiet_end():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the table's order: from a home's first day to its campaigns


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """A reader that leaves (`--help | head`) and a full disk end as they do in a verb; Click would exit with 1, or in a traceback."""
    try:
        yield
    except BrokenPipeError:
        door.silence_stdout()
        raise click.exceptions.Exit(door.BROKEN_PIPE) from None
    except OSError as error:
        door.silence_stdout()
        click.echo(f"error: {error.filename or 'standard output'}: {error.strerror}", err=True)
        raise click.exceptions.Exit(1) from None


def _refuse(error: click.ClickException, *, as_json: bool) -> int:
    if not as_json:
        with contextlib.suppress(BrokenPipeError):
            error.show()
        return error.exit_code
    door.tell_error(UsageError(error.format_message()), as_json=True)
    return UsageError.exit_code


def _option(option: Option) -> click.Option:
    if option.type is bool:
        return click.Option([option.flag, option.name], is_flag=True, default=bool(option.default), help=option.told)
    kind: Any = click.Choice(option.choices) if option.choices else option.type
    return click.Option(
        [option.flag, option.name],
        type=kind,
        multiple=option.multiple,
        default=None if option.multiple else option.default,
        metavar=option.placeholder,
        help=option.told,
        shell_complete=None if option.choices else _completed(option.completes),
    )


def _argument(argument: Argument) -> click.Argument:
    return click.Argument(
        [argument.name],
        required=argument.required,
        nargs=-1 if argument.multiple else 1,
        shell_complete=_completed(argument.name),
    )


def _completed(what: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mtpdeploy.actions.completion import candidates

        given = context.find_root().params.get("home") or context.params.get("home")
        return [CompletionItem(word, type=kind) for word, kind in candidates(what, incomplete, given)]

    return complete


def _command(verb: Verb, name: str, kind: type[VerbCommand] | type[VerbGroup] = VerbCommand) -> VerbCommand | VerbGroup:
    def callback(**given: Any) -> None:
        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            context.obj = {**(context.obj or {}), **{name: given[name] for name in EARLY if given[name]}}
            return
        early = context.obj or {}
        context.exit(door.perform(verb, {**given, **{name: given[name] or early.get(name) for name in EARLY}}))

    arguments = "".join(f"\n\n{argument.name.upper()}: {argument.help}" for argument in verb.arguments)
    extra: dict[str, Any] = {"invoke_without_command": True, "no_args_is_help": False} if kind is VerbGroup else {}
    command = kind(
        name,
        callback=callback,
        params=[*map(_argument, verb.arguments), *map(_option, (*verb.options, *COMMON))],
        help=f"{verb.summary}\n\n{verb.details}{arguments}",
        short_help=verb.summary,
        context_settings=CONTEXT,
        **extra,
    )
    command.examples = verb.examples
    return command


def _door() -> Door:
    table = {verb.name: verb for verb in verbs()}
    parents = {name.partition(".")[0] for name in table if "." in name}
    root = Door(
        "mtpdeploy",
        help="Deploy, prove, benchmark and tune SGLang servers with Multi-Token Prediction on your own GPU hosts, over SSH.\n\n"
        "Answers are printed on stdout, progress on stderr. Exit codes: docs/messages.md.",
        params=[_option(option) for option in COMMON if option.name in EARLY],
        callback=_remember,
        context_settings=CONTEXT,
    )
    click.version_option(__version__, prog_name="mtpdeploy")(root)
    groups: dict[str, click.Group] = {}
    for name, verb in table.items():
        parent, _, below = name.partition(".")
        if below:
            groups[parent].add_command(_command(verb, below))
        elif name in parents:
            group = _command(verb, name, VerbGroup)
            assert isinstance(group, click.Group)
            group.add_command(_command(verb, DEFAULT_NAME))
            groups[name] = group
            root.add_command(group)
        else:
            root.add_command(_command(verb, name))
    return root


def _remember(**early: Any) -> None:
    click.get_current_context().obj = early


main = _door()
