"""benchmarks/fits: what fits on how many cards."""

import json
from dataclasses import asdict, replace

import pytest
from planner import synthetic

from benchmarks.fits import cells
from benchmarks.fits.__main__ import fewest, kept, summary
from benchmarks.fits.cells import CARDS, MODELS, NUMBERS, WIDTHS, Case, cluster_of, measure

GIB = 2**30
MODEL = next(iter(MODELS))


def case(number=4, *, has_adapters=False):
    return Case(model=MODEL, has_adapters=has_adapters, cards=next(iter(CARDS)), number=number)


@pytest.fixture
def sized(monkeypatch):
    """The profile is that of a chain of eight layers whose weights take so many GiB in float32."""

    def give(gib):
        profile = synthetic.chain([1.0] * 8, parameters=[int(gib * GIB / 4 / 8)] * 8)
        monkeypatch.setattr(cells, "profile_of", lambda *_, **__: profile)

    return give


def test_the_cards_are_those_of_the_clusters():
    for cards in CARDS:
        for number in NUMBERS:
            cluster = cluster_of(cards, number)
            assert cluster.num_ranks == number
            assert {device.memory for device in cluster.devices} == {cluster.devices[0].memory}
            assert set(cluster.nodes) == {0}
    assert cells.cases()[0] == case(1, has_adapters=True)
    adapters, whole = len(WIDTHS) * len(NUMBERS), len(NUMBERS) - 1  # one card for adapters alone
    assert len(set(cells.cases())) == len(MODELS) * len(CARDS) * (adapters + whole)
    assert {one.trained for one in cells.cases()} == {
        *(f"adapters on {form}" for form in ("bfloat16", "int8", "nf4")),
        "whole",
    }


def test_what_fits_is_planned_in_float32_what_does_not_narrower_and_adapters_as_they_are(sized):
    sized(10)  # 40 GiB with gradients and moments, on four times 22
    found = measure(case())
    assert (found.state, found.fits) == ("float32", True)
    assert found.step > 0
    sized(30)  # 120 GiB, or 45 in the narrow state
    found = measure(case())
    assert (found.state, found.fits) == (cells.NARROW.name, True)
    found = measure(case(has_adapters=True))
    assert (found.state, found.fits) == ("float32", False)
    assert found.overflow == pytest.approx((120 / 4 - 22) * GIB, rel=0.1)
    assert found.fullest == pytest.approx(found.overflow + 22 * GIB, rel=1e-6)


def test_a_row_says_what_the_trainer_lacks(sized):
    sized(30)
    found = measure(case())
    assert replace(found, layout="1f1b, 4 stages").marked == "narrow, the trainer does this"
    in_parts = replace(found, layout="sharded data parallel, 4 copies")
    assert in_parts.marked == "narrow, the trainer lacks it in shards"
    assert replace(in_parts, state="float32").marked == "float32, the trainer does this"
    (clips,) = [name for name, stated in MODELS.items() if stated.is_class and "480p" in name]
    assert replace(found, case=replace(case(), model=clips)).marked == "narrow, the trainer lacks the model"


def test_the_summary_counts_what_fits(sized):
    sized(60)
    found = [measure(case(number, has_adapters=has)) for number in (2, 8) for has in (True, False)]
    assert summary(found) == {
        "adapters_on_bfloat16": 2,
        "adapters_on_bfloat16_of_which_fit": 0,
        "adapters_on_bfloat16_within_the_limit": 1,
        "adapters_on_bfloat16_within_the_limit_of_which_fit": 0,
        "whole": 2,
        "whole_of_which_fit": 1,
        "whole_within_the_limit": 2,
        "whole_within_the_limit_of_which_fit": 1,
    }
    assert list(fewest(found)) == [
        (MODEL, "adapters on bfloat16", ["none; 8 lack 8.0 GiB each", "", ""]),
        (MODEL, "whole", ["8 (narrow, the trainer does this)", "", ""]),
    ]
    assert json.loads(json.dumps([asdict(cell) for cell in found]))[0]["case"]["number"] == 2


def test_a_cell_that_is_kept_is_not_measured_again_and_says_what_its_fullest_card_holds(sized, tmp_path):
    sized(10)
    found = kept(tmp_path, case())
    assert sum(found.items.values()) == found.fullest
    sized(60)
    assert kept(tmp_path, case()) == found
    assert kept(None, case()) != found
