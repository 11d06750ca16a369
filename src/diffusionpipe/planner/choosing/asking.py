"""Texts that tell a user how to ask for another plan than the chosen one, in words or as a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.units import Bytes


class Asking(Protocol):
    """Texts that name the way to another plan, as words or a command; each comes after a colon."""

    def use(self, ranks: Sequence[int]) -> str:
        """The text that asks for a plan on these ranks alone."""
        ...

    def changed(self, options: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
        """The text that asks for a plan with these (option, value) pairs, or a recipe with these keys; "" for none.

        A key is "" where its option holds for recipes too.
        """
        ...

    def memory(self, num_bytes: Bytes) -> str:
        """The text that asks for a plan that takes at most `num_bytes` of each device, rounded up as `gib_of` does."""
        ...


@dataclass(frozen=True, slots=True)
class InWords:
    """Texts that name options of `plan` and keys of a recipe, for a caller without a command to repeat."""

    used: tuple[int, ...] = ()
    """The ranks of the cluster that were planned for; () for all."""

    def use(self, ranks: Sequence[int]) -> str:
        """The option of `plan` and the key of a recipe that ask for these ranks alone."""
        text = listed(among(self.used, ranks))
        return f"plan --use {text}, or pipeline.use=[{text}] in a recipe"

    def changed(self, options: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
        """The keys of a recipe, separated by commas; for an option without a key, "a machine such as VALUE"."""
        return ", ".join(key or f"a machine such as {value}" for (_, value), key in zip(options, keys, strict=True))

    def memory(self, num_bytes: Bytes) -> str:
        """The option of `plan` and the key of a recipe that limit the memory to `num_bytes` of each device."""
        return f"plan --memory {gib_of(num_bytes)}, or pipeline.memory={gib_of(num_bytes)} in a recipe"


IN_WORDS = InWords()


def among(used: Sequence[int], ranks: Sequence[int]) -> Sequence[int]:
    """The numbers in the whole cluster of ranks that are counted among the `used` ranks; `used` is () for all ranks."""
    return [used[rank] for rank in ranks] if used else ranks


def listed(ranks: Sequence[int]) -> str:
    """The ranks as a text, such as "0,1,3"."""
    return ",".join(map(str, ranks))


def gib_of(num_bytes: Bytes) -> str:
    """The number of GiB as a text, rounded up at the second decimal, such as "22.5"."""
    return f"{-(-num_bytes * 100 // GIB) / 100:g}"
