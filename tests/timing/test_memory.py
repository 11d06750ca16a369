from dataclasses import replace
from math import prod
from random import Random

import pytest
from planner import synthetic
from planner.random_layouts import planned

from diffusionpipe.costs import ParameterSpec
from diffusionpipe.holding import HOST, Item, Ledger, plain_states
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Op
from diffusionpipe.planner import Layout
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.layer_table import checkpointed_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import block_costs
from diffusionpipe.planner.rivals.baselines import zero3
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import predict, pricing_of, propose
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import memory
from diffusionpipe.timing.buffers import moving_through
from diffusionpipe.timing.memory import peak_memory


def chain_setting(batch=8, **workload):
    profile = synthetic.chain([1.0, 1.0, 1.0, 1.0], parameters=[100, 200, 300, 400], frozen=0.5)
    workload = synthetic.workload(batch, **workload)
    return Setting(profile=profile, cluster=synthetic.cluster(2), workload=workload)


def memory_of(setting, **layout):
    layout = Layout(
        **{"batch": setting.workload.batch, "stages": 2, "microbatches": 4, "splits": ("layer2",), **layout}
    )
    return propose(setting, layout).memory


def test_the_total_is_the_sum_of_all_items():
    use = MemoryUse(
        parameters=1, gradients=2, optimizer=4, ema=8, frozen=16, activations=32, messages=64, workspace=128, copies=256
    )
    assert use.total == 511
    assert sum(use.items().values()) == 511
    assert list(use.items())[-1] == "frozen_outputs"


def test_parameters_count_with_all_that_stands_beside_them():
    setting = chain_setting(parameter=2, gradient=4, master=4, optimizer=8, ema=4)
    first, second = memory_of(setting)
    assert (first.parameters, first.gradients, first.optimizer, first.ema) == (600, 1200, 3600, 1200)
    assert (second.parameters, second.gradients, second.optimizer, second.ema) == (1400, 2800, 8400, 2800)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_copies_of_weights_count_once_however_many_micro_batches_are_in_flight(microbatches):
    setting = chain_setting()
    setting = replace(setting, profile=synthetic.with_casts(setting.profile, seconds=0.5, num_bytes=200))
    uses = memory_of(setting, microbatches=microbatches, schedule="gpipe")
    assert [use.copies for use in uses] == [2 * 200, 2 * 200]
    again = replace(setting, workload=replace(setting.workload, checkpointed=("layer1",)))
    assert [use.copies for use in memory_of(again, checkpointed=("layer1",))] == [200, 2 * 200]
    narrow = replace(setting, workload=replace(setting.workload, states=plain_states(parameter=2)))
    assert [use.copies for use in memory_of(narrow)] == [0, 0]
    estimated, without = (Judge(setting=s).footprint.stage_bytes(0, 2, 2, 4, 1) for s in (setting, chain_setting()))
    assert estimated - without == 2 * 200


def test_frozen_parameters_stand_where_they_are_encoded():
    first, second = memory_of(chain_setting())
    assert first.frozen == second.frozen == 8 * 2


def test_frozen_bytes_are_those_of_every_parameters_own_dtype():
    """A frozen norm inside the trained part and an embedding in float32, beside matrices in two bytes."""
    setting = chain_setting(width=None)
    graph = setting.graph
    added = {
        "encode": ParameterSpec(name="embedding", shape=(3, 2), dtype="float32", is_trainable=False),
        "layer3": ParameterSpec(name="norm", shape=(5,), dtype="float32", is_trainable=False),
    }
    layers = tuple(
        replace(one, parameters=(*one.parameters, added[one.name].name)) if one.name in added else one
        for one in graph.layers
    )
    graph = replace(graph, layers=layers, parameters=(*graph.parameters, *added.values()))
    mixed = replace(setting, profile=replace(setting.profile, graph=graph))
    assert [use.frozen for use in memory_of(setting)] == [8 * 2, 8 * 2]
    assert [use.frozen for use in memory_of(mixed)] == [8 * 2 + 6 * 4, 8 * 2 + 6 * 4 + 5 * 4]
    moved = replace(mixed.workload, encoders=HOST)
    assert Ledger(graph=graph, workload=moved).resting(["encode", "layer3"]).device == 8 * 2 + 6 * 4 + 5 * 4
    before, after = Judge(setting=setting), Judge(setting=mixed)
    assert after.footprint.frozen_bytes - before.footprint.frozen_bytes == 6 * 4
    assert after.footprint.stage_bytes(3, 4, 2, 4, 1) - before.footprint.stage_bytes(3, 4, 2, 4, 1) == 6 * 4 + 5 * 4
    shares = [zero3(judge).held[0] for judge in (before, after)]
    gathered = 2 * 5 * 2  # two layers at a time, in two bytes
    assert 6 * 4 < shares[1] - shares[0] <= 6 * 4 + 5 * 4 // 2 + gathered


