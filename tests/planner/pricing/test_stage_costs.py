from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs import AllReduce, Link
from diffusionpipe.ir import Mesh, Sharded
from diffusionpipe.planner import Layout
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.pricing.collectives import all_gather, all_reduce
from diffusionpipe.planner.pricing.layer_table import LayerTable
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import block_costs, costs_of, update_time

GB = synthetic.GB


def setting_of(profile, cluster, batch=8, **workload):
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch, **workload))


def chain_setting(cluster=None, **workload):
    profile = synthetic.chain([1.0, 2.0, 3.0, 4.0], parameters=[100, 200, 300, 400], frozen=0.5)
    return setting_of(profile, cluster or synthetic.cluster(2), **workload)


def test_a_block_costs_the_sum_of_its_layers():
    costs = block_costs(chain_setting(), ["layer1", "layer2"], 2)
    assert (costs.forward, costs.input_grad, costs.weight_grad) == (10.0, 10.0, 10.0)
    assert costs.backward == 20.0


def casting_setting(**workload):
    setting = chain_setting(**workload)
    return replace(setting, profile=synthetic.with_casts(setting.profile, seconds=0.5, num_bytes=200))


def test_all_forwards_of_an_iteration_share_one_cast_but_recomputed_layers_cast_in_each():
    plain, casting = (
        block_costs(s, ["layer1", "layer2"], 2, microbatches=4) for s in (chain_setting(), casting_setting())
    )
    assert casting.forward == plain.forward + 2 * 0.5 / 4
    again = block_costs(casting_setting(checkpointed=("*",)), ["layer1", "layer2"], 2, microbatches=4)
    assert again.forward == plain.forward + 2 * 0.5
    assert again.backward == plain.backward + again.forward


