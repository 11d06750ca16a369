"""The peak memory of the ranks of a run outside training: while it validates, draws samples and decodes them.

    training      the rest  + activations, messages, workspace
    averages in   the rest  + the largest parameter, which changes places with its average; or, where parameters
                              are narrower than averages, all of them once more as long as the averages are in
    validation    the rest  + narrow parameters + rows + encoders or forwards that keep nothing
    drawing       the same
    decoding      the rest  + narrow parameters + the VAE, on the rank that shows pictures

The rest is held between two iterations: parameters and all beside them, frozen weights, rows that are encoded already.
"""

from collections.abc import Collection
from dataclasses import dataclass

from diffusionpipe.costs.graph import upstream
from diffusionpipe.holding import Ledger
from diffusionpipe.holding.memory import copies_of, forward_bytes
from diffusionpipe.ir import Plan, Schedule
from diffusionpipe.ir.plan import drawing_backbone
from diffusionpipe.planner.drawing.drawing import decoder_use
from diffusionpipe.planner.drawing.forwards import ForwardUse, forward_uses
from diffusionpipe.planner.pricing.layer_table import checkpointed_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import predict
from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The peak bytes of one worker in each phase of a run, without the bytes of `Trait.LASTING`."""

    validation: Bytes
    """Bytes while the run validates; 0 if it does not."""
    drawing: Bytes
    """Bytes while samples are drawn; 0 if none are."""
    decoding: Bytes
    """Bytes while pictures are decoded; 0 on workers that show no pictures."""
    averages: Bytes
    """Bytes that are held as long as the averages are in the place of the parameters."""
    exchange: Bytes
    """Bytes that are held while the averages come to the place of the parameters."""

    @property
    def peak(self) -> Bytes:
        """The most bytes in any phase, without the bytes that last between steps."""
        return max(self.exchange, self.averages + max(self.validation, self.drawing, self.decoding))


def phases_of(
    setting: Setting, plan: Plan, *, validates: bool = True, pictures: int = 0, room: Bytes = 0
) -> tuple[Phases, ...]:
    """The peak bytes in each phase outside training, for each worker of a plan, by worker.

    Args:
        setting: the run's setting.
        plan: the run's plan.
        validates: whether the run validates.
        pictures: the number of pictures drawn at a time; 0 for none.
        room: bytes free on the first device, beside the memory between iterations.
    """
    workers = range(plan.mesh.pipeline)
    validation = _validation(setting, plan) if validates else [0] * len(workers)
    drawing = [0] * len(workers)
    first = 0
    for schedule in plan.sample if pictures else ():
        found = _drawing(setting, plan, schedule)
        drawing = [max(pair) for pair in zip(drawing, found, strict=True)]
        first, _ = decoder_use(setting.profile, pictures, room)
    exchanges = [_exchange(setting.ledger, _trained(plan, worker)) for worker in workers]
    return tuple(
        Phases(
            validation=validation[worker],
            drawing=drawing[worker],
            decoding=first if worker == 0 else 0,
            averages=exchanges[worker][0],
            exchange=exchanges[worker][1],
        )
        for worker in workers
    )


def _validation(setting: Setting, plan: Plan) -> list[Bytes]:
    """Bytes while the run validates, by worker: its rows, and the encoders or the forwards, whichever needs more.

    The rows hold raw inputs and frozen outputs.
    """
    graph, placement = setting.graph, plan.validate.placement
    uses = forward_uses(setting.profile, plan.validate, plan.blocks, graph.backbone_layers)
    rows = [use.frozen_outputs for use in predict(setting, plan.validate, plan.blocks, plan.mesh).memory]
    encoding = [0] * plan.mesh.pipeline
    for fill in plan.validate.fills:
        stage = placement.stages[fill.stage]
        layers = plan.blocks[stage.weights][fill.layers.start : fill.layers.stop]
        needs = forward_bytes(setting.profile, layers, len(fill.samples))
        encoding[stage.worker] = max(encoding[stage.worker], needs)
    return [
        rows[worker] + max(encoding[worker], use.running + _copies(setting, use)) for worker, use in enumerate(uses)
    ]


def _drawing(setting: Setting, plan: Plan, schedule: Schedule) -> list[Bytes]:
    """Bytes while a schedule draws, by worker: the conditions of all rows, and the encoders or a denoising step.

    Of the encoders that make the conditions and a step of denoising the one that needs more counts.
    """
    graph = setting.graph
    name = drawing_backbone(schedule)
    backbone = next(one for one in graph.backbones if one.name == name)
    drawn = {layer.name for layer in upstream(graph.layers, backbone.result)} & set(graph.backbone_layers)
    uses = forward_uses(setting.profile, schedule, plan.blocks, drawn)
    rows = sum(schedule.placement.pipelines[0].microbatches)
    read = {tensor for layer in graph.layers if layer.name in drawn for tensor in layer.reads}
    made = {tensor for layer in graph.layers if layer.name in drawn for tensor in layer.writes}
    conditions = read - made - {backbone.noisy, backbone.timesteps}
    wanted = {layer.name for tensor in conditions for layer in upstream(graph.layers, tensor)}
    encoders = [layer.name for layer in graph.layers if layer.name in wanted and backbone.noisy not in layer.writes]
    encoding = forward_bytes(setting.profile, encoders, rows)
    return [use.read + max(encoding, use.running + _copies(setting, use)) for use in uses]


def _copies(setting: Setting, use: ForwardUse) -> Bytes:
    """Bytes of the narrow copies of a worker's weights that layers read, if the weights are stored wider."""
    again = checkpointed_layers(setting.workload, setting.graph.backbone_layers)
    return sum(copies_of(layer, setting.profile, setting.workload, again) for layer in use.layers)


def _trained(plan: Plan, worker: int) -> set[str]:
    """The names of the layers of a worker's trained stages."""
    placement = plan.train.placement
    return {
        name
        for index, stage in enumerate(placement.stages)
        if stage.worker == worker and not placement.is_frozen(index)
        for name in plan.blocks[stage.weights]
    }


def _exchange(ledger: Ledger, layers: Collection[str]) -> tuple[Bytes, Bytes]:
    """(bytes held while the averages are in the place of the parameters, bytes held while they change places)."""
    names = ledger.graph.parameters_of(layers)
    held = [held for name, held in ledger.trained.items() if name in names and held.ema]
    if any(one.parameters < one.ema for one in held):
        return (sum(one.parameters for one in held),) * 2
    return 0, max((one.parameters for one in held), default=0)
