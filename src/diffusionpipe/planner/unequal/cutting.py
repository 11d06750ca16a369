"""Cuts each step of a run into micro-batches of unequal tokens, by a plan for equal ones of the largest size.

A micro-batch may hold as many bytes of the tensors between layers as the plan's. Times are counted operations, because
all ranks cut alike: a micro-batch with fewer operations than the plan's counts as long as that, so that small samples
go together.
"""

from collections.abc import Sequence
from functools import cache

from diffusionpipe.costs import ModelGraph, StageCosts
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import COMPUTE_OPS, Action, Op, Plan, Schedule, Sharded
from diffusionpipe.ir.cells import Cell, Cutting
from diffusionpipe.planner.assembly.build import build_orders
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.unequal.steps import Prices, UnequalStep, best_step, numbered
from diffusionpipe.schedules.building.shapes import TRAIN, chain
from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
from diffusionpipe.units import Bytes

_BACKWARD = 2
"""The operations of a backward divided by the operations of its forward."""


def cutting_of(models: Sequence[ModelGraph], plan: Plan) -> Cutting:
    """A function from the number of samples of each size to the training schedule of such a step.

    `models`: the model for each size, largest first.

    Raises:
        ConfigError: the plan has other stages than one a worker, or fills, or has no flush.
    """
    problem = _problem(plan)
    if problem is not None:
        raise ConfigError(
            f'data.batching = "tokens" makes other micro-batches in each step, which needs one stage on each rank; the '
            f'plan {problem}: set pipeline.schedule = "1f1b" and leave out the key, or use data.batching = "samples"'
        )
    layout, prices = _layout(models[0], plan), counted_prices(models, plan)

    @cache
    def cut(counts: tuple[int, ...]) -> Schedule:
        return build_orders(models[0], layout, numbered_by_size(best_step(counts, prices)))

    return cut


def numbered_by_size(step: UnequalStep) -> Schedule:
    """The schedule of a step over one stage on each worker, with micro-batches numbered size by size."""
    by_size = sorted(range(len(step.cells)), key=step.cells.__getitem__)
    number_of = {microbatch: number for number, microbatch in enumerate(by_size)}
    orders = [[numbered(action, action.stage, number_of) for action in order] for order in step.orders]
    return chain("unequal", orders, microbatches=[step.cells[one].samples for one in by_size], ops=TRAIN)


def counted_prices(models: Sequence[ModelGraph], plan: Plan) -> Prices:
    """The prices of micro-batches of each size: times are counted operations.

    Memory is the bytes of the tensors between layers. `models`: the model for each size, largest first.
    """
    most = max(plan.train.placement.pipelines[0].microbatches)
    again = frozenset(plan.checkpointed)
    held = [[_written(model, block) for block in plan.blocks[:-1]] for model in models]
    work = [
        # Without counted operations the bytes that it writes take their place.
        [_operations(model, block) or own for block, own in zip(plan.blocks[:-1], bytes_, strict=True)]
        for model, bytes_ in zip(models, held, strict=True)
    ]
    # A recomputed block runs its forward again.
    factors = [_BACKWARD + any(name in again for name in block) for block in plan.blocks[:-1]]

    def costs(cell: Cell) -> tuple[StageCosts, ...]:
        counted = [
            max(own * cell.samples, largest * most) for own, largest in zip(work[cell.size], work[0], strict=True)
        ]
        return tuple(
            StageCosts(forward=own, backward=factor * own, activation=cell.samples * num_bytes)
            for own, factor, num_bytes in zip(counted, factors, held[cell.size], strict=True)
        )

    num_stages = len(work[0])
    # As 1F1B holds with the plan's own micro-batches.
    limits = tuple((num_stages - stage) * most * num_bytes for stage, num_bytes in enumerate(held[0]))
    return Prices(stages=cache(costs), num_stages=num_stages, limits=limits)


def _operations(model: ModelGraph, block: Sequence[str]) -> int:
    """The number of operations of one sample's forward through a block; 0 if the model has no counts."""
    return sum(model.layer(name).flops for name in block)


def _written(model: ModelGraph, block: Sequence[str]) -> Bytes:
    """The bytes of one sample of all tensors that a block's layers write."""
    return sum(model.tensor(name).num_bytes for layer in block for name in model.layer(layer).writes)


def _problem(plan: Plan) -> str | None:
    """Words for the property of a plan that does not allow other micro-batches in each step; None if there is none."""
    train = plan.train
    trained = [one for one in train.placement.pipelines if Op.ENCODE not in one.ops]
    stages = {train.placement.stages[stage].worker for one in trained for stage in one.stages}
    problems = {
        "trains without a flush (pipeline.versions)": bool(train.lead),
        "encodes ahead (pipeline.fill)": plan.is_filled,
        "has sharded copies (pipeline.sharded)": plan.mesh.sharded is not Sharded.NONE,
        "splits its backwards (pipeline.schedule)": any(Op.W in one.ops for one in trained),
        "has several stages on a rank, or replicas (pipeline.schedule, pipeline.replicas)": len(trained) > 1
        or len(trained[0].stages) != len(stages)
        or len(plan.blocks) - 1 != len(stages),
        f"has an order that no step would have, {train.name} (pipeline.schedule)": _computing(train)
        != one_f_one_b(len(trained[0].stages), len(trained[0].microbatches)).orders,
    }
    return next((words for words, is_so in problems.items() if is_so), None)


def _computing(train: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(action for action in order if action.op in COMPUTE_OPS) for order in train.orders)


def _layout(model: ModelGraph, plan: Plan) -> Layout:
    """The layout from which a plan with one stage on each worker can be made."""
    frozen, fills = plan.blocks[-1], plan.encoding.fills
    chunks = {
        model.layer(frozen[layer]).component: max(
            len(fill.samples) for fill in fills if fill.layers.start <= layer < fill.layers.stop
        )
        for layer in range(len(frozen))
        if any(fill.layers.start <= layer < fill.layers.stop for fill in fills)
    }
    return Layout(
        batch=plan.batch,
        stages=plan.mesh.pipeline,
        microbatches=len(plan.train.placement.pipelines[0].microbatches),
        data_parallel=plan.mesh.data_parallel,
        adjacent=plan.mesh.adjacent,
        splits=tuple(block[0] for block in plan.blocks[1:-1]),
        checkpointed=plan.checkpointed,
        encoders=plan.encoders,
        encode_chunk=max(chunks.values(), default=1),
        encode_chunks=tuple(chunks.items()),
    )
