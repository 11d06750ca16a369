"""Weights that are kept in bfloat16: widened for an update, and rounded after it.

    w (bfloat16)  ->  wide (float32)  ->  the optimizer's step  ->  rounded to w

Most updates are smaller than the last digit of a bfloat16 number, so the nearest number would be the old one. Two ways:

- **stochastic**: up or down, in proportion to the distances, so that the mean of many roundings is the number itself
  (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.1). The random bits follow from
  the seed, the parameter's name, the step and the element's place, so any layout rounds alike.
- **kahan**: to the nearest, and the rest that this leaves is kept in a second bfloat16 number (Zamirai et al.,
  "Revisiting BFloat16 Training", 2020, algorithm 3). The sum of both has about 16 bits.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

NARROW = torch.bfloat16
ERROR = "rounding_error"
"""The name of the rounding error, Kahan's second number, among a parameter's saved states."""
_CHUNK = 2**22
"""The number of elements that are rounded at a time: each needs some 20 bytes meanwhile."""
_LOW = 2**16 - 1
"""The bits of a float32 number that bfloat16 lacks."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The seed and the kind, stochastic or Kahan's, by which a run rounds its weights to bfloat16."""

    seed: int
    """The seed of the random bits of stochastic rounding."""
    is_kahan: bool = False
    """Whether weights are rounded to the nearest number and the error is kept (Kahan); else stochastically."""


class NarrowParameter:
    """A parameter that is kept in bfloat16, with a stand-in that is float32 during an update and empty otherwise."""

    def __init__(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], rounding: Rounding) -> None:
        """Makes the empty stand-in. `name`: the parameter's canonical name; `shape`: the shape that is stepped."""
        self.parameter = parameter
        self.error: Tensor | None = None
        """The error of the last rounding of each number, if it is kept; None before the first step."""
        self._name, self._rounding = name, rounding
        # A shape without memory: classes look at shapes when they are made.
        self._nothing = torch.zeros((), dtype=torch.float32, device=parameter.device).expand(shape)
        self.stand_in = nn.Parameter(self._nothing)

    @property
    def keeps_error(self) -> bool:
        """Whether the error of the rounding is kept for each element, as a second bfloat16 number (Kahan's way)."""
        return self._rounding.is_kahan

    @torch.no_grad()
    def widen(self) -> None:
        """Gives the stand-in the parameter's values and gradient in float32."""
        wide = self.parameter.detach().float()
        if self.error is not None:
            wide += self.error
        shape = self.stand_in.shape
        self.stand_in.data = wide.view(shape)
        gradient = self.parameter.grad
        self.stand_in.grad = None if gradient is None else gradient.float().reshape(shape)

    @torch.no_grad()
    def narrow(self, step: int) -> None:
        """Writes the stand-in's values after update `step`, rounded, into the parameter, and frees the stand-in."""
        wide = self.stand_in.detach().reshape(-1)
        own = self.parameter.detach().view(-1)
        if self.keeps_error:
            own.copy_(wide)
            rest = wide.sub_(own)  # exact: both have float32's digits
            self.error = rest.to(NARROW).view(self.parameter.shape)
        else:
            round_into(own, wide, key_of(self._rounding.seed, self._name, step))
        self.stand_in.grad = None
        self.stand_in.data = self._nothing


def round_into(own: Tensor, wide: Tensor, key: tuple[int, int]) -> None:
    """Writes float32 numbers (N,) into bfloat16 ones `own`, rounded up or down by the random bits of the key."""
    for start in range(0, len(wide), _CHUNK):
        part = slice(start, start + _CHUNK)
        own[part] = rounded(wide[part], key, start)


def rounded(values: Tensor, key: tuple[int, int], start: int = 0) -> Tensor:
    """Float32 numbers (N,) as bfloat16, rounded up or down by random bits, which follow from key and index.

    `start`: the index of the first one in its tensor. Numbers that are not finite stay as they are.
    """
    places = torch.arange(start, start + len(values), dtype=torch.int64, device=values.device)
    noise = _mixed((_mixed(places ^ key[0]) + key[1]) & _WORD) >> 16  # 16 of 32 bits
    # Random bits are added below the digits of bfloat16, and the low bits are cut. The carry rounds up as often as the
    # rest is large. Numbers of both signs are rounded by magnitude.
    bits = values.view(torch.int32) + noise.to(torch.int32)
    found = (bits & ~_LOW).view(torch.float32).to(NARROW)
    return torch.where(values.isfinite(), found, values.to(NARROW))


_WORD = 2**32 - 1


def _mixed(words: Tensor) -> Tensor:
    """A hash of each word of 32 bits, in int64: the finaliser of MurmurHash3 (A. Appleby)."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def key_of(seed: int, name: str, step: int) -> tuple[int, int]:
    """Two 32-bit numbers from seed, tensor name and update `step`, the key of the bits for rounding."""
    digest = blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
