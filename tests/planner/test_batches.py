from dataclasses import replace
from itertools import pairwise

import pytest
from golden.plans import recorded_profile
from planner import synthetic

from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.forms import Form
from diffusionpipe.holding import DEVICE
from diffusionpipe.planner.choosing.batches import GAIN, MOST_ROWS, found_batches, knee_of, stated_batches, with_batch
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.combined import Change, stored_in, stored_narrow, ways_out
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.workflows.planning.stated_setting import stated_setting


def toy(memory=80.0, devices=2):
    """A training whose update takes as long for each batch, so that more samples a step gain."""
    profile = synthetic.chain([0.01] * 6, parameters=[10**8] * 6, elements=10**5, frozen=0.01)
    cluster = synthetic.cluster(devices, memory=memory)
    return Setting(profile=replace(profile, update=1e-10), cluster=cluster, workload=synthetic.workload(1))


def setting(memory, batch=32):
    cluster = with_memory(load_cluster("a100-80x1"), round(memory * GIB))
    profile = recorded_profile("sd-2.1-a100-80")
    return stated_setting(profile, cluster, batch, checkpoint=(), has_ema=False, optimizer="AdamW")


def test_batches_double_from_one_for_each_device_until_more_gains_little():
    told = []
    tried = found_batches(toy(), tell=told.append)
    assert tried == told
    assert [one.batch for one in tried] == [2 << doubled for doubled in range(len(tried))]
    assert 2 < len(tried) <= MOST_ROWS
    rates = [one.rate for one in tried]
    assert all(now >= before * (1 + GAIN) for before, now in pairwise(rates[:-1]))
    assert rates[-1] < rates[-2] * (1 + GAIN)
    for one in tried:
        assert one.rate == pytest.approx(one.batch / best_choice(with_batch(toy(), one.batch)).step)


def test_the_knee_is_the_smallest_batch_within_a_twentieth_of_the_best_rate():
    tried = stated_batches(toy(), [32, 1, 8, 2, 8])
    assert [one.batch for one in tried] == [1, 2, 8, 32]
    near = [one for one in tried if one.rate >= 0.95 * max(other.rate for other in tried)]
    assert knee_of(tried) == near[0]
    assert knee_of([]) is None


def test_a_batch_that_does_not_fit_has_no_rate():
    (one,) = stated_batches(toy(0.1), [2])
    assert (one.choice, one.rate) == (None, 0.0)
    assert found_batches(toy(0.1)) == []
    assert knee_of([one]) is None


def fits(asked):
    return best_choice(asked) is not None


def changed_by(way, asked):
    for change in way.changes:
        asked = change.apply(asked)
    return asked


def test_the_way_out_has_the_fewest_changes_and_a_plan():
    asked = setting(15.5)
    assert not fits(asked)
    (way,) = ways_out(asked)
    assert [change.option for change in way.changes] == [("--checkpoint", "*")]
    assert fits(changed_by(way, asked))
    assert way.nearest.use.total <= 15.5 * GIB


@pytest.mark.slow
def test_more_cards_and_adapters_are_added_where_recomputation_does_not_suffice():
    asked, larger = setting(8), with_memory(load_cluster("a100-80x2"), 8 * GIB)
    ways = ways_out(asked, larger=[larger])
    cards, adapters = ("--cluster", "a100-80x2"), ("--lora-rank", "16")
    assert [[change.option for change in way.changes] for way in ways] == [[("--checkpoint", "*"), cards], [adapters]]
    for way in ways:
        assert way.nearest.fits
        assert fits(changed_by(way, asked))
    assert not fits(replace(asked, cluster=larger))  # so the recomputation is needed


def test_smaller_pictures_are_asked_about_only_where_they_can_help():
    asked = []

    def change(setting):
        asked.append(setting)
        return replace(setting, profile=recorded)

    recorded = toy().profile
    pictures = Change(words="smaller", option=("--resolution", "8"), key="", apply=change)
    activation = tuple(4 * 10**9 * size for size in recorded.batch_sizes)
    grown = tuple(replace(one, activation=activation) for one in recorded.layers)
    heavy = replace(toy(14, devices=1), profile=replace(recorded, layers=grown))
    heavy = replace(heavy, workload=replace(heavy.workload, checkpointed=("*",)))
    (way,) = ways_out(heavy, smaller=[pictures])
    assert way.changes == (pictures,)
    assert fits(replace(heavy, profile=recorded))
    asked.clear()
    assert ways_out(replace(toy(1, devices=1), workload=heavy.workload), smaller=[pictures]) == []
    assert not asked


def test_a_way_out_stores_frozen_linear_layers_in_one_byte_or_four_bits():
    plain = toy(devices=1)
    frozen = replace(
        plain.graph.parameters[0], name="unet.weight", shape=(100, 128), dtype="bfloat16", is_trainable=False
    )
    rest = [replace(frozen, name=name, shape=shape) for name, shape in (("vae.w", (9, 9)), ("unet.conv", (3, 3, 3)))]
    rest.append(replace(frozen, name="unet.embedder.weight", shape=(100, 128)))  # a linear layer, for all its name
    rest.append(replace(frozen, name="unet.embedder.table", shape=(100, 128), dtype="float32"))
    graph = replace(plain.graph, parameters=(*plain.graph.parameters, frozen, *rest))
    workload = replace(plain.workload, frozen=DEVICE, encoders=DEVICE)
    profile = replace(plain.profile, graph=graph, precision="bfloat16")
    setting = replace(plain, profile=profile, workload=workload)
    for form, size in ((Form.INT8, 100 * (128 + 4)), (Form.NF4, 100 * 128 // 2 + 200 + 4)):
        changed = stored_in(form, setting)
        sizes = {one.name: one.num_bytes for one in changed.graph.parameters}
        assert (sizes["unet.weight"], sizes["vae.w"], sizes["unet.conv"]) == (size, 162, 54)
        assert (sizes["unet.embedder.weight"], sizes["unet.embedder.table"]) == (size, 4 * 12800)
        assert changed.ledger.frozen["unet.weight"] == size
        assert stored_in(form, changed) is None
    large = replace(frozen, shape=(10**5, 10**5))
    graph = replace(
        plain.graph,
        parameters=(*plain.graph.parameters, large),
        layers=tuple(
            replace(one, parameters=(*one.parameters, large.name)) if one.name in plain.graph.frozen_layers else one
            for one in plain.graph.layers
        ),
    )
    setting = replace(toy(20, devices=1), profile=replace(profile, graph=graph), workload=workload)
    assert not fits(setting)
    (way, *_) = ways_out(setting)
    assert [change.option for change in way.changes if change.option[0] != "--checkpoint"] == [
        ("--frozen-dtype", "int8")
    ]


def test_frozen_matrices_are_stored_in_half_their_bytes_once():
    graph = toy().graph
    frozen = replace(graph.parameters[0], name="frozen.weight", shape=(8, 8), dtype="float32", is_trainable=False)
    embedding = replace(frozen, name="token_embedding.weight")
    wide = replace(toy().profile, graph=replace(graph, parameters=(*graph.parameters, frozen, embedding)))
    workload = replace(toy().workload, frozen=DEVICE, encoders=DEVICE)  # each as wide as the graph says
    once = stored_narrow(replace(toy(), profile=wide, workload=workload))
    stored = {one.name: one.dtype for one in once.graph.parameters}
    assert (stored["frozen.weight"], stored["token_embedding.weight"]) == ("bfloat16", "float32")
    assert stored_narrow(once) is None
