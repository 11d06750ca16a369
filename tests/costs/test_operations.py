"""The figures that follow from operations, against all subsets and a second formula; their file."""

import random
from itertools import combinations

import numpy as np
import pytest

from diffusionpipe.costs.files import write_profile
from diffusionpipe.costs.operations import (
    OperationReport,
    OperationUse,
    holding,
    read_report,
    report_to_text,
    side_by_side,
)
from diffusionpipe.errors import FileFormatError


def use(seconds, *, computing=0.0, moving=0.0, layer="a", name="mm"):
    return OperationUse(
        layer=layer, component="unet", is_backward=False, name=name, calls=1, seconds=seconds, flops=1.0, num_bytes=1.0,
        computing=computing, moving=moving,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_named_operations_are_the_fewest_of_all_subsets_that_hold_80_percent(seed):
    rng = random.Random(seed)
    uses = [use(rng.choice([1, 1, 2, 5, 20]) * rng.random()) for _ in range(rng.randint(1, 9))]
    total, found = sum(one.seconds for one in uses), holding(uses)
    fewest = next(
        count
        for count in range(1, len(uses) + 1)
        if any(sum(one.seconds for one in some) >= 0.8 * total for some in combinations(uses, count))
    )
    assert len(found) == fewest
    assert sum(one.seconds for one in found) >= 0.8 * total > sum(one.seconds for one in found[:-1])


@pytest.mark.parametrize("seed", range(10))
def test_side_by_side_is_the_sum_of_limits_over_the_limit_of_sums(seed):
    rng = np.random.default_rng(seed)
    limits = rng.random((7, 2))
    uses = [use(1.0, computing=float(one), moving=float(other)) for one, other in limits]
    expected = limits.max(axis=1).sum() / limits.sum(axis=0).max()
    assert side_by_side(uses) == pytest.approx(expected)
    assert side_by_side(uses) >= 1


def test_one_that_computes_hides_one_that_moves_as_long():
    assert side_by_side([use(1, computing=3.0, moving=0.0), use(1, computing=0.0, moving=3.0)]) == 2.0
    assert side_by_side([use(1, computing=3.0, moving=1.0)]) == 1.0
    assert side_by_side([use(1)]) == 1.0


def test_a_report_is_read_as_it_was_written(tmp_path):
    report = OperationReport(
        device="x", source="measured", precision="float32", samples=2, peak=1e9, bandwidth=1e8,
        uses=(use(1.0), use(2.0, layer="b", moving=1.0)),
    )  # fmt: skip
    path = tmp_path / "operations.json"
    path.write_text(report_to_text(report))
    assert read_report(path) == report
    assert '"holding_80_percent"' in path.read_text()


def test_a_profile_says_which_command_makes_its_operations(tmp_path):
    from planner import synthetic

    path = tmp_path / "profile.json"
    write_profile(synthetic.chain([0.01] * 2), path)
    with pytest.raises(FileFormatError, match="has no operations; make them with: diffusionpipe profile RECIPE --oper"):
        read_report(path)
    for broken in ("{}", '"a text"', "[]", '{"uses": 3}'):
        (tmp_path / "broken.json").write_text(
            f'{{"format": "diffusionpipe operations", "version": 1, "report": {broken}}}'
        )
        with pytest.raises(FileFormatError, match="is not a file of operations"):
            read_report(tmp_path / "broken.json")
