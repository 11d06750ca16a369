"""What the stages of a simulated cell cost: the same model for every family, cut as its placement wants."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ordering import HalfStage
from diffusionpipe.ordering.instance import Number

PART = 120
"""Ticks of F, of I and of W of 1/p of the model: all times are whole numbers, so that nothing is rounded."""
PROFILES = ("equal", "uneven")
LATENCIES: Mapping[str, int] = MappingProxyType({"0": 0, "0.1 F": PART // 10})
"""Of a message between two ranks, in ticks."""
STAGES_TOLD: Mapping[str, int] = MappingProxyType({"zb-1p": 1, "zb-2p": 1, "zb-v": 2, "v-half": 2, "v-min": 2})
"""The families whose generators take costs and latency, and their stages on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Sizes and costs."""

    ranks: int
    microbatches: int
    profile: str
    """One of PROFILES."""
    latency: str
    """One of LATENCIES."""

    @property
    def halves(self) -> tuple[int, ...]:
        """Ticks of F = I = W of the 2p half-stages in forward order; their mean is PART / 2.

        equal     all the same
        uneven    rising from 40 at both ends of the model to 80 in its middle, as in a U-Net twice as dear there
        """
        p = self.ranks
        if self.profile == "equal":
            return (PART // 2,) * (2 * p)
        rising = [round(PART / 3 * (1 + stage / (p - 1))) for stage in range(p)]
        return (*rising, *reversed(rising))

    @property
    def comm(self) -> int:
        """Ticks of a message."""
        return LATENCIES[self.latency]

    @property
    def work(self) -> int:
        """Ticks that all ranks together compute."""
        return 3 * self.microbatches * sum(self.halves)

    @property
    def one_f_one_b_peak(self) -> int:
        """What 1F1B holds, in activations of half-stages."""
        return 2 * min(self.ranks, self.microbatches)

    def half_stages(self) -> tuple[HalfStage, ...]:
        """As the search wants them; all hold one activation."""
        return tuple(
            HalfStage(forward=t, input_grad=t, weight_grad=t, activation=1, kept_after_input_grad=1)
            for t in self.halves
        )

    def limit(self, share: float) -> int:
        """That share of what 1F1B holds, in whole activations of half-stages; at most what all micro-batches hold."""
        return int(min(share * self.one_f_one_b_peak, 2 * self.microbatches) + 1e-9)

    def stage_costs(self, num_blocks: int) -> tuple[StageCosts, ...]:
        """Costs of p or of 2p blocks in forward order."""
        halves = self.halves
        each = len(halves) // num_blocks
        if each * num_blocks != len(halves):
            raise ValueError(f"{num_blocks} blocks for {self.ranks} ranks; the profile knows p and 2p")
        times = [sum(halves[each * block : each * (block + 1)]) for block in range(num_blocks)]
        return tuple(
            StageCosts(
                forward=time,
                backward=2 * time,
                input_grad=time,
                weight_grad=time,
                activation=each,
                kept_after_input_grad=each,
            )
            for time in times
        )

    def costs(self, blocks: tuple[int, ...]) -> Costs:
        """Of a schedule, whose stages hold these blocks."""
        each = self.stage_costs(len(set(blocks)))
        return Costs(stages=tuple(each[block] for block in blocks), link=Link(latency=self.comm))

    def in_parts(self, ticks: Number) -> float:
        """A time in F of 1/p of the model."""
        return ticks / PART
