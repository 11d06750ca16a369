"""The instructions of an iteration, each bound to the size of the samples that it works on.

A trace of a model keeps the numbers of the size for which it was made: a table of positions, a shape. At another size
of as many tokens it runs without an error and gives wrong numbers. So no instruction serves two sizes: there is one for
each action and each size, and an iteration takes the ones for the sizes in its rows.

    cells of the batch     0: 512 x 768     1: 768 x 512     2: 512 x 768
    program                F0 of 512 x 768, F1 of 768 x 512, F2 of 512 x 768, ...

An instruction is made when its size comes up for the first time, and stays.
"""

from collections.abc import Callable, Sequence

from diffusionpipe.ir import Action, Op, Range
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.compiler import Compiler, Instruction

_MOST = 4096
"""The most instructions that a program keeps. Fills and messages of many cells have one for each combination of
their sizes."""
Sizes = tuple[int, ...]


class Program:
    """The instructions of one worker's iteration for any sizes of samples. Mutable: it keeps those that it has made."""

    def __init__(self, steps: Sequence[Action | Callable[[], None]], compilers: Sequence[Compiler]) -> None:
        """`compilers`: one for each size of samples; `steps`: actions, and functions that are run as they are."""
        self._steps, self._compilers = tuple(steps), tuple(compilers)
        self._rows = [self._rows_of(step) for step in steps]
        self._kept: dict[tuple[int, Sizes], Instruction] = {}
        self._last: tuple[tuple[Sizes, Sizes], list[Instruction]] | None = None

    def instructions(self) -> list[Instruction]:
        """The (wait, run) of every step, in order, for the sizes of the samples that are in the stores now."""
        first = self._compilers[0]
        sizes = first.reading.sizes, first.writing.sizes
        if self._last is None or self._last[0] != sizes:
            if len(self._kept) > _MOST:
                self._kept.clear()
            self._last = sizes, [self._instruction(number) for number in range(len(self._steps))]
        return self._last[1]

    def _instruction(self, number: int) -> Instruction:
        step, rows = self._steps[number], self._rows[number]
        if not isinstance(step, Action):
            return None, step
        sizes: Sizes = () if rows is None else rows[0].sizes_in(rows[1])
        key = number, sizes
        if key not in self._kept:
            # Fills and messages of frozen outputs are cut by cells; all else has the size of its micro-batch.
            self._kept[key] = self._compilers[sizes[0] if len(sizes) == 1 else 0].instruction(step)
        return self._kept[key]

    def _rows_of(self, step: Action | Callable[[], None]) -> tuple[RowStore, Range] | None:
        """The store and the rows in it whose sizes an instruction depends on; None: on none."""
        if not isinstance(step, Action):
            return None
        compiler = self._compilers[0]
        schedule = compiler.schedule
        if step.op is Op.ENCODE:
            assert step.slot is not None
            return compiler.writing, schedule.fills[step.slot].samples
        if step.slot is not None and step.op in (Op.SEND_F, Op.RECV_F):
            message = schedule.messages[step.slot]
            if schedule.placement.is_frozen(message.source):
                return compiler.writing, message.samples
        if step.microbatch is None:
            return None
        return compiler.reading, schedule.placement.pipeline_of(step.stage).rows(step.microbatch)
