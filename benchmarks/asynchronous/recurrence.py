"""Training without a flush in one process: the recurrence, with every version of the weights that is still read.

    w_s[v+1] = update( w_s[v],  d loss / d w_s  with forwards on { w_j[v - a_j] } and backwards on { w_j[v - b_j] } )

A pipeline does the same (`tests/benchmarks/test_asynchronous.py`), but needs a process or a thread for each stage.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from diffusionpipe.ir import Op, Plan
from diffusionpipe.ir.versions import staleness_of

Row = tuple[int, ...]
"""The age of the weights of each stage, in steps."""


class Steps(Protocol):
    """An optimizer, or several in one."""

    def step(self) -> object:
        """Change the parameters by their gradients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a batch whose weights have the same ages; several micro-batches are one part where nothing differs."""

    rows: tuple[int, ...]
    forward: Row
    backward: Row


def parts_of(plan: Plan) -> tuple[Part, ...]:
    """The parts of a plan's batch, in the order of its micro-batches."""
    pipeline = plan.train.placement.pipelines[0]  # that of the encoders comes behind it
    table = staleness_of(plan.train)
    found: dict[tuple[Row, Row], list[int]] = {}
    for microbatch in range(len(pipeline.microbatches)):
        ages = [tuple(table[stage, op][microbatch] for stage in pipeline.stages) for op in (Op.F, Op.B)]
        rows = pipeline.rows(microbatch)
        found.setdefault((ages[0], ages[1]), []).extend(range(rows.start, rows.stop))
    return tuple(
        Part(rows=tuple(rows), forward=forward, backward=backward) for (forward, backward), rows in found.items()
    )


class Recurrence:
    """Mutable: the parameters, which show the newest version between steps, and older versions of them."""

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Parameter]],
        parts: Sequence[Part],
        optimizers: Sequence[Steps],
        *,
        is_predicted: bool = False,
    ) -> None:
        """`is_predicted`: weights that are old are read as if the last step before them went on."""
        self.stages = [list(stage) for stage in stages]
        self.parts = tuple(parts)
        self._optimizers, self._is_predicted = optimizers, is_predicted
        kept = 2 + max(age for part in parts for age in (*part.forward, *part.backward))
        self._versions = [deque([[p.detach().clone() for p in stage]], maxlen=kept) for stage in self.stages]
        self._step = self._first = 0

    def flush(self) -> None:
        """From now on nothing reads a version older than the present one."""
        self._first = self._step

    def step(self, loss_of: Callable[[tuple[int, ...]], Tensor], clip: Callable[[], object] = lambda: None) -> float:
        """One update of every stage; returns the loss, the sum of that of all parts.

        `loss_of` returns the share of some rows in the loss; `clip` sees the gradients of all stages.
        """
        for stage in self.stages:
            for parameter in stage:
                parameter.grad = None
        total = 0.0
        for part in self.parts:
            is_rewritten = part.forward != part.backward
            self._show(part.forward, is_rewritten=is_rewritten)
            loss = loss_of(part.rows)
            if is_rewritten:
                self._rewrite(part.backward)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        for versions, stage in zip(self._versions, self.stages, strict=True):
            newest = [value.clone() for value in versions[-1]]
            for parameter, value in zip(stage, newest, strict=True):
                parameter.data = value
            versions.append(newest)
        clip()
        for optimizer in self._optimizers:
            optimizer.step()
        self._step += 1
        return total

    def _read(self, stage: int, age: int) -> list[Tensor]:
        age = min(age, self._step - self._first)
        versions = self._versions[stage]
        values = versions[-1 - age]
        if self._is_predicted and age and self._step - age > 0:
            before = versions[-2 - age]
            return [value + age * (value - old) for value, old in zip(values, before, strict=True)]
        return values

    def _show(self, ages: Row, *, is_rewritten: bool) -> None:
        for index, (stage, age) in enumerate(zip(self.stages, ages, strict=True)):
            for parameter, value in zip(stage, self._read(index, age), strict=True):
                parameter.data = value.clone() if is_rewritten else value

    @torch.no_grad()
    def _rewrite(self, ages: Row) -> None:
        """In place, so that also those backwards read the other version whose forward saved a view of the weights."""
        for index, (stage, age) in enumerate(zip(self.stages, ages, strict=True)):
            with _unsafe_preserve_version_counter(tuple(stage)):
                torch._foreach_copy_([parameter.detach() for parameter in stage], self._read(index, age))


def mean_ages(parts: Sequence[Part]) -> tuple[float, ...]:
    """For each stage the mean age of the weights that its forwards read."""
    count = sum(len(part.rows) for part in parts)
    stages = range(len(parts[0].forward))
    return tuple(sum(len(part.rows) * part.forward[stage] for part in parts) / count for stage in stages)