def test_narrow_weights_are_not_cast():
    layers, narrow = ["layer1", "layer2"], {"parameter": 2}
    assert block_costs(casting_setting(**narrow), layers, 2, microbatches=1) == block_costs(chain_setting(), layers, 2)
    table = LayerTable(profile=casting_setting().profile, workload=synthetic.workload(8, **narrow))
    assert (table.casts[-1], table.copies[-1]) == (0, 0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_schedule_casts_once_however_many_micro_batches_it_has(microbatches):
    setting = casting_setting()
    layout = Layout(batch=8, stages=2, microbatches=microbatches, splits=("layer2",))
    schedule, blocks = build_train_schedule(setting.graph, layout)
    plain = costs_of(schedule, blocks, layout.mesh, chain_setting()).stages
    casting = costs_of(schedule, blocks, layout.mesh, setting).stages
    more = [microbatches * (one.forward - other.forward) for one, other in zip(casting, plain, strict=True)]
    assert more == pytest.approx([1.0, 1.0, 0.0, 0.0])  # the encoders cast in every fill


@pytest.mark.parametrize("checkpointed", [(), ("*",)])
def test_sharded_copies_cast_as_they_gather_each_rank_its_part(checkpointed):
    plain, casting = chain_setting(checkpointed=checkpointed), casting_setting(checkpointed=checkpointed)
    layout = Layout(batch=8, stages=1, microbatches=2, data_parallel=2, sharded=Sharded.ALL, buckets=2)
    schedule, blocks = build_train_schedule(plain.graph, layout)
    without, with_casts = (costs_of(schedule, blocks, layout.mesh, setting) for setting in (plain, casting))
    assert with_casts.stages == without.stages
    more = [gather - other for gather, other in zip(with_casts.unshards, without.unshards, strict=True)]
    assert more == pytest.approx([0.5 * len(block) / 2 for block in blocks[:-1]] + [0.0])


def test_a_slow_device_takes_longer_in_everything():
    fast, slow = (block_costs(chain_setting(), ["layer1"], 2, speed=speed) for speed in (1.0, 0.5))
    assert (slow.forward, slow.backward) == (2 * fast.forward, 2 * fast.backward)
    assert (slow.input_grad, slow.weight_grad) == (2 * fast.input_grad, 2 * fast.weight_grad)


def test_a_recomputed_layer_runs_its_forward_again_and_keeps_only_what_it_reads_and_writes():
    plain = block_costs(chain_setting(), ["layer1", "layer2"], 2)
    again = block_costs(chain_setting(checkpointed=("layer*",)), ["layer1", "layer2"], 2)
    assert again.backward == plain.backward + plain.forward
    assert again.input_grad == plain.input_grad + plain.forward
    assert again.weight_grad == plain.weight_grad
    assert again.activation == 2 * 3 * 10 * 4  # 2 samples, float32: what is read, between both, and to be sent
    assert again.activation < plain.activation


def test_a_tensor_between_two_layers_of_a_block_is_kept_once():
    setting = chain_setting()
    both = block_costs(setting, ["layer1", "layer2"], 2).activation
    apart = [block_costs(setting, [name], 2).activation for name in ("layer1", "layer2")]
    assert both == sum(apart) - 2 * 10 * 4


@pytest.mark.parametrize("checkpointed", [(), ("*attn*",)])
def test_the_table_says_of_every_range_what_block_costs_says(checkpointed):
    profile = synthetic.with_casts(synthetic.unet(), seconds=0.01, num_bytes=100)
    setting = setting_of(profile, synthetic.cluster(2), checkpointed=checkpointed)
    table = LayerTable(profile=profile, workload=setting.workload)
    for first, stop in ((0, 5), (7, 30), (20, 21), (0, len(table.names))):
        costs = block_costs(setting, table.names[first:stop], 3, microbatches=8)
        sums = table.sums(3, 8)
        assert sums.forward[stop] - sums.forward[first] == pytest.approx(costs.forward)
        assert sums.backward[stop] - sums.backward[first] == pytest.approx(costs.backward)
        assert table.activation(first, stop, 3) == costs.activation


def test_a_skip_crosses_every_cut_below_its_arc():
    table = LayerTable(profile=synthetic.unet(), workload=synthetic.workload(8))
    cuts = [forward for forward, _ in table.crossing]
    assert cuts[0] == cuts[-1] == 0
    middle = table.names.index("mid.attn")
    assert cuts[middle] > 10_000_000  # 13 MB a sample in Stable Diffusion 2.1 at 512 px, less the timesteps
    assert all(back <= forward for forward, back in table.crossing)


def test_flows_between_stages_are_those_of_the_graph():
    profile = synthetic.unet()
    table = LayerTable(profile=profile, workload=synthetic.workload(8))
    starts = (0, 9, 24, 40)
    stops = (*starts[1:], len(table.names))
    blocks = [table.names[a:b] for a, b in zip(starts, stops, strict=True)]
    expected = {
        pair: sum(profile.graph.tensor(name).num_bytes for name in names)
        for pair, names in profile.graph.flows(blocks).items()
    }
    assert {pair: forward for pair, ((forward, _), _) in table.flows(starts).items()} == expected


def test_costs_of_a_schedule_fit_its_actions():
    setting = chain_setting()
    layout = Layout(batch=8, stages=2, microbatches=2, splits=("layer2",))
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    assert [c.forward for c in costs.stages[:2]] == [4 * 3.0, 4 * 7.0]
    assert costs.stages[0].backward == 4 * (1 + 2 + 2)  # the first layer's input needs no gradient
    assert costs.fills == (4 * 0.5, 4 * 0.5)
    assert all(seconds == 0 for seconds in costs.reduces)
    assert costs.tensor_bytes["h1"] == 40


def test_messages_take_their_time_from_the_compute_of_both_ends():
    cluster = synthetic.cluster(2)
    busy = replace(cluster, intra=replace(cluster.intra, overhead=3.0, overhead_per_byte=0.25))
    layout = Layout(batch=8, stages=2, microbatches=2, splits=("layer2",))
    free, taken = (
        costs_of(*build_train_schedule(setting.graph, layout), layout.mesh, setting).stages
        for setting in (chain_setting(cluster), chain_setting(busy))
    )
    one = 3.0 + 0.25 * 4 * 40  # one tensor of 4 samples
    for stage in (0, 1):
        assert taken[stage].forward == free[stage].forward + one
        assert taken[stage].backward == free[stage].backward + one
        assert taken[stage].weight_grad == free[stage].weight_grad


def test_a_tensor_without_a_gradient_takes_its_time_from_forwards_alone():
    cluster = synthetic.cluster(2)
    busy = replace(cluster, intra=replace(cluster.intra, overhead=3.0))
    layout = Layout(batch=8, stages=2, microbatches=2, splits=("layer2",))
    schedule, blocks = build_train_schedule(chain_setting().graph, layout)
    pipelines = [
        replace(pipeline, edges=tuple(replace(edge, gradients=()) for edge in pipeline.edges))
        for pipeline in schedule.placement.pipelines
    ]
    schedule = replace(schedule, placement=replace(schedule.placement, pipelines=tuple(pipelines)))
    free, taken = (
        costs_of(schedule, blocks, layout.mesh, setting).stages
        for setting in (chain_setting(cluster), chain_setting(busy))
    )
    assert [taken[stage].forward - free[stage].forward for stage in (0, 1)] == [3.0, 3.0]
    assert [taken[stage].backward - free[stage].backward for stage in (0, 1)] == [0.0, 0.0]


def test_the_worker_with_most_parameters_is_updated_longest():
    setting = chain_setting()
    layout = Layout(batch=8, stages=2, microbatches=2, splits=("layer2",))
    schedule, blocks = build_train_schedule(setting.graph, layout)
    updated = replace(setting.profile, update=0.5)
    assert update_time(schedule, blocks, updated, layout.mesh) == 0.5 * 700
    assert update_time(schedule, blocks, setting.profile, layout.mesh) == 0
    agreeing = replace(updated, reduce=AllReduce(latency=3.0, bandwidth=GB))
    assert update_time(schedule, blocks, agreeing, layout.mesh) == 3.0 + 0.5 * 700
    assert update_time(schedule, blocks, agreeing, replace(layout, data_parallel=1, stages=1, splits=()).mesh) == 350


def test_a_group_on_slow_devices_sets_the_pace_of_its_place():
    cluster = synthetic.cluster(4, speeds=[1.0, 1.0, 0.5, 1.0])
    setting = chain_setting(cluster)
    layout = Layout(batch=8, stages=2, microbatches=2, data_parallel=2, splits=("layer2",))
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    assert [c.forward for c in costs.stages[:2]] == [2 * 2 * 3.0, 2 * 7.0]


def test_gradients_are_reduced_over_replicas_and_groups():
    cluster = synthetic.cluster(6, per_node=6)
    setting = chain_setting(cluster)
    layout = Layout(batch=8, stages=2, microbatches=1, replicas=(2, 1), data_parallel=2, splits=("layer2",))
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    first, second = costs.reduces[0], costs.reduces[2]
    assert first == pytest.approx(cluster.intra_reduce.seconds(300 * 4, 4))
    assert second == pytest.approx(cluster.intra_reduce.seconds(700 * 4, 2))
    assert costs.reduces[1] == first


def test_adjacent_groups_move_the_pipelines_links_across_nodes():
    cluster = synthetic.cluster(4, per_node=2)
    setting = chain_setting(cluster)
    inside = Layout(batch=8, stages=2, microbatches=1, data_parallel=2, splits=("layer2",))
    across = replace(inside, adjacent=2)
    schedule, blocks = build_train_schedule(setting.graph, inside)
    costs = {layout: costs_of(schedule, blocks, layout.mesh, setting) for layout in (inside, across)}
    assert costs[inside].link_between(0, 1) == cluster.intra
    assert costs[across].link_between(0, 1) == cluster.inter
    assert costs[inside].reduces[0] > costs[across].reduces[0]


@pytest.mark.parametrize("mesh", [Mesh(data_parallel=6, pipeline=4, adjacent=a) for a in (1, 2, 3, 6)])
def test_every_rank_has_one_place_in_the_mesh(mesh):
    places = [mesh.place(rank) for rank in range(mesh.num_ranks)]
    assert sorted(places) == [(group, worker) for group in range(6) for worker in range(4)]
    assert [mesh.rank(*place) for place in places] == list(range(mesh.num_ranks))


def test_a_mesh_refuses_adjacent_groups_that_do_not_divide_the_groups():
    with pytest.raises(ValueError, match="must divide"):
        Mesh(data_parallel=4, pipeline=2, adjacent=3)


def test_splitting_a_model_over_the_ranks_of_a_node_makes_no_gradient_byte_cheaper():
    cluster = synthetic.cluster(16)
    whole = all_reduce(cluster, 8 * GB, range(16)) - cluster.inter_reduce.latency
    eighth = all_reduce(cluster, 1 * GB, [0, 8]) - cluster.inter_reduce.latency
    assert eighth == pytest.approx(whole * (2 * (2 - 1) / 2) / (2 * (16 - 1) / 16))


def test_a_gather_is_half_a_sum():
    cluster = synthetic.cluster(8)
    latency = cluster.intra_reduce.latency
    assert all_gather(cluster, GB, range(8)) - latency == pytest.approx(
        (all_reduce(cluster, GB, range(8)) - latency) / 2
    )
    assert all_gather(cluster, GB, [3]) == all_reduce(cluster, GB, [3]) == 0


def test_links_are_those_of_the_cluster():
    setting = chain_setting(synthetic.cluster(2, per_node=1))
    layout = Layout(batch=8, stages=2, microbatches=2)
    schedule, blocks = build_train_schedule(setting.graph, layout)
    assert costs_of(schedule, blocks, layout.mesh, setting).link_between(0, 1) == Link(3e-5, 6.0 * GB)
