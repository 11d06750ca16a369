from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner.candidates import Judge
from diffusionpipe.planner.explain import _update, compare
from diffusionpipe.planner.filling import filler_of
from diffusionpipe.planner.search import search
from diffusionpipe.planner.stage_costs import Setting, trained_parameters, update_time


def comparison_of(setting, *, is_filled=True):
    return compare(setting, search(setting, filler=filler_of(setting) if is_filled else None))


def unet_setting(**cluster):
    cluster = synthetic.cluster(**{"num_ranks": 4, **cluster})
    return Setting(profile=synthetic.unet(), cluster=cluster, workload=synthetic.workload(64))


def test_the_first_row_is_the_winner_and_all_baselines_follow():
    found = comparison_of(unet_setting())
    assert found.ours[0].step == min(row.step for row in found.ours if row.use)
    assert [row.name for row in found.others] == [
        "data parallel (overlapped)",
        "data parallel",
        "ZeRO-3 / FSDP",
        "GPipe",
        "1F1B + SPP",
    ]
    assert all(row.samples_per_second == pytest.approx(64 / row.step) for row in (*found.ours, *found.others))


def test_everyones_step_ends_with_the_update_of_what_its_busiest_rank_holds():
    setting = unet_setting()
    parameters = trained_parameters(setting.graph, setting.graph.backbone_layers)
    known = replace(setting, profile=replace(setting.profile, update=1e-12))  # so short that nothing else is chosen
    before, after = comparison_of(setting), comparison_of(known)
    assert all(row.update == 0 for row in (*before.ours, *before.others))
    for old, new in zip(before.others, after.others, strict=True):
        assert (new.name, new.sizes) == (old.name, old.sizes)
        assert new.step == pytest.approx(old.step + new.update, rel=1e-12)
        assert new.samples_per_second == pytest.approx(64 / new.step)
    updates = {row.name: row.update for row in after.others}
    assert updates["data parallel"] == updates["data parallel (overlapped)"] == pytest.approx(1e-12 * parameters)
    assert updates["ZeRO-3 / FSDP"] == pytest.approx(1e-12 * parameters / 4)
    assert 1e-12 * parameters / 4 <= updates["GPipe"] < 1e-12 * parameters
    for row, (_, proposal) in zip(after.ours, search(known, filler=filler_of(known)).finalists, strict=False):
        assert row.update == update_time(proposal.train, proposal.blocks, known.profile, proposal.mesh)


def test_a_candidate_that_is_only_estimated_updates_what_its_plan_would():
    setting = unet_setting()
    setting = replace(setting, profile=replace(setting.profile, update=1e-9))
    found = search(setting)
    for candidate, proposal in found.finalists:
        assert _update(Judge(setting=setting), candidate) == pytest.approx(proposal.update)
    assert {len(candidate.starts) > 1 for candidate, _ in found.finalists} == {False, True}


def test_it_says_when_data_parallelism_is_right():
    found = comparison_of(unet_setting())
    assert found.verdict.startswith("Use data parallelism")
    assert "it is as fast as data parallel (overlapped), the best alternative that fits" in found.verdict


def test_it_says_when_memory_forbids_copies():
    setting = Setting(profile=synthetic.transformer(), cluster=synthetic.cluster(8), workload=synthetic.workload(32))
    found = comparison_of(setting)
    assert "a whole copy of the model misses the device's memory by" in found.verdict
    assert "stages" in found.verdict


def test_it_says_how_much_of_the_encoders_is_hidden():
    plain, filled = (comparison_of(unet_setting(), is_filled=f) for f in (False, True))
    assert " 0% of the encoders'" in plain.verdict
    assert filled.ours[0].exposed < plain.ours[0].exposed


def test_it_says_by_how_much_nothing_fits_and_what_would_help():
    found = comparison_of(unet_setting(memory=2))
    assert found.verdict.startswith("No layout fits: the nearest, ")
    assert "misses the memory of worker" in found.verdict
    assert "devices of" in found.verdict


def test_recomputing_is_proposed_where_it_makes_the_model_fit():
    setting = Setting(
        profile=synthetic.transformer(forward_ms=100, gigaparameters=1),
        cluster=synthetic.cluster(2, memory=17),
        workload=synthetic.workload(2),
    )
    plain = search(setting)
    assert plain.winner is None
    assert "recompute all layers" in compare(setting, plain).verdict


def test_one_device_is_simply_used():
    found = comparison_of(unet_setting(num_ranks=1))
    assert found.verdict.startswith("Use the one device")
