"""The command that asks for another plan: the one that was given, with its option for devices or memory changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffusionpipe.planner.choosing.asking import among, gib_of, listed

if TYPE_CHECKING:
    from diffusionpipe.units import Bytes


def ranks_named(text: str | None) -> tuple[int, ...]:
    """The ranks in the text of --use, e.g. "0,1,3", ascending; () for None.

    Raises:
        ConfigError: it is not a list of numbers, or names a rank twice.
    """
    from diffusionpipe.errors import ConfigError

    words = text.split(",") if text is not None else []
    # No rank has ten digits, and Python refuses int() of very long texts.
    wrong = [word for word in words if not (word.strip().isdecimal() and len(word) < 10)]
    if wrong:
        raise ConfigError(f"--use {text}: {wrong[0]!r} is not a rank; give ranks with commas between, e.g. 0,1,3")
    ranks = [int(word) for word in words]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"--use {text} names a rank twice; name each rank once")
    return tuple(sorted(ranks))


def batches_named(text: str | None) -> tuple[int, ...]:
    """The batches in the text of --batch, e.g. "8,16", ascending, each once; () for None and for "auto".

    Raises:
        ConfigError: it is not a list of whole numbers from 1 to `MOST_SAMPLES`.
    """
    from diffusionpipe.errors import ConfigError

    if text in (None, AUTO):
        return ()
    words = [word.strip() for word in str(text).split(",")]
    if not all(word.isdecimal() and len(word) < 10 and 1 <= int(word) <= MOST_SAMPLES for word in words):
        raise ConfigError(
            f"--batch {str(text)[:100]}: give a whole number from 1 to {MOST_SAMPLES:,}, several with commas between, "
            f"e.g. 8,16,32, or {AUTO}"
        )
    return tuple(sorted({int(word) for word in words}))


def check_memory(memory: float | None) -> None:
    """Refuses a value of --memory that is not an amount of memory; None passes.

    Raises:
        ConfigError: it is not above 0, or is infinite.
    """
    from diffusionpipe.errors import ConfigError

    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigError(f"--memory {memory}: give more than 0 GiB, e.g. 20.5, or leave it out")


AUTO = "auto"
MOST_SAMPLES = 1_000_000
_OF_LAYERS = ("--frozen-dtype", "--lora-rank", "--resolution")
"""Options that change the layers: a profile in a file then belongs to other layers."""


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """The given command line of `plan`, from which commands for other plans are made, as text to copy."""

    arguments: tuple[str, ...]
    """The arguments of the command line after the program's name."""
    used: tuple[int, ...]
    """The ranks of the cluster that this command plans for; () for all."""
    has_recipe: bool = False
    """Whether the command names a recipe, whose keys change in place of options."""

    def use(self, ranks: Sequence[int]) -> str:
        """The command that plans for these ranks alone; `ranks`: their numbers among the used ranks."""
        return self._with("--use", listed(among(self.used, ranks)))

    def memory(self, num_bytes: Bytes) -> str:
        """The command that plans with at most `num_bytes` of memory on each device."""
        return self._with("--memory", gib_of(num_bytes))

    def changed(self, options: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
        """The command with these options (name, value), or for a recipe these `keys`, one for each option.

        `keys` are texts "section.key=value", or "" where a recipe has no key for the option. The result is "" where
        options change the layers, the command has the file of a profile, and there is no recipe.
        """
        command = self
        if self._gives("--profile") and any(option in _OF_LAYERS for option, _ in options):
            if not self.has_recipe:
                return ""
            command = replace(self, arguments=self._without("--profile"))  # it is of other layers
        for (option, value), key in zip(options, keys, strict=True):
            # An option of the command wins over the recipe's key, so it is the one to change.
            if self.has_recipe and key and not self._gives(option):
                command = replace(command, arguments=(*command.arguments, key))
            else:
                command = replace(command, arguments=command.with_option(option, value))
        return shlex.join(["diffusionpipe", *command.arguments])

    def _with(self, option: str, value: str) -> str:
        return shlex.join(["diffusionpipe", *self.with_option(option, value)])

    def with_option(self, option: str, value: str) -> tuple[str, ...]:
        """The arguments of the command line with this value of an option, in place of its old value if it has one.

        The option --cluster replaces --devices and --link too.
        """
        others = ("--devices", "--link") if option == "--cluster" else ()
        return (*self._without(option, *others), option, value)

    def _gives(self, option: str) -> bool:
        return any(word == option or word.startswith(f"{option}=") for word in self.arguments)

    def _without(self, *options: str) -> tuple[str, ...]:
        """The arguments without these options and their values."""
        # An option is two words, or one with "=".
        kept, words = [], iter(self.arguments)
        for word in words:
            if word in options:
                next(words, None)
            elif not word.startswith(tuple(f"{option}=" for option in options)):
                kept.append(word)
        return tuple(kept)
