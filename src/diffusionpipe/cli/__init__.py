"""The command `diffusionpipe`: one module per verb, imported when it is called.

A verb is a module of this package with its name in VERBS. The module's function of the same name is the verb; a verb
with sub-verbs is a `typer.Typer` called `app` instead (see `schedule`). At its top it imports typer and the standard
library only, and heavy packages inside its functions, so that `--help` shows every verb's signature in a fraction of a
second. A verb raises `diffusionpipe.errors`; `main` prints them.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup, TyperOption

from diffusionpipe.cli.verbs.output import quieten
from diffusionpipe.errors import ConfigError, DiffusionPipeError, PeerError, TrainingError
from diffusionpipe.hidden_packages import hidden
from diffusionpipe.ir.home import expanded, expanded_path
from diffusionpipe.ir.locales import as_utf8, print_everything
from diffusionpipe.runtime.job.interrupts import remember_interrupts, was_interrupted
from diffusionpipe.version import __version__

if TYPE_CHECKING:  # typer has its own copy of click and does not export its types
    from typer._click import Command, Context, Parameter

VERBS = (
    "train",
    "data",
    "sample",
    "export",
    "prototypes",
    "example",
    "schedule",
    "profile",
    "cluster",
    "plan",
    "rehearse",
    "report",
    "watch",
    "doctor",
)
"""The commands, in the order in which help lists them."""
_MAYBE_FILES = ("name", "cluster", "model")
"""Parameters of text that name a file, or something that we ship."""


def _load(verb: str) -> "Command":
    module = import_module(f"diffusionpipe.cli.verbs.{verb}")
    if hasattr(module, "app"):
        verb_app: typer.Typer = module.app
    else:
        verb_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        verb_app.command()(getattr(module, verb))
    command = typer.main.get_command(verb_app)
    command.name = verb
    _clear_switches(command)
    _expand_homes(command)
    _fill_lines(command)
    return command


def _fill_lines(command: "Command") -> None:
    """Join the lines of each paragraph of a command's help and its sub-commands', so that the terminal wraps them."""
    # One line break in a docstring is the code's; two are a paragraph.
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.help or ""))
    for inner in getattr(command, "commands", {}).values():
        _fill_lines(inner)


def _expand_homes(command: "Command") -> None:
    """Make a command and its sub-commands replace "~" at the start of paths: a shell leaves it in --out=~/x."""
    for parameter in command.get_params(typer.Context(command)):
        # --version has a callback of its own.
        if parameter.callback is None:
            parameter.callback = _with_home
    for inner in getattr(command, "commands", {}).values():
        _expand_homes(inner)


def _with_home(_: "Context", parameter: "Parameter", value: object) -> object:
    """The value of a parameter: a path with the home folder in place of "~", any other text as UTF-8.

    It is the callback of click's parameters; a list or tuple is changed value by value.

    Raises:
        ConfigError: the path or text cannot be changed so.
    """
    try:
        if isinstance(value, list | tuple):
            return type(value)(_with_home(_, parameter, one) for one in value)
        if isinstance(value, Path):
            return expanded_path(value)
        if isinstance(value, str) and parameter.name in _MAYBE_FILES:
            return expanded(value)
        if isinstance(value, str):  # a prompt, say, whatever the locale
            return as_utf8(value)
    except ValueError as error:
        raise ConfigError(f"{parameter.opts[0]}: {error}") from None
    return value


def _clear_switches(command: "Command") -> None:
    """Take the type of switches out of the help of a command and its sub-commands: "--json", not "--json <bool>"."""
    _without_types(command.get_params(typer.Context(command)))
    for inner in getattr(command, "commands", {}).values():
        _clear_switches(inner)


def _without_types(options: "list[Parameter]") -> "list[Parameter]":
    for option in options:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
    return options


class _Verbs(TyperGroup):
    """The click group of the whole command line: each command of VERBS is a module, imported when it is asked for."""

    def list_commands(self, ctx: "Context") -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":
        wanted = (cmd_name,) if cmd_name in VERBS else VERBS  # all, so that typer can suggest the right one
        for verb in wanted:
            if verb not in self.commands:
                self.commands[verb] = _load(verb)
        return self.commands.get(cmd_name)

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        """The switches of the command itself, --version and --help, without their type."""
        return _without_types(super().get_params(ctx))


app = typer.Typer(
    cls=_Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffusionpipe {__version__}")
        raise typer.Exit


@app.callback()
def diffusionpipe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train large diffusion models on several devices by pipeline parallelism."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the run failed, 2 something to fix for the user, 130 interrupted.

    `train` has one more: 75, stopped before the last step (see `trainer.launching.exit_status`).
    """
    print_everything()
    quieten()
    remember_interrupts()
    try:
        # The words are kept as the context's object: some verbs show their own command with a change.
        words = sys.argv[1:] if arguments is None else list(arguments)
        with hidden():
            app(args=words, prog_name="diffusionpipe", obj=tuple(words))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # Code in C may have turned Ctrl-C into an error of its own.
        if was_interrupted():
            sys.exit(130)
        sys.exit(_explained(error))


def _explained(error: Exception) -> int:
    """Print the error that ended the command and return the exit status; an error that is not ours is raised again.

    Errors of the disk, such as "no space left", count as ours.
    """
    if isinstance(error, DiffusionPipeError):
        _print_error(error)
        return 1 if isinstance(error, PeerError | TrainingError) else 2
    if isinstance(error, OSError):
        from diffusionpipe.runtime.machine.error_file import disk_problem

        if problem := disk_problem(error):
            _print_error(ConfigError(problem))
            return 2
    raise error


def _print_error(error: DiffusionPipeError) -> None:
    """Print the error as one block on stderr. Lines are not wrapped, so that paths and commands can be copied."""
    from rich.console import Console
    from rich.text import Text

    # An error without a text still says its kind.
    first, *rest = str(error).splitlines() or [type(error).__name__]
    block = Text.assemble(("error: ", "bold red"), first, *(f"\n  {line.strip()}" for line in rest))
    Console(stderr=True).print(block, soft_wrap=True, highlight=False)
