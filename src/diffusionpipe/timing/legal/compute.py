"""The rules of compute actions, fills and reductions."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from diffusionpipe.ir.action import COMPUTE_OPS, Action, Op, compute_action
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.ir.placement import Range
from diffusionpipe.ir.ranges import tiles
from diffusionpipe.ir.schedule import Schedule, lone_blocks

ORDER_OF_OPS = (Op.F, Op.B, Op.I, Op.W)
"""The order in which every stage does its ops for a micro-batch."""


def completeness_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each action that is missing, done twice, on a wrong worker, or not part of the work."""
    stages = schedule.placement.stages
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if stages[action.stage].worker != worker:
                home = stages[action.stage].worker
                yield f"worker {worker}: {action} belongs to worker {home}, where stage {action.stage} lives"
    counts = Counter(action for order in schedule.orders for action in order if action.op in TIMED_OPS)
    expected = dict.fromkeys(
        compute_action(stage, op, microbatch)
        for pipeline in schedule.placement.pipelines
        for stage in pipeline.stages
        for op in pipeline.ops & COMPUTE_OPS
        for microbatch in pipeline.numbers
    )
    for slot, fill in enumerate(schedule.fills):
        expected[Action(stage=fill.stage, op=Op.ENCODE, slot=slot)] = None
    # The usual, legal schedule: no action needs to be looked at.
    if counts.keys() == expected.keys() and counts.total() == len(expected):
        return
    for action in expected:
        if action not in counts:
            yield f"worker {stages[action.stage].worker}: {action} is missing"
    for action, count in counts.items():
        if action not in expected:
            yield f"worker {stages[action.stage].worker}: {action} is not part of the work of stage {action.stage}"
        elif count > 1:
            yield f"worker {stages[action.stage].worker}: {action} is done {count} times"


def fill_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each sample that an encoder stage's fills miss, repeat, or take from outside its share."""
    placement = schedule.placement
    num_layers: dict[int, int] = defaultdict(int)
    # A schedule does not hold the layers of its frozen block, so the largest end of a fill is their number.
    for fill in schedule.fills:
        weights = placement.stages[fill.stage].weights
        num_layers[weights] = max(num_layers[weights], fill.layers.stop)
    for stage in (s for p in placement.pipelines if Op.ENCODE in p.ops for s in p.stages):
        done: dict[int, list[Range]] = defaultdict(list)
        for fill in schedule.fills:
            if fill.stage == stage:
                for sample in range(fill.samples.start, fill.samples.stop):
                    done[sample].append(fill.layers)
        rows = placement.rows(stage, 0)
        layers = Range(0, num_layers[placement.stages[stage].weights])
        where = f"worker {placement.stages[stage].worker}: the fills of encoder stage {stage}"
        for sample in range(rows.start, rows.stop):
            ranges = done.pop(sample, [])
            is_once = tiles(ranges, layers) if layers else len(ranges) == 1  # no layers: raw inputs are passed on
            if not is_once:
                have = ", ".join(map(str, ranges)) or "none"
                yield f"{where} run layers {have} on sample {sample}; each of {layers} must run exactly once"
        for sample in sorted(done):
            yield f"{where} take sample {sample}, which is not in its share {rows}"


def order_problems(schedule: Schedule, positions: Mapping[Action, int]) -> Iterator[str]:
    """One sentence for each op of a stage in the wrong order, and each fill that runs layers after later ones.

    `positions`: action -> its index in its worker's order.
    """
    for pipeline in schedule.placement.pipelines:
        ops = [op for op in ORDER_OF_OPS if op in pipeline.ops]
        for stage in pipeline.stages:
            worker = schedule.placement.stages[stage].worker
            for microbatch in pipeline.numbers:
                actions = [compute_action(stage, op, microbatch) for op in ops]
                reached = [(at, action) for action in actions if (at := positions.get(action)) is not None]
                for (before, first), (after, second) in pairwise(reached):
                    if before > after:
                        yield f"worker {worker}: {second} comes before {first}"
    yield from _layer_order_problems(schedule)


def _layer_order_problems(schedule: Schedule) -> Iterator[str]:
    if not schedule.fills:
        return
    # By component: text encoder and VAE do not read each other, so their layers may take turns.
    reached: dict[tuple[int, str, int], int] = defaultdict(int)
    for worker, action in schedule.actions():
        if action.op is not Op.ENCODE:
            continue
        assert action.slot is not None
        fill = schedule.fills[action.slot]
        samples = range(fill.samples.start, fill.samples.stop)
        if any(reached[fill.stage, fill.component, sample] > fill.layers.start for sample in samples):
            yield f"worker {worker}: {action} runs layers {fill.layers} after later ones of the same samples"
        for sample in samples:
            reached[fill.stage, fill.component, sample] = fill.layers.stop


