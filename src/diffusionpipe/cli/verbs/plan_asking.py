"""The command that asks for another plan: the one that was given, with its option for devices or memory changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffusionpipe.planner.asking import among, gib_of, listed

if TYPE_CHECKING:
    from diffusionpipe.units import Bytes


def ranks_named(text: str | None) -> tuple[int, ...]:
    """The ranks of an option, ascending; () for none.

    Raises:
        ConfigError: it is not a list of numbers, or names a rank twice.
    """
    from diffusionpipe.errors import ConfigError

    words = text.split(",") if text is not None else []
    wrong = [word for word in words if not (word.strip().isdecimal() and len(word) < 10)]
    if wrong:
        raise ConfigError(f"--use {text}: {wrong[0]!r} is not a rank; give ranks with commas between, e.g. 0,1,3")
    ranks = [int(word) for word in words]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"--use {text} names a rank twice; name each rank once")
    return tuple(sorted(ranks))


def check_memory(memory: float | None) -> None:
    """Refuse a number that is not an amount of memory.

    Raises:
        ConfigError: it is not above 0, or is infinite.
    """
    from diffusionpipe.errors import ConfigError

    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigError(f"--memory {memory}: give more than 0 GiB, e.g. 20.5, or leave it out")


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """An `Asking` in whole commands."""

    arguments: tuple[str, ...]
    """The arguments of the command line after the program's name."""
    used: tuple[int, ...]
    """The ranks of the cluster that this command plans for; () for all."""

    def use(self, ranks: Sequence[int]) -> str:
        """For a plan on these ranks alone, which are counted among the used ones."""
        return self._with("--use", listed(among(self.used, ranks)))

    def memory(self, num_bytes: Bytes) -> str:
        """The way to a plan that takes at most `num_bytes` of each device."""
        return self._with("--memory", gib_of(num_bytes))

    def _with(self, option: str, value: str) -> str:
        kept, words = [], iter(self.arguments)
        for word in words:
            if word == option:
                next(words, None)
            elif not word.startswith(f"{option}="):
                kept.append(word)
        return shlex.join(["diffusionpipe", *kept, option, value])
