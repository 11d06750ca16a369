"""Recordings of runs that never ran: what the simulator says of a setting, as if ranks had recorded it."""

from dataclasses import replace

from diffusionpipe.ir import Op, Span, Timeline
from diffusionpipe.ir.recorded import LayerTime, Recorded
from diffusionpipe.planner.correction.correct import predicted_step
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.simulator import simulate


def recorded_of(setting, plan, *, has_layers=True):
    """What a run of the plan records where everything takes what the setting says.

    Ranks do not see transfers: a SEND or a RECV takes no time where it is posted, and a sum where it starts.
    """
    times = simulate(plan.train, costs_of(plan.train, plan.blocks, plan.mesh, setting))
    spans, ends = [], []
    for rank in range(plan.mesh.num_ranks):
        worker, free = plan.mesh.place(rank)[1], 0.0
        for span in times.spans:
            if span.worker == worker:
                is_posted = span.action.op in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B, Op.REDUCE_GRAD)
                start, end = (free, free) if is_posted else (span.start, span.end)
                spans.append(Span(worker=rank, action=span.action, start=start, end=end))
                free = end
        ends.append(max(s.end for s in times.spans if s.worker == worker and s.action.op is not Op.SEND_B))
    sizes = sorted({len(fill.samples) for fill in plan.train.fills})
    layers = [
        LayerTime(name=name, samples=size, seconds=setting.profile.forward(name, size))
        for name in setting.graph.frozen_layers
        for size in sizes
    ]
    size = max(plan.train.placement.pipelines[0].microbatches)
    layers += [
        LayerTime(name=name, samples=size, seconds=setting.profile.forward(name, size))
        for name in setting.graph.backbone_layers
    ]
    layers += [
        LayerTime(name=name, samples=size, seconds=setting.profile.forward_only(name, size), keeps=False)
        for name in setting.graph.probed_layers
    ]
    found = predicted_step(setting, plan)
    return Recorded(
        steps=(6, 20),
        timeline=Timeline(num_workers=plan.mesh.num_ranks, spans=tuple(spans), source="measured"),
        ends=tuple(ends),
        iteration=found.iteration,
        step=found.step,
        layers=tuple(layers) if has_layers else (),
    )


def with_layer(profile, name, factor):
    """The profile with a layer whose times are multiplied."""

    def times(values):
        return tuple(value * factor for value in values)

    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                forward=times(layer.forward),
                input_grad=times(layer.input_grad),
                weight_grad=times(layer.weight_grad),
            )
            if layer.name == name
            else layer
            for layer in profile.layers
        ),
    )
