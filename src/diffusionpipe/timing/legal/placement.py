"""The rules of placements: stages, pipelines, shares, edges, and that actions name what exists."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from diffusionpipe.ir.action import MESSAGE_OPS, Action, Op
from diffusionpipe.ir.flows import Flow
from diffusionpipe.ir.placement import Pipeline, Range
from diffusionpipe.ir.ranges import tiles
from diffusionpipe.ir.schedule import Schedule

OPS_OF_PIPELINES: tuple[frozenset[Op], ...] = (
    frozenset({Op.F}),
    frozenset({Op.F, Op.B}),
    frozenset({Op.F, Op.I, Op.W}),
    frozenset({Op.ENCODE}),
    frozenset(),  # a prologue: its stages only receive frozen outputs
)


def placement_problems(schedule: Schedule) -> list[str]:
    """One sentence for each fault of the placement, and each action, fill or message that names something missing.

    [] for a sound placement. Shares and edges are only looked at where all names exist.
    """
    problems = [*_membership(schedule), *_names(schedule)]
    if problems:
        return problems
    for pipeline in schedule.placement.pipelines:
        shares = list(_shares(schedule, pipeline))
        # Shares that do not cut at whole samples have no ranges that could be compared.
        problems += shares or _cover(schedule, pipeline)
        problems += _edges(schedule, pipeline)
    return [*problems, *_batch(schedule)]


def _membership(schedule: Schedule) -> Iterator[str]:
    placement = schedule.placement
    homes = Counter(stage for pipeline in placement.pipelines for stage in pipeline.stages)
    for stage in sorted(homes.keys() | set(range(len(placement.stages)))):
        if not 0 <= stage < len(placement.stages):
            yield f"a pipeline names stage {stage}; there are {len(placement.stages)} stages"
        elif homes[stage] != 1:
            yield f"stage {stage} is in {homes[stage]} pipelines; it must be in exactly one"
    for i, one in enumerate(placement.stages):
        if not 0 <= one.worker < schedule.num_workers:
            yield f"stage {i} is on worker {one.worker}; there are orders for {schedule.num_workers} workers"
    for i, pipeline in enumerate(placement.pipelines):
        if pipeline.ops not in OPS_OF_PIPELINES:
            yield f"pipeline {i} has ops {_join(pipeline.ops)}; legal are F, F B, F I W and ENCODE"
        if pipeline.is_ahead and Op.ENCODE not in pipeline.ops:
            yield f"pipeline {i} works ahead but trains; only frozen pipelines can work ahead"
        if pipeline.first_sample < 0:
            yield f"pipeline {i} begins at sample {pipeline.first_sample} of the batch; use a number from 0 up"
        if not pipeline.microbatches or min(pipeline.microbatches) < 1:
            yield f"pipeline {i} has micro-batches of {pipeline.microbatches} samples; each needs at least 1"
        if pipeline.is_probe:
            yield from _probe(schedule, i, pipeline)
        if Op.ENCODE in pipeline.ops and len(pipeline.microbatches) != 1:
            yield f"frozen pipeline {i} has {len(pipeline.microbatches)} micro-batches; it has one, the whole batch"


def _probe(schedule: Schedule, number: int, probe: Pipeline) -> Iterator[str]:
    """One sentence for each fault of a probe, which is the pipeline with this number.

    A probe only runs forwards, over the stages of one other pipeline and some of its micro-batches.
    """
    stages, least = schedule.placement.stages, probe.probes_from
    probed = [
        pipeline
        for pipeline in schedule.placement.pipelines
        if probe.probes(pipeline) and pipeline.microbatches == probe.microbatches
    ]
    if probe.ops - {Op.F}:
        yield f"pipeline {number} is a probe and has ops {_join(probe.ops)}; a probe has F alone"
    if least is None or not 0 <= least < len(probe.microbatches):
        yield f"pipeline {number} probes from micro-batch {least} on, of {len(probe.microbatches)}"
    if len(probed) != 1:
        yield f"pipeline {number} is a probe, but {len(probed)} other pipelines have its micro-batches; it needs one"
    elif [stages[s : s + 1] for s in probed[0].stages] != [stages[s : s + 1] for s in probe.stages]:
        # Slices, because these stages need not exist: all problems are collected before the first refusal.
        yield f"pipeline {number} is a probe, but its stages differ from the stages of the pipeline that it probes"


def _batch(schedule: Schedule) -> Iterator[str]:
    """One sentence for each pair of pipelines that train the same block on the same samples of the batch."""
    stages = schedule.placement.stages
    taken: dict[int, list[tuple[int, Range]]] = defaultdict(list)
    for i, pipeline in enumerate(schedule.placement.pipelines):
        # Frozen work and probes train nothing, so their samples may be taken by others too.
        if Op.ENCODE in pipeline.ops or not pipeline.ops or pipeline.is_probe:
            continue
        rows = Range(pipeline.first_sample, pipeline.first_sample + pipeline.num_samples)
        for weights in sorted({stages[stage].weights for stage in pipeline.stages}):
            for other, theirs in taken[weights]:
                if rows.intersection(theirs):
                    yield f"pipelines {other} and {i} both train block {weights} on samples {rows.intersection(theirs)}"
            taken[weights].append((i, rows))


def _join(ops: frozenset[Op]) -> str:
    return " ".join(op.value for op in Op if op in ops) or "none"


def _names(schedule: Schedule) -> Iterator[str]:
    num_stages = len(schedule.placement.stages)
    encoders = {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}
    for slot, fill in enumerate(schedule.fills):
        if fill.stage not in encoders:
            yield f"fill {slot} names stage {fill.stage}, which is not an encoder stage"
    for slot, message in enumerate(schedule.messages):
        if not (0 <= message.source < num_stages and 0 <= message.destination < num_stages):
            yield f"message {slot} goes from stage {message.source} to stage {message.destination}; one does not exist"
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if not 0 <= action.stage < num_stages:
                yield f"worker {worker}: {action} names stage {action.stage}; there are {num_stages} stages"
            if action.slot is not None:
                yield from _slot(schedule, worker, action)


def _slot(schedule: Schedule, worker: int, action: Action) -> Iterator[str]:
    slots = len(schedule.messages) if action.op in MESSAGE_OPS else len(schedule.fills)
    if action.slot is not None and not 0 <= action.slot < slots:
        what = "messages" if action.op in MESSAGE_OPS else "fills"
        yield f"worker {worker}: {action} names number {action.slot}; there are {slots} {what}"


def _shares(schedule: Schedule, pipeline: Pipeline) -> Iterator[str]:
    for stage in pipeline.stages:
        for size in sorted(set(pipeline.microbatches)):
            try:
                schedule.placement.stages[stage].share.samples(size)
            except ValueError as error:
                yield f"stage {stage}: {error}"


def _cover(schedule: Schedule, pipeline: Pipeline) -> Iterator[str]:
    """One sentence for each block whose stages in a pipeline do not have every sample of a micro-batch exactly once."""
    blocks = defaultdict(list)
    for stage in pipeline.stages:
        blocks[schedule.placement.stages[stage].weights].append(stage)
    # Shares are fractions that cut every size at whole samples, so one size shows whether they cover all.
    size = pipeline.microbatches[0]
    for block, stages in blocks.items():
        if not tiles([schedule.placement.stages[s].share.samples(size) for s in stages], Range(0, size)):
            names = ", ".join(map(str, stages))
            yield f"the shares of stages {names} with weights {block} do not cover every sample once"


def _edges(schedule: Schedule, pipeline: Pipeline) -> Iterator[str]:
    encoders = {s for p in schedule.placement.pipelines if Op.ENCODE in p.ops for s in p.stages}
    probes = {s for p in schedule.placement.pipelines if p.probes(pipeline) for s in p.stages}
    pairs = Counter((edge.producer, edge.consumer) for edge in pipeline.edges)
    for (producer, consumer), count in pairs.items():
        if count > 1:
            yield f"{count} edges lead from stage {producer} to stage {consumer}; one edge must carry all tensors"
    for edge in pipeline.edges:
        name = f"edge {edge.producer}->{edge.consumer}"
        if edge.consumer not in pipeline.stages or edge.producer not in encoders | probes | set(pipeline.stages):
            yield f"{name} must lead from this pipeline, its probe or a frozen one into this pipeline"
        if edge.producer == edge.consumer:
            yield f"{name} leads from a stage to itself"
        if not set(edge.gradients) <= set(edge.tensors):
            yield f"{name} has gradients {edge.gradients} of tensors that it does not carry"
        if edge.producer in encoders and edge.gradients:
            yield f"{name} has gradients, but nothing flows back into frozen work"
        if edge.producer in probes and edge.gradients:
            yield f"{name} has gradients, but nothing flows back into a probe"


def supply_problems(schedule: Schedule, flows: Sequence[Flow]) -> Iterator[str]:
    """One sentence for each action that gets samples of a tensor from no stage, or the same samples from several."""
    stages = schedule.placement.stages
    supplied: dict[tuple[Action, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for flow in flows:
        if not flow.is_gradient:
            # By block, not by stage: replicas of a producer each bring their share of one tensor.
            brought = supplied[flow.consumer, stages[flow.source].weights]
            num_samples = flow.samples.stop - flow.samples.start
            for name in flow.tensors:
                brought[name] += num_samples
    wanted = {
        stage: {size: len(stages[stage].share.samples(size)) for size in set(pipeline.microbatches)}
        for pipeline in schedule.placement.pipelines
        for stage in pipeline.stages
    }
    for (action, weights), brought in supplied.items():
        assert action.microbatch is not None
        want = wanted[action.stage][schedule.placement.pipeline_of(action.stage).microbatches[action.microbatch]]
        for name, have in brought.items():
            if have == want:
                continue
            worker = stages[action.stage].worker
            yield f"worker {worker}: {action} reads {name!r} of block {weights} for {want} samples, edges bring {have}"
