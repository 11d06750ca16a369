import re
from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.explain import _best_pipeline, compare
from diffusionpipe.planner.choosing.rows import Row, parts_of, update_of
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import trained_parameters, update_time
from diffusionpipe.planner.pricing.storing import encoder_bytes
from diffusionpipe.planner.rivals.baselines import best_baselines
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.search import search


def comparison_of(setting, *, is_filled=True):
    return compare(setting, search(setting, filler=filler_of(setting) if is_filled else None))


def unet_setting(**cluster):
    cluster = synthetic.cluster(**{"num_ranks": 4, **cluster})
    return Setting(profile=synthetic.unet(), cluster=cluster, workload=synthetic.workload(64))


def test_the_winner_is_the_first_simulated_row_and_all_baselines_follow():
    found = comparison_of(unet_setting())
    assert found.winner == found.simulated[0]
    assert {row.name for row in found.others} == {"DDP", "DDP (no overlap)", "ZeRO-3 / FSDP", "GPipe", "1F1B + SPP"}
    assert all(row.samples_per_second == pytest.approx(64 / row.step) for row in (*found.ours, *found.others))


@pytest.mark.parametrize("memory", [80, 6])
def test_each_group_of_rows_is_fastest_first_and_what_does_not_fit_last(memory):
    """Copies take 9.6 GB."""
    profile = synthetic.chain([0.01] * 6, parameters=[10**8] * 6, frozen=0.01)
    cluster = synthetic.cluster(4, memory=memory, intra_gb=50)
    found = comparison_of(Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16)))
    assert len(found.ours) > 2
    assert len(found.others) > 2
    for rows in (found.simulated, found.estimated, found.others):
        assert list(rows) == sorted(rows, key=lambda row: (not row.fits, row.step))
    assert {row.fits for row in found.others} == {memory > 10, True}
    assert all(row.use is None for row in (*found.estimated, *found.others))
    assert not {(row.name, row.sizes) for row in found.simulated} & {(row.name, row.sizes) for row in found.estimated}


def test_everyones_step_ends_with_the_update_of_what_its_busiest_rank_holds():
    setting = unet_setting()
    parameters = trained_parameters(setting.graph, setting.graph.backbone_layers)
    known = replace(setting, profile=replace(setting.profile, update=1e-12))  # so short that nothing else is chosen
    before, after = comparison_of(setting), comparison_of(known)
    assert all(row.update == 0 for row in (*before.ours, *before.others))
    for old, new in zip(*(sorted(one.others, key=lambda row: row.name) for one in (before, after)), strict=True):
        assert (new.name, new.sizes) == (old.name, old.sizes)
        assert new.step == pytest.approx(old.step + new.update, rel=1e-12)
        assert new.samples_per_second == pytest.approx(64 / new.step)
    updates = {row.name: row.update for row in after.others}
    assert updates["DDP"] == updates["DDP (no overlap)"] == pytest.approx(1e-12 * parameters)
    assert updates["ZeRO-3 / FSDP"] == pytest.approx(1e-12 * parameters / 4)
    assert 1e-12 * parameters / 4 <= updates["GPipe"] < 1e-12 * parameters
    updates = {
        update_time(proposal.train, proposal.blocks, known.profile, proposal.mesh)
        for _, proposal in search(known, filler=filler_of(known)).finalists
    }
    assert {row.update for row in after.simulated} == updates


def test_a_candidate_that_is_only_estimated_updates_what_its_plan_would():
    setting = unet_setting()
    setting = replace(setting, profile=replace(setting.profile, update=1e-9))
    found = search(setting)
    for candidate, proposal in found.finalists:
        assert update_of(Judge(setting=setting), candidate) == pytest.approx(proposal.update)
    assert {len(candidate.starts) > 1 for candidate, _ in found.finalists} == {False, True}


def test_it_says_when_data_parallelism_is_right():
    found = comparison_of(unet_setting())
    assert found.verdict.startswith("Use data parallelism")
    assert "it is as fast as DDP, the fastest other system that fits" in found.verdict