def test_activations_are_those_in_flight():
    setting = chain_setting()
    kept = (
        block_costs(setting, ["layer0", "layer1"], 2).activation,
        block_costs(setting, ["layer2", "layer3"], 2).activation,
    )
    first, second = memory_of(setting, schedule="1f1b")
    assert (first.activations, second.activations) == (2 * kept[0], 1 * kept[1])
    first, second = memory_of(setting, schedule="gpipe")
    assert (first.activations, second.activations) == (4 * kept[0], 4 * kept[1])


def test_recomputing_needs_less_activations_and_more_workspace():
    plain, again = (memory_of(chain_setting(checkpointed=patterns)) for patterns in ((), ("*",)))
    assert again[0].activations < plain[0].activations
    assert again[0].workspace > plain[0].workspace


def test_a_received_tensor_counts_until_its_reader_starts():
    setting = chain_setting()
    schedule, blocks = build_train_schedule(
        setting.graph, Layout(batch=8, stages=2, microbatches=4, splits=("layer2",))
    )
    proposal = predict(setting, schedule, blocks, Layout(batch=8, stages=2, microbatches=4).mesh)
    one_message = 2 * 40
    assert 0 <= proposal.memory[1].messages <= 2 * one_message


def test_without_explicit_messages_two_of_the_largest_are_counted():
    setting = chain_setting()
    schedule, blocks = build_train_schedule(
        setting.graph, Layout(batch=8, stages=2, microbatches=4, splits=("layer2",))
    )
    silent = type(schedule)(
        name=schedule.name,
        placement=schedule.placement,
        orders=tuple(tuple(a for a in order if a.op in (Op.F, Op.B, Op.ENCODE)) for order in schedule.orders),
        fills=schedule.fills,
    )
    layout = Layout(batch=8, stages=2, microbatches=4)
    costs = pricing_of(setting)(silent, blocks, layout.mesh)
    uses = peak_memory(silent, simulate(silent, costs), blocks, profile=setting.profile, ledger=setting.ledger)
    assert [use.messages for use in uses] == [2 * 2 * 40, 2 * 2 * 40]


