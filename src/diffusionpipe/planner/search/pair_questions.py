"""Makes the questions to the two-sided dynamic program for a setting with two backbones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from diffusionpipe.planner.pricing.arrangement import Arrangement, RankLayout
from diffusionpipe.planner.pricing.layer_table import LayerSums
from diffusionpipe.planner.search.dynamic_program import LinkTime, StageTime
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.two_sided import TwoSidedQuestion
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, kw_only=True)
class PairPlace:
    """An arrangement of ranks with the micro-batches of both backbones, which prices their stages and links."""

    judge: Judge
    arrangement: Arrangement
    microbatches: tuple[int, int]

    @property
    def ground(self) -> RankLayout:
        """The arrangement on the setting's cluster."""
        return self.judge.tables.ground(self.arrangement)

    @property
    def num_layers(self) -> tuple[int, int]:
        """(number of layers of the first backbone, number of layers of the second)."""
        _, border, end = self.judge.tables.borders
        return border, end - border

    def samples(self, backbone: int) -> float:
        """The number of samples of a micro-batch of this backbone in a stage of one unit."""
        return self.judge.tables.unit_samples(self.arrangement, self.microbatches[backbone])

    def sums(self, backbone: int, replicas: int = 1) -> LayerSums:
        """The sums over all trained layers for a replica's samples of a micro-batch of this backbone."""
        return self.judge.tables.table.sums(self.samples(backbone) / replicas, self.microbatches[backbone])

    def work(self, backbone: int, replicas: int = 1) -> list[Seconds]:
        """Running sums of the seconds of forward and backward over this backbone's layers, from 0."""
        sums, start = self.sums(backbone, replicas), self.judge.tables.borders[backbone]
        first = sums.forward[start] + sums.backward[start]
        stop = start + self.num_layers[backbone] + 1
        return [f + b - first for f, b in zip(sums.forward[start:stop], sums.backward[start:stop], strict=True)]

    def _of_layers(self, backbone: int, replicas: int) -> list[Seconds]:
        """The seconds of forward and backward of each layer of this backbone, summed over its replicas."""
        return [replicas * (after - before) for before, after in pairwise(self.work(backbone, replicas))]

    def stage(self, backbone: int, first: int, stop: int, position: int, replicas: int) -> StageTime:
        """(forward, backward, gradient sum) in seconds of a backbone's layers `first`, ..., `stop` - 1.

        They are on `replicas` devices from `position` on.
        """
        sums, start, ground = self.sums(backbone, replicas), self.judge.tables.borders[backbone], self.ground
        first, stop = first + start, stop + start
        devices = range(position, position + replicas)
        speed = min(ground.speeds[position : position + replicas])
        return (
            (sums.forward[stop] - sums.forward[first]) / speed,
            (sums.backward[stop] - sums.backward[first]) / speed,
            self.judge.tables.reduction(ground, first, stop, devices),
        )

    def link(self, backbone: int, cut: int, position: int, before: int, behind: int) -> LinkTime:
        """(forward, back) seconds of the transfer across a cut of a backbone, before layer `cut`.

        `before` devices up to `position` send to `behind` devices from it on.
        """
        way = self.ground.link(position - before, before, position, behind)
        forward, backward = self.judge.tables.table.crossing[cut + self.judge.tables.borders[backbone]]
        amount = self.samples(backbone) / min(before, behind)
        return way.transfer(round(amount * forward)), way.transfer(round(amount * backward)) if backward else 0.0

    def listed(self, backbone: int, first: int, stop: int, position: int, replicas: int) -> StageTimes:
        """The times of a stage as list scheduling takes them; its latency is the transfer at its slower end."""
        forward, backward, _ = self.stage(backbone, first, stop, position, replicas)
        inner = [cut for cut in (first, stop) if 0 < cut < self.num_layers[backbone]]
        # The first device has no link before it: the one after it counts.
        latency = max((self.link(backbone, cut, max(position, 1), 1, 1)[0] for cut in inner), default=0.0)
        return StageTimes(forward=forward, backward=backward, latency=latency)

    @cached_property
    def _span_bytes(self) -> Callable[[int, int, int, int, int], tuple[Bytes, Bytes, Bytes]]:
        """A function (backbone, first, stop, replicas, in flight) -> bytes of (activations, workspace, all else)."""

        def span_bytes(
            backbone: int, first: int, stop: int, replicas: int, in_flight: int
        ) -> tuple[Bytes, Bytes, Bytes]:
            start = self.judge.tables.borders[backbone]
            stage = (first + start, stop + start, self.microbatches[backbone], self.samples(backbone) / replicas)
            use = self.judge.footprint.use([stage], [(in_flight, 0)], is_host=False)
            return use.activations, use.workspace, use.total - use.activations - use.workspace

        return lru_cache(maxsize=None)(span_bytes)

    def question(self, replicas: tuple[int, ...], *, is_opposed: bool) -> TwoSidedQuestion:
        """The question of cutting both backbones over the devices, in opposite directions or in the same one.

        In the same direction the second backbone's layers are counted from its end. `replicas`: numbers of devices that
        a block may take.
        """
        footprint, memories, num_layers = self.judge.footprint, self.ground.memories, self.num_layers
        frozen = footprint.frozen_bytes + footprint.raw_inputs
        fastest = max(self.ground.speeds)
        # The least time of devices, whichever numbers of replicas the stages have. It is the least of each layer:
        # with another number of replicas for the sums, a difference of two of them could be above the true rest.
        least = [
            [*accumulate((min(times) / fastest for times in zip(*own, strict=True)), initial=0.0)]
            for own in ([self._of_layers(backbone, r) for r in replicas] for backbone in range(2))
        ]

        def span(backbone: int, first: int, stop: int) -> tuple[int, int]:
            if is_opposed or not backbone:
                return first, stop
            return num_layers[1] - stop, num_layers[1] - first

        def stage(backbone: int, first: int, stop: int, position: int, count: int) -> StageTime:
            return self.stage(backbone, *span(backbone, first, stop), position, count)

        def link(backbone: int, cut: int, position: int, before: int, behind: int) -> LinkTime:
            return self.link(backbone, span(backbone, cut, cut)[0], position, before, behind)

        def fits(first: tuple[int, int], second: tuple[int, int], position: int, count: int, blocks: int) -> bool:
            # Stages from here to the second backbone's end: where it runs up, those on the devices before.
            depth = position + 1 if is_opposed else blocks
            held = [
                self._span_bytes(0, *first, count, min(self.microbatches[0], blocks)),
                self._span_bytes(1, *span(1, *second), count, min(self.microbatches[1], depth)),
            ]
            training = sum(one for one, _, _ in held) + max(one for _, one, _ in held)
            # Frozen layers run while nothing of the training is held.
            total = sum(one for _, _, one in held) + frozen + max(footprint.frozen_workspace, training)
            return total <= min(memories[position : position + count])

        # Where all of both backbones fits on every device, memory refuses nothing, and stages need not be asked.
        whole = [self._span_bytes(b, 0, num_layers[b], 1, self.microbatches[b]) for b in range(2)]
        everything = sum(map(sum, whole)) + frozen + footprint.frozen_workspace
        if not is_opposed:
            least[1] = [least[1][-1] - one for one in reversed(least[1])]
        return TwoSidedQuestion(
            num_layers=num_layers,
            num_devices=self.arrangement.units,
            replicas=replicas,
            stage=stage,
            link=link,
            cap=sum(self.microbatches[b] * self.work(b)[-1] for b in range(2)) / min(self.ground.speeds),
            work=(least[0], least[1]),
            fits=fits if everything > min(memories) else lambda *_: True,
        )