def test_the_best_pipeline_beside_data_parallelism_is_one_with_several_stages_that_fits():
    """Copies of the model are no pipeline, whatever they are called, and estimates are marked."""
    rows = [row("sharded data parallel", 1.0), row("data parallel", 1.01), row("zb-2p", 1.03, num_stages=4)]
    rows += [row("zb-v", 1.001, num_stages=8, overflow=1)]
    assert _best_pipeline(rows[0], tuple(rows)) == "the best pipeline (zb-2p, sizes) takes 1.03 times as long, and "
    rows.append(replace(row("1f1b", 1.02, num_stages=3), use=None))
    assert "(1f1b, sizes, estimated) takes 1.02 times as long" in _best_pipeline(rows[0], tuple(rows))
    assert _best_pipeline(rows[0], tuple(rows[:2])) == ""


def row(name, step, *, num_stages=1, overflow=-1):
    return Row(
        name=name, sizes="sizes", num_stages=num_stages, step=step, update=0.0, samples_per_second=1 / step,
        bubble=0.0, exposed=0.0, memory=0, use=MemoryUse(), overflow=overflow,
    )  # fmt: skip


def test_sharded_data_parallelism_says_which_memory_is_in_parts_and_which_is_not():
    """Parts of what is trained, whole encoders: the figures are those of the row's memory."""
    setting = unet_setting(memory=12)
    found = compare(setting, search(replace(setting, given=Given(sharded=Sharded.ALL))))
    use = found.winner.use
    assert found.winner.name == "sharded data parallel"
    encoders, parts = encoder_bytes(setting), use.parameters + use.gradients + use.optimizer
    assert use.frozen == encoders
    assert (
        f"each of the 4 devices holds a part of the trained parameters, gradients and optimizer state "
        f"({parts / 2**30:.2f} GiB on the fullest) and the whole of the encoders ({encoders / 2**30:.2f} GiB)"
    ) in found.verdict


def test_it_says_when_memory_forbids_copies():
    setting = Setting(profile=synthetic.transformer(), cluster=synthetic.cluster(4), workload=synthetic.workload(16))
    found = comparison_of(setting)
    assert re.search(r"a whole copy of the model needs [0-9.]+ GiB more than a device has", found.verdict)
    assert "stages" in found.verdict


def test_it_says_how_much_of_the_encoders_is_hidden():
    plain, filled = (comparison_of(unet_setting(), is_filled=f) for f in (False, True))
    assert " 0% of the encoders'" in plain.verdict
    assert filled.ours[0].exposed < plain.ours[0].exposed


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_devices_memory_add_up_to_its_total_as_printed(seed):
    random = Random(seed)
    sizes = [random.randrange(40 * 2**30) if random.random() < 0.7 else random.randrange(2**24) for _ in range(6)]
    use = MemoryUse(**dict(zip(("parameters", "gradients", "optimizer", "frozen", "activations", "messages"), sizes)))  # noqa: B905
    parts = parts_of(use, 2**30)
    assert f"{sum(parts.values()):.2f}" == f"{use.total / 2**30:.2f}"
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert all(abs(size - getattr(use, name) / 2**30) < 0.01 for name, size in parts.items())


def test_one_device_is_simply_used():
    found = comparison_of(unet_setting(num_ranks=1))
    assert found.verdict.startswith("Use the one device")


def test_another_system_that_is_listed_as_faster_says_what_it_does_that_ours_does_not(monkeypatch):
    setting = unet_setting()
    before = comparison_of(setting)
    assert before.remarks == ()
    fast = [replace(one, step=one.step / 2) for one in best_baselines(setting)]
    monkeypatch.setattr("diffusionpipe.planner.choosing.explain.best_baselines", lambda _: fast)
    found = comparison_of(setting)
    faster = [row for row in found.others if row.fits and row.step < found.winner.step]
    assert [remark.text.partition(" is listed as ")[0] for remark in found.remarks] == [row.name for row in faster]
    assert {"DDP", "ZeRO-3 / FSDP"} <= {row.name for row in faster}
    (zero,) = [remark.text for remark in found.remarks if remark.text.startswith("ZeRO-3 / FSDP")]
    assert f"{found.winner.step / next(r.step for r in faster if r.name == 'ZeRO-3 / FSDP'):.2f} times as fast" in zero
    assert "It cuts every layer into equal parts" in zero