def test_frozen_outputs_are_held_twice_when_the_next_batch_is_encoded_ahead():
    setting = chain_setting()
    layout = Layout(batch=8, stages=2, microbatches=4, splits=("layer2",))
    plain, ahead = (propose(setting, layout, filler) for filler in (None, filler_of(setting)))
    # All 8 samples of "x", in float16, and 4 raw ones; and the 4 that are encoded for worker 0.
    assert [use.frozen_outputs for use in plain.memory] == [8 * 20 + 4 * 20, 4 * 20 + 4 * 20]
    encoded = [sum(len(f.samples) for f in ahead.train.fills if f.stage == stage) for stage in (2, 3)]
    assert [use.frozen_outputs for use in ahead.memory] == [2 * (8 + encoded[0]) * 20, 2 * 2 * encoded[1] * 20]


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_the_estimate_of_a_candidate_is_close_to_its_full_memory(microbatches):
    setting = Setting(profile=synthetic.unet(), cluster=synthetic.cluster(4), workload=synthetic.workload(64, ema=4))
    judge = Judge(setting=setting)
    layout = Layout(batch=64, stages=4, microbatches=microbatches, splits=("down1.res0", "mid.attn", "up1.res0"))
    proposal = propose(setting, layout)
    stops = [*(judge.tables.table.names.index(name) for name in layout.splits), judge.tables.num_layers]
    for stage, (first, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        in_flight = min(4 - stage, microbatches)
        estimate = judge.footprint.stage_bytes(first, stop, 64 / microbatches, microbatches, in_flight)
        assert estimate == pytest.approx(proposal.memory[stage].total, rel=0.1)


def test_frozen_layers_count_beside_the_activations_of_their_own_moment():
    """Encoded before the first forward, when there are none, or in a bubble beside them."""
    setting, layout = chain_setting(), Layout(batch=8, stages=2, microbatches=4, splits=("layer2",))
    hungry = tuple(
        replace(layer, drawing=(1000,) * len(layer.activation)) if layer.name == "encode" else layer
        for layer in setting.profile.layers
    )
    setting = replace(setting, profile=replace(setting.profile, layers=hungry))
    uses = {is_ahead: propose(setting, layout, filler_of(setting) if is_ahead else None) for is_ahead in (False, True)}
    for is_ahead, proposal in uses.items():
        use = proposal.memory[0]
        encoding = use.activations + use.messages + use.workspace
        assert (encoding == 1000) != is_ahead
        assert encoding > use.activations


def recounted(one, worker):
    """What the worker of an unsharded plan holds but for activations and messages, row by row and layer by layer."""
    setting, train, blocks = one.setting, one.proposal.train, one.proposal.blocks
    graph, profile, workload, placement = setting.graph, setting.profile, setting.workload, train.placement
    again = {name for name in graph.backbone_layers if name in checkpointed_layers(workload, graph.backbone_layers)}
    own = [index for index, stage in enumerate(placement.stages) if stage.worker == worker]
    trained = {name for i in own if not placement.is_frozen(i) for name in blocks[placement.stages[i].weights]}
    fills = [fill for fill in train.fills if fill.stage in own]
    encoded = {name for fill in fills for name in blocks[-1][fill.layers.start : fill.layers.stop]}
    read = {name for layer in graph.layers for name in layer.reads if layer.name in graph.backbone_layers}
    rows, sizes = set(), [0]
    for index in own:
        layers = blocks[placement.stages[index].weights]
        for microbatch in range(len(placement.pipeline_of(index).microbatches)):
            samples = placement.rows(index, microbatch)
            reads = {name for layer in graph.layers for name in layer.reads if layer.name in layers}
            names = (read | {"raw"} if placement.is_frozen(index) else reads) & graph.frozen_tensors
            rows |= {(name, row) for name in names for row in range(samples.start, samples.stop)}
            if not placement.is_frozen(index):
                for name in layers:
                    kept = (name in again) * (
                        profile.activation(name, len(samples)) + workload.copies(profile.layer(name))
                    )
                    sizes.append(kept + profile.workspace(name, len(samples)))
    moving = moving_through(train, one.proposal.timeline, {tensor.name: tensor.num_bytes for tensor in graph.tensors})
    for span in one.proposal.timeline.spans:
        if span.action.op is Op.ENCODE and span.worker == worker:
            samples = len(train.fills[span.action.slot].samples)  # of the only frozen layer
            needs = profile.workspace("encode", samples) + graph.tensor("x").num_bytes * samples
            beside = moving[worker].most(span.start, span.end)
            sizes.append(beside + needs - sum(moving[worker].peak))
    total = max(sizes) + sum(workload.copies(profile.layer(name)) for name in trained - again)
    per_parameter = 4 + 4 + 8 + workload.width(Item.EMA) + workload.width(Item.BACKUP)
    for parameter in graph.parameters:
        if parameter.name in graph.parameters_of(trained):
            total += prod(parameter.shape) * per_parameter
        elif parameter.name in graph.parameters_of(encoded):
            total += prod(parameter.shape) * 2  # of the only frozen layer: it is there if offloaded, too
    turns = 1 + any(pipeline.is_ahead for pipeline in placement.pipelines)
    return total + turns * sum(graph.tensor(name).num_bytes for name, _ in rows)


def compare_some():
    for seed in range(16):
        one = planned(Random(seed))
        for worker, use in enumerate(one.proposal.memory):
            assert use.total - use.activations - use.messages == recounted(one, worker)


def test_the_memory_of_plans_is_that_of_their_layers_and_rows():
    compare_some()


@pytest.mark.parametrize("part", ["_frozen_outputs", "_workspace", "copies_of", "workspace_of", "_encoding"])
def test_a_forgotten_item_is_noticed(monkeypatch, part):
    monkeypatch.setattr(memory, part, lambda *arguments: 0)
    with pytest.raises(AssertionError):
        compare_some()


def test_forgotten_rows_of_the_next_batch_are_noticed(monkeypatch):
    original = memory._frozen_outputs
    monkeypatch.setattr(memory, "_frozen_outputs", lambda case, worker: original(without_ahead(case), worker))
    with pytest.raises(AssertionError):
        compare_some()


def without_ahead(case):
    placement = case.schedule.placement
    pipelines = tuple(replace(pipeline, is_ahead=False) for pipeline in placement.pipelines)
    return replace(case, schedule=replace(case.schedule, placement=replace(placement, pipelines=pipelines)))
