"""Plan files to train by: read, and checked against the rules, the recipe, the model and the number of ranks."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.tied import tied_problems
from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Op, Plan, Sharded
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.ir.files import read_plan
from diffusionpipe.ir.plan import drawing_backbone
from diffusionpipe.timing.legal import check
from diffusionpipe.timing.legal.compute import brought_blocks, sharded_blocks
from diffusionpipe.trainer.recipe import Recipe

MAX_PROBLEMS = 5


def read_plan_file(path: Path, model: ModelGraph, recipe: Recipe, num_ranks: int) -> Plan:
    """The plan in a file, after a check that this run can train by it.

    Raises:
        FileFormatError: the file cannot be read, or is not a plan.
        ConfigError: the plan is illegal, or does not fit the model, recipe or number of ranks; five problems are shown.
    """
    plan = read_plan(path)
    # Each group of checks relies on the ones before: an illegal or a foreign plan cannot be compared further.
    problems = list(_illegal(plan))
    if not problems:
        problems = [*_other_run(plan, recipe.training.batch, num_ranks), *_other_model(plan, model)]
    if not problems:
        problems = [*_other_share(plan, model), *_other_checkpointing(plan, recipe), *_incomplete(plan, model)]
    _require_none(problems, path)
    return plan


def check_plan_file(path: Path, *, batch: int, num_ranks: int) -> None:
    """Refuses a plan file that is illegal, or for another batch or number of ranks, before the model is read.

    Raises:
        FileFormatError: it cannot be read, or is not a plan.
        ConfigError: it is illegal, or of another batch or number of ranks.
    """
    plan = read_plan(path)
    _require_none([*_illegal(plan)] or [*_other_run(plan, batch, num_ranks)], path)


def _require_none(problems: Sequence[str], path: Path) -> None:
    if problems:
        rest = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        lines = [f"pipeline.plan: {path} cannot be used for this run:", *problems[:MAX_PROBLEMS], *rest]
        lines.append(f"Or make a new plan: diffusionpipe plan RECIPE --cluster NAME --out {path}")
        raise ConfigError("\n".join(lines))


def _illegal(plan: Plan) -> Iterator[str]:
    """A sentence for each rule of schedules and plans that the plan breaks, for any model."""
    if plan.train.lead:
        yield "it trains without a flush, which no plan file can ask for yet; give sizes and versions in the recipe"
        return
    for name, schedule in plan.phases.items():
        try:
            check(schedule)
        except ScheduleError as error:
            yield from (f"its {name} schedule is illegal: {problem}" for problem in error.problems)
            continue
        blocks = {stage.weights for stage in schedule.placement.stages}
        if missing := blocks - set(range(len(plan.blocks))):
            yield f"its {name} schedule runs block {min(missing)}, but the plan lists {len(plan.blocks)} blocks"
        if schedule.num_workers != plan.mesh.pipeline:
            yield f"its {name} schedule has {schedule.num_workers} workers, but its mesh has {plan.mesh.pipeline}"
    if (plan.prologue is not None) != any(pipeline.is_ahead for pipeline in plan.train.placement.pipelines):
        yield "a prologue belongs to a train schedule that encodes ahead, and to no other"


def _other_run(plan: Plan, batch: int, num_ranks: int) -> Iterator[str]:
    if plan.mesh.num_ranks != num_ranks:
        yield (
            f"it is for {plan.mesh.num_ranks} ranks, but there are {num_ranks}: start with --ranks "
            f"{plan.mesh.num_ranks}"
        )
    if plan.batch != batch:
        yield (f"it is for a batch of {plan.batch}, but training.batch is {batch}: set training.batch = {plan.batch}")


def _other_model(plan: Plan, model: ModelGraph) -> Iterator[str]:
    """A sentence for the first difference between the plan's layers and the model's.

    Their names, their order, the frozen ones and the backbones that draw are compared.
    """
    # The last block holds the frozen layers.
    trained, frozen = [name for block in plan.blocks[:-1] for name in block], list(plan.blocks[-1])
    known = {layer.name for layer in model.layers}
    if unknown := [name for name in (*trained, *frozen) if name not in known]:
        yield f"it is for another model: this one has no layer {unknown[0]} ({len(unknown)} such layers)"
    elif missing := known - {*trained, *frozen}:
        name = next(layer.name for layer in model.layers if layer.name in missing)
        yield f"it is for another model: it lacks the layer {name} ({len(missing)} such layers)"
    elif wrong := [name for name in trained if name in set(model.frozen_layers)]:
        yield f"it trains {wrong[0]}, which is frozen here: change model.train"
    elif wrong := [name for name in frozen if name not in set(model.frozen_layers)]:
        yield f"it freezes {wrong[0]}, which is trained here: change model.train"
    elif (drawn := [drawing_backbone(one) for one in plan.sample]) != (own := [one.name for one in model.backbones]):
        yield f"it draws by {len(drawn)} backbones {drawn}, but this model has {len(own)}, {own}"
    elif trained != list(model.backbone_layers) or frozen != list(model.frozen_layers):
        yield "its layers are in another order than the model's, or are in two blocks"


def _other_share(plan: Plan, model: ModelGraph) -> Iterator[str]:
    """A sentence for each pipeline whose micro-batches with estimates are not as many as its conditioned ones."""
    placement, shares = plan.train.placement, dict(model.probes)
    for pipeline in placement.pipelines:
        if Op.ENCODE in pipeline.ops or pipeline.is_probe:
            continue
        count = len(pipeline.microbatches)
        probed = sum(len(probe.numbers) for probe in placement.pipelines if probe.probes(pipeline))
        # Conditioned samples come last.
        wanted = count - placement.first_conditioned(pipeline, shares.get(pipeline.model, Fraction(0)))
        if probed != wanted:
            yield (
                f"it makes estimates for {probed} of {count} micro-batches, but objective.self_conditioning wants them "
                f"for {wanted}"
            )


def _other_checkpointing(plan: Plan, recipe: Recipe) -> Iterator[str]:
    patterns = recipe.training.activation_checkpointing
    if patterns is None:  # the plan decides
        return
    names = [name for block in plan.blocks[:-1] for name in block]
    wanted = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if differing := sorted(wanted ^ set(plan.checkpointed)):
        which = "recomputes" if differing[0] in plan.checkpointed else "keeps"
        yield (
            f"it {which} the activations of {differing[0]} ({len(differing)} such layers), but the recipe does not: "
            f"change training.activation_checkpointing, which is {_listed(patterns)}"
        )


def _listed(patterns: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, patterns))}]" if patterns else "false"


def _incomplete(plan: Plan, model: ModelGraph) -> Iterator[str]:
    """A sentence for each thing that the plan lacks for this model.

    Such things are tensors that a stage reads and no edge brings, blocks that a schedule leaves out or runs where they
    are not trained, frozen layers that do not run, sums of gradients, and gathers.
    """
    homes = {(stage.weights, stage.worker) for stage in plan.train.placement.stages}
    for name, schedule in plan.phases.items():
        placement = schedule.placement
        trained = [s for s in range(len(placement.stages)) if not placement.is_frozen(s)]
        if name in ("train", "validate"):
            brought: dict[int, set[str]] = {stage: set() for stage in trained}
            for edge in (edge for pipeline in placement.pipelines for edge in pipeline.edges):
                brought.get(edge.consumer, set()).update(edge.tensors)
            for stage in trained:
                own = placement.pipeline_of(stage)
                reads = set(model.reads_of(plan.blocks[placement.stages[stage].weights]))
                reads -= model.estimates if own.is_probe else set()  # a probe makes the estimates
                if lacking := sorted(tensor for tensor in reads if tensor not in brought[stage]):
                    yield f"its {name} schedule does not bring {lacking[0]} to stage {stage}, whose layers read it"
            if lost := set(range(len(plan.blocks) - 1)) - {placement.stages[stage].weights for stage in trained}:
                yield f"its {name} schedule leaves out block {min(lost)}"
        strangers = {(placement.stages[s].weights, placement.stages[s].worker) for s in trained} - homes
        if strangers:
            block, worker = min(strangers)
            yield f"its {name} schedule runs block {block} on worker {worker}, which does not train it"
        # Without fills, each worker encodes its samples at once.
        layers = max((fill.layers.stop for fill in schedule.fills), default=len(plan.blocks[-1]))
        if layers != len(plan.blocks[-1]):
            yield f"its {name} schedule runs {layers} of the {len(plan.blocks[-1])} frozen layers"
    yield from tied_problems(model, plan.train.placement, plan.blocks[:-1])
    yield from _missing_sums(plan)
    yield from _wrong_parts(plan)


def _missing_sums(plan: Plan) -> Iterator[str]:
    stages = plan.train.placement.stages
    reduced = {stages[a.stage].weights for _, a in plan.train.actions() if a.op is Op.REDUCE_GRAD}
    for block in range(len(plan.blocks) - 1):
        holders = {stage.worker for stage in stages if stage.weights == block}
        if len(holders) * plan.mesh.data_parallel > 1 and block not in reduced:
            yield f"no action sums the gradients of block {block}, which {len(holders)} workers hold in every copy"


def _wrong_parts(plan: Plan) -> Iterator[str]:
    """A sentence for each block in parts that a schedule does not gather, or whole block that a schedule gathers."""
    for name, schedule in plan.phases.items():
        stages = schedule.placement.stages
        computed = {stages[action.stage].weights for _, action in schedule.actions() if action.op in COMPUTE_OPS}
        gathered, brought = sharded_blocks(schedule), brought_blocks(schedule)
        is_trained = schedule is plan.train
        if plan.mesh.sharded is Sharded.ALL and (missing := computed - gathered):
            yield f"its mesh shards parameters, but its {name} schedule does not gather block {min(missing)}"
        if plan.mesh.sharded is Sharded.OPTIMIZER and is_trained and (missing := computed - brought):
            yield f"its mesh divides the updates, but its {name} schedule does not bring block {min(missing)}"
        # The blocks that the schedule may gather.
        is_right = {Sharded.NONE: frozenset(), Sharded.OPTIMIZER: brought, Sharded.ALL: gathered}[plan.mesh.sharded]
        if wrong := (gathered | brought) - is_right:
            yield f"its {name} schedule gathers block {min(wrong)}, which its mesh does not shard"
