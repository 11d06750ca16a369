"""How a user asks for another plan than the one that is chosen, in words or as a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.units import Bytes


class Asking(Protocol):
    """Texts that name the way to another plan; each comes after a colon."""

    def use(self, ranks: Sequence[int]) -> str:
        """For a plan on these ranks alone."""
        ...

    def changed(self, options: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
        """For a plan with these options and values, or for a recipe with these keys ("" where the option holds).

        "" where there is no such way.
        """
        ...

    def memory(self, num_bytes: Bytes) -> str:
        """The way to a plan that takes at most `num_bytes` of each device, rounded up as `gib_of` does."""
        ...


@dataclass(frozen=True, slots=True)
class InWords:
    """The options and keys in words, for a reader who does not know the command."""

    used: tuple[int, ...] = ()
    """The ranks of the cluster that were planned for; () for all."""

    def use(self, ranks: Sequence[int]) -> str:
        """The option of `plan` and the key of a recipe that give these ranks."""
        text = listed(among(self.used, ranks))
        return f"plan --use {text}, or pipeline.use=[{text}] in a recipe"

    def changed(self, options: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
        """The keys of a recipe, and in place of a cluster's option the machine."""
        return ", ".join(key or f"a machine such as {value}" for (_, value), key in zip(options, keys, strict=True))

    def memory(self, num_bytes: Bytes) -> str:
        """The option of `plan` and the key of a recipe that limit the memory."""
        return f"plan --memory {gib_of(num_bytes)}, or pipeline.memory={gib_of(num_bytes)} in a recipe"


IN_WORDS = InWords()


def among(used: Sequence[int], ranks: Sequence[int]) -> Sequence[int]:
    """The ranks of the whole cluster that are these of the used ones; () stands for all."""
    return [used[rank] for rank in ranks] if used else ranks


def listed(ranks: Sequence[int]) -> str:
    """E.g. "0,1,3"."""
    return ",".join(map(str, ranks))


def gib_of(num_bytes: Bytes) -> str:
    """In GiB, rounded up at the second decimal."""
    return f"{-(-num_bytes * 100 // GIB) / 100:g}"
