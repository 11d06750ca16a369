import random
from itertools import groupby, product

import pytest
from planner.unequal.draws import CLASSES, drawn_counts, priced

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir.cells import Cell
from diffusionpipe.planner.unequal.cut import best_cut
from diffusionpipe.planner.unequal.cutting import numbered_by_size
from diffusionpipe.planner.unequal.steps import Prices, best_step


def every_cut(sizes):
    """All cuts of the samples whose micro-batches have one size each."""
    for borders in product((False, True), repeat=len(sizes) - 1):
        groups, own = [], [sizes[0]]
        for size, starts in zip(sizes[1:], borders, strict=True):
            if starts:
                groups.append(own)
                own = []
            own.append(size)
        groups.append(own)
        if all(len(set(group)) == 1 for group in groups):
            yield tuple(Cell(group[0], len(group)) for group in groups)


def test_a_cut_of_eight_samples_is_the_best_of_all_cuts():
    draw = random.Random(0)
    for _ in range(500):
        num_sizes, stages = draw.randint(1, 8), draw.randint(1, 6)
        sizes = sorted(draw.choices(range(num_sizes), k=8))
        # Any times at all: also ones that fall with samples.
        times = {Cell(size, samples): draw.randint(1, 60) for size in range(num_sizes) for samples in range(1, 9)}
        room = [draw.randint(1, 8) for _ in range(num_sizes)]

        def value(cells, stages=stages, times=times):
            return (stages - 1) * max(times[cell] for cell in cells) + sum(times[cell] for cell in cells)

        able = [cut for cut in every_cut(sizes) if all(samples <= room[size] for size, samples in cut)]
        found = best_cut(sizes, lambda size, samples, times=times: times[size, samples], room.__getitem__, stages)
        assert found in able
        assert value(found) == min(map(value, able))


def test_no_worker_holds_more_than_its_limit_whatever_is_drawn():
    draw = random.Random(1)
    for _ in range(60):
        stages, num_sizes = draw.randint(1, 5), draw.randint(1, 4)
        weights = [[draw.randint(1, 9) for _ in range(num_sizes)] for _ in range(stages)]
        limits = tuple((stages - s) * (max(own) + draw.randint(0, 20)) for s, own in enumerate(weights))

        def costs(cell, weights=weights):
            return tuple(
                StageCosts(forward=1 + own[cell.size] * cell.samples, activation=own[cell.size] * cell.samples)
                for own in weights
            )

        prices = Prices(stages=costs, num_stages=stages, limits=limits)
        step = best_step([draw.randint(0, 6) for _ in range(num_sizes - 1)] + [3], prices)
        assert all(peak <= limit for peak, limit in zip(step.peaks, limits, strict=True))


@pytest.mark.parametrize("stages", [2, 4])
def test_a_step_is_never_slower_than_its_samples_in_a_step_for_each_size(stages):
    prices = priced(stages)
    for counts in drawn_counts(20, seed=0):
        apart = [[count if size == own else 0 for size, count in enumerate(counts)] for own in range(len(CLASSES))]
        assert best_step(counts, prices).time <= sum(best_step(own, prices).time for own in apart if any(own))


def test_every_sample_is_in_one_micro_batch_of_its_size():
    (counts,) = drawn_counts(1, seed=3)
    cells = sorted(best_step(counts, priced(3)).cells)
    held = {size: sum(cell.samples for cell in own) for size, own in groupby(cells, lambda cell: cell.size)}
    assert held == {size: count for size, count in enumerate(counts) if count}


def test_a_sample_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="not one sample of size 0 fits in memory"):
        best_cut((0, 0), lambda size, samples: 1.0, lambda size: 0, 2)


def test_a_step_without_samples_is_refused():
    with pytest.raises(ValueError, match="no micro-batches"):
        best_step((0, 0), priced(2))


def test_micro_batches_are_numbered_by_size_whatever_their_order():
    for counts in drawn_counts(20, seed=0):
        step = best_step(counts, priced(3))
        schedule = numbered_by_size(step)
        (pipeline,) = schedule.placement.pipelines
        assert [samples for _, samples in sorted(step.cells)] == list(pipeline.microbatches)
        for before, now in zip(step.orders, schedule.orders, strict=True):
            kept = [step.cells[action.microbatch].samples for action in before]
            assert [pipeline.microbatches[action.microbatch] for action in now] == kept
