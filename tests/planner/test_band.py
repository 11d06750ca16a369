"""At both ends of the band, the choice and its rivals are what planning from scratch gives there."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.cli.plan_band import band_lines, band_text
from diffusionpipe.planner.band import UNCERTAINTY, Band, Flip, band_of, stretched
from diffusionpipe.planner.choice import GAIN, choose
from diffusionpipe.planner.pricing.setting import Setting

TIES = {
    0: 2.0299,
    1: 0.8341,
    2: 0.7596,
    3: 0.9826,
    4: 4.3733,
    5: 0.3764,
    6: 0.5603,
    7: 0.9377,
    8: 1.2711,
    9: 2.3912,
    10: 1.3636,
    11: 0.8539,
    12: 0.7493,
    13: 1.4686,
    14: 3.0856,
    15: 1.5526,
    16: 1.7577,
    17: 0.693,
    18: 0.9162,
    19: 0.4264,
}
"""Seed -> gigabytes a second of the links, within 1 % of which the choice changes from a pipeline to copies."""
NEAR_A_TIE, CLEAR = 0.5, 1.0
"""Gigabytes a second between two devices: at the first, slower layers make data parallelism the fastest."""


def setting_of(intra_gb, source="analytic"):
    seconds = [0.01, 0.03, 0.02, 0.005, 0.02, 0.01]
    profile = synthetic.chain(seconds, parameters=[10**7] * 6, frozen=0.004)
    return Setting(
        profile=replace(profile, source=source),
        cluster=synthetic.cluster(2, memory=80.0, intra_gb=intra_gb),
        workload=synthetic.workload(8),
    )


@pytest.mark.parametrize(("intra_gb", "flips"), [(NEAR_A_TIE, (1 + UNCERTAINTY,)), (CLEAR, ())])
def test_the_choice_flips_where_planning_at_that_end_finds_something_faster(intra_gb, flips):
    setting = setting_of(intra_gb)
    band = band_of(choose(setting))
    assert tuple(flip.factor for flip in band.flips) == flips
    for factor, step in ((1 - UNCERTAINTY, band.shortest), (1 + UNCERTAINTY, band.longest)):
        best = step * (1 - sum(flip.gain for flip in band.flips if flip.factor == factor))
        anew = choose(stretched(setting, factor))
        assert best == pytest.approx(anew.step, rel=2e-3)
        assert all(anew.sizes == flip.layout for flip in band.flips if flip.factor == factor)


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
    for gb, flips in ((tie * 0.97, True), (tie / 8, False)):
        choice = choose(cell_of(seed, gb))
        band = band_of(choice)
        anew = [choose(stretched(choice.setting, 1 + sign * UNCERTAINTY)) for sign in (-1, 1)]
        own = (band.shortest, band.longest)
        gains = [1 - one.step / step for one, step in zip(anew, own, strict=True)]
        assert (max(gains) >= GAIN) == flips
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
        "both ends the plan stays the fastest of the layouts above."
    )
    assert band_text(replace(steady, flips=(flip,))).endswith(
        "The choice flips inside the band: with longer layer times, data parallel, 2 copies is 1.8% faster. Measure "
        "the layers before you rely on it."
    )