def reduction_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each reduction that is early, doubled, missing, or on a stage without gradients.

    Nothing for a schedule without any reduction, and for sharded blocks.
    """
    stages = schedule.placement.stages
    # A schedule before `passes.reduction` has none at all, and is not wrong for that.
    reduced = {stages[a.stage].weights for order in schedule.orders for a in order if a.op is Op.REDUCE_GRAD}
    if not reduced:
        return
    sharded = sharded_blocks(schedule)
    trained = {s for p in schedule.placement.pipelines if p.ops & {Op.B, Op.W} for s in p.stages}
    holders: dict[int, set[int]] = defaultdict(set)
    for stage in sorted(trained):
        holders[stages[stage].weights].add(stages[stage].worker)
    seen: dict[int, Counter[int]] = defaultdict(Counter)  # block -> worker -> reductions
    stepped: set[tuple[int, int]] = set()
    for worker, action in schedule.actions():
        block = stages[action.stage].weights
        if block in sharded and action.stage in trained:
            continue
        if action.op is Op.REDUCE_GRAD:
            seen[block][worker] += 1
            if action.stage not in trained:
                yield f"worker {worker}: {action} reduces a stage that has no gradients"
        elif action.op is Op.STEP and block in reduced:  # the next batch begins
            if seen[block].pop(worker, 0) != 1:
                yield f"worker {worker}: {action} comes without a reduction of block {block}"
            stepped.add((block, worker))
        elif action.op in (Op.B, Op.W) and seen[block][worker]:
            yield f"worker {worker}: {action} comes after the reduction of block {block}"
    for block, counts in seen.items():
        for worker in sorted(holders[block]) if sum(counts.values()) else ():
            # A STEP has taken its reduction out of the counts, so nothing is left after it; a block without a STEP
            # needs one.
            if counts[worker] != ((block, worker) not in stepped):
                yield f"worker {worker}: the gradients of block {block} are reduced {counts[worker]} times, not once"


def sharded_blocks(schedule: Schedule) -> frozenset[int]:
    """The ids of the blocks of which every data-parallel group holds a part: the ones with a RESHARD."""
    return _blocks_of(schedule, Op.RESHARD)


def brought_blocks(schedule: Schedule) -> frozenset[int]:
    """The ids of the blocks that come from their owners and then stay whole: with an UNSHARD, without a RESHARD."""
    return _blocks_of(schedule, Op.UNSHARD) - sharded_blocks(schedule)


def _blocks_of(schedule: Schedule, op: Op) -> frozenset[int]:
    stages = schedule.placement.stages
    return frozenset(stages[a.stage].weights for order in schedule.orders for a in order if a.op is op)


def sharding_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each fault in the use of blocks in parts, or of blocks that come from their owners.

    Faults are compute on a block in parts, blocks gathered or dropped twice or left whole, and gradients that no action
    reduces. The gradients of a sharded block may be reduced several times: each time the ones that came since the last
    one. A block that is never dropped comes from its owners once, before anything reads it.
    """
    sharded, brought = sharded_blocks(schedule), brought_blocks(schedule)
    if not sharded | brought:
        return
    stages = schedule.placement.stages
    lone = lone_blocks(schedule)
    for block in sorted((sharded | brought) - lone):
        yield f"block {block} is sharded over data-parallel groups, but several workers of a group hold it"
    for worker, order in enumerate(schedule.orders):
        whole: set[int] = set()
        pending: dict[int, Action] = {}
        for action in order:
            block = stages[action.stage].weights
            if block not in sharded | brought:
                continue
            match action.op:
                case Op.UNSHARD:
                    if block in whole:
                        yield f"worker {worker}: {action} gathers block {block}, which is whole"
                    whole.add(block)
                case Op.RESHARD:
                    if block not in whole:
                        yield f"worker {worker}: {action} drops block {block}, which is in parts"
                    whole.discard(block)
                # A block that is only brought is reduced like one that is not sharded: see `reduction_problems`.
                case Op.REDUCE_GRAD if block in sharded:
                    if pending.pop(block, None) is None:
                        yield f"worker {worker}: {action} reduces no gradients of block {block}"
                case op if op in COMPUTE_OPS:
                    if block not in whole:
                        where = "is in parts" if block in sharded else "still waits for its owners"
                        yield f"worker {worker}: {action} reads block {block}, which {where}; UNSHARD it before"
                    if op in (Op.B, Op.W) and block in sharded:
                        pending[block] = action
        yield from (f"worker {worker}: block {block} is still whole at the end" for block in sorted(whole & sharded))
        yield from (f"worker {worker}: the gradients of {action} are not reduced" for action in pending.values())
