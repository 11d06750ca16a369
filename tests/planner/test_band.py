"""At both ends of the band, the choice and its rivals are what planning from scratch gives there."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.cli.text.plan_band import band_lines, band_text
from diffusionpipe.planner.choosing.band import UNCERTAINTY, Band, Flip, band_of, stretched
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.setting import Setting

TIES = {
    0: 1.299,
    1: 0.7249,
    2: 0.6112,
    3: 0.8427,
    4: 2.669,
    5: 0.3728,
    6: 0.6725,
    7: 0.8193,
    8: 0.9171,
    9: 1.602,
    10: 0.9304,
    11: 0.7188,
    12: 0.667,
    13: 1.16,
    14: 1.636,
    15: 1.147,
    16: 0.9517,
    17: 0.5429,
    18: 0.7774,
    19: 0.3846,
}
"""Seed -> gigabytes a second of the links, within 1 % of which the choice changes from a pipeline to copies."""
NEAR_A_TIE, CLEAR = 0.5, 1.0
"""Gigabytes a second between two devices: at the first, copies are a near-tie, and faster layers make it none."""


def setting_of(intra_gb, source="analytic"):
    seconds = [0.01, 0.03, 0.02, 0.005, 0.02, 0.01]
    profile = synthetic.chain(seconds, parameters=[10**7] * 6, frozen=0.004)
    return Setting(
        profile=replace(profile, source=source),
        cluster=synthetic.cluster(2, memory=80.0, intra_gb=intra_gb),
        workload=synthetic.workload(8),
    )


@pytest.mark.parametrize(("intra_gb", "flips"), [(NEAR_A_TIE, (1 - UNCERTAINTY,)), (CLEAR, ())])
def test_the_choice_flips_where_planning_at_that_end_finds_something_faster(intra_gb, flips):
    setting = setting_of(intra_gb)
    band = band_of(choose(setting))
    assert tuple(flip.factor for flip in band.flips) == flips
    for factor, step in ((1 - UNCERTAINTY, band.shortest), (1 + UNCERTAINTY, band.longest)):
        anew = choose(stretched(setting, factor)).fastest
        flip = next((flip for flip in band.flips if flip.factor == factor), None)
        if flip:
            assert step * (1 - flip.gain) == pytest.approx(anew.step, rel=2e-3)
            assert anew.sizes == flip.layout
        else:
            assert step <= anew.step * (1 + NEAR_TIE)


def test_forwards_without_gradients_are_stretched_too():
    setting = setting_of(CLEAR)
    setting = replace(setting, profile=synthetic.with_forward_only(setting.profile, 0.5))
    longer = stretched(setting, 1.25).profile
    assert longer.forward_only("layer1", 4) == pytest.approx(0.5 * longer.forward("layer1", 4))


def cell_of(seed, intra_gb):
    """A chain whose layers, parameters and encoders are drawn."""
    draw = Random(seed)
    seconds = [draw.uniform(0.005, 0.03) for _ in range(6)]
    parameters = [draw.randrange(5, 20) * 10**6 for _ in range(6)]
    return Setting(
        profile=replace(synthetic.chain(seconds, parameters=parameters, frozen=0.004), source="analytic"),
        cluster=synthetic.cluster(2, memory=80.0, intra_gb=intra_gb),
        workload=synthetic.workload(8),
    )


def is_pipeline(choice):
    return len(choice.candidate.starts) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "tie"), TIES.items())
def test_the_choice_flips_near_a_tie_and_not_far_from_it_as_planning_at_both_ends_says(seed, tie):
    """Slower layers at the same links are like faster links at the same layers, so what is best beside a tie flips."""
    assert not is_pipeline(choose(cell_of(seed, tie * 1.01)))
    assert is_pipeline(choose(cell_of(seed, tie * 0.99)))
    for gb, flips in ((tie * 1.03, True), (tie / 8, False)):
        choice = choose(cell_of(seed, gb))
        band = band_of(choice)
        anew = [choose(stretched(choice.setting, 1 + sign * UNCERTAINTY)) for sign in (-1, 1)]
        own = (band.shortest, band.longest)
        times = [step / one.fastest.step for one, step in zip(anew, own, strict=True)]
        assert (max(times) > 1 + NEAR_TIE) == flips
        assert bool(band.flips) == flips


def test_links_keep_their_speed_in_the_band():
    choice = choose(setting_of(NEAR_A_TIE))
    slow = stretched(choice.setting, 2.0)
    assert slow.cluster == choice.setting.cluster
    layer, twice = (one.profile.layers[3] for one in (choice.setting, slow))
    assert twice.forward == tuple(2 * time for time in layer.forward)
    assert twice.activation == layer.activation


def test_a_measured_profile_has_no_band():
    choice = choose(setting_of(CLEAR, source="measured"))
    assert band_of(choice) is None
    assert list(band_lines(choice, width=80)) == []


def test_the_band_is_told_in_whole_sentences():
    flip = Flip(factor=1.25, layout="data parallel, 2 copies", gain=0.018)
    steady = Band(shortest=0.9075, longest=1.5125, flips=())
    assert band_text(steady) == (
        "band: layer times are computed. If all of them are 25% shorter or longer, a step takes 907.5 to 1512.5 ms. At "
        "both ends the plan stays the fastest that is found, near-ties apart."
    )
    assert band_text(replace(steady, flips=(flip,))).endswith(
        "The choice flips inside the band: with longer layer times, data parallel, 2 copies is 1.8% faster. Measure "
        "the layers before you rely on it."
    )
