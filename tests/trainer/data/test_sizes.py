"""Sizes of pictures: the pure assignment from headers, and the endless order in which nothing is dropped."""

import random
import subprocess
import sys
from collections import Counter
from math import sqrt

import pytest

from diffusionpipe.errors import DataError
from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, areas_of, assign, size_text, sizes_of_area, stated_size

ASPECTS = (0.5, 2.0)


def headers(count: int) -> list[tuple[int, int]]:
    """Widths and heights of random aspect, log-uniform from 1:2 to 2:1."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        aspect, side = 2 ** draw.uniform(-1, 1), draw.uniform(800, 2000)
        found.append((round(side * sqrt(aspect)), round(side / sqrt(aspect))))
    return found


def test_sizes_are_assigned_without_torch():
    code = "import sys, diffusionpipe.trainer.data.sizes.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ten_thousand_pictures_lose_less_than_a_twentieth_where_one_square_cuts_a_quarter():
    pictures = headers(10_000)
    many = assign(pictures, SizeRules(areas=(sizes_of_area(512, ASPECTS),)), 4)
    one = assign(pictures, SizeRules(areas=((Clip.square(512),),)), 4)
    assert many.cut < 0.05 < 0.27 < one.cut < 0.29
    assert sum(share.pictures for share in many.shares) == 10_000
    assert not many.left_out


@pytest.mark.parametrize("areas", [(512,), (512, 768)])
def test_three_epochs_show_each_of_ten_thousand_pictures_its_share_within_one(areas):
    rules = SizeRules(areas=tuple(sizes_of_area(side, ASPECTS) for side in areas))
    order = SizeOrder(assignment=assign(headers(10_000), rules, 4), seed=3, run=4)
    seen, runs = Counter(), Counter()
    for position in range(30_000):
        size, sample, _ = order.at(position)
        seen[sample] += 1
        runs[size] += 1
    assert len(seen) == 10_000
    assert {2, 3, 4} >= set(seen.values())
    for number, share in enumerate(order.assignment.shares):
        expected = sum(len(share.members[epoch % len(areas)]) for epoch in range(3))
        assert abs(runs[number] - expected) <= 2 * order.run


def test_the_order_needs_nothing_before_a_position_and_changes_with_the_seed():
    assignment = assign(headers(200), SizeRules(areas=(sizes_of_area(512, ASPECTS),)), 4)
    order = SizeOrder(assignment=assignment, seed=3, run=4)
    forwards = [order.at(position) for position in range(900)]
    again = SizeOrder(
        assignment=assign(headers(200), SizeRules(areas=(sizes_of_area(512, ASPECTS),)), 4), seed=3, run=4
    )
    assert [again.at(position) for position in range(899, -1, -1)] == forwards[::-1]
    assert [SizeOrder(assignment=assignment, seed=4, run=4).at(position) for position in range(900)] != forwards


def test_a_run_has_one_size():
    order = SizeOrder(
        assignment=assign(headers(100), SizeRules(areas=(sizes_of_area(512, ASPECTS),)), 4), seed=0, run=4
    )
    numbers = order.size_numbers(range(400))
    assert all(len(set(numbers[start : start + 4])) == 1 for start in range(0, 400, 4))
    assert len(set(numbers)) > 3


WIDE, SQUARE = Clip(width=768, height=512), Clip.square(512)


def test_too_few_pictures_of_a_size_go_to_the_nearest_and_the_assignment_says_so():
    found = assign([(900, 600)] + [(600, 600)] * 5, SizeRules(areas=((WIDE, SQUARE),)), 2)
    assert [share.size for share in found.shares] == [SQUARE]
    assert found.joined == ((WIDE, SQUARE, 1),)
    assert found.shares[0].members == ((0, 1, 2, 3, 4, 5),)


def test_one_picture_too_few_is_repeated_where_the_limit_forbids_to_cut():
    found = assign([(900, 600)] + [(600, 600)] * 5, SizeRules(areas=((WIDE, SQUARE),), most_cut=0.2), 2)
    assert [(share.size, share.repeats) for share in found.shares] == [(WIDE, True), (SQUARE, False)]


def test_far_too_few_pictures_under_a_strict_limit_are_refused_by_name():
    with pytest.raises(DataError, match=r"768 x 512 pixels has 1 picture where 4 lie side by side.* cut 33 % away"):
        assign([(900, 600)] + [(600, 600)] * 5, SizeRules(areas=((WIDE, SQUARE),), most_cut=0.2), 4)


def test_small_pictures_are_left_out_by_name_or_visit_the_areas_that_they_fill():
    rules = SizeRules(areas=((Clip.square(512),), (Clip.square(1024),)), enlarge=False, min_side=100)
    found = assign([(600, 600), (400, 400), (50, 2000), (2000, 2000), (2100, 2000), (600, 600)], rules, 1)
    assert found.left_out == {
        1: "it is smaller than every size, and data.enlarge is false",
        2: "a side of 50 pixels is below data.min_side",
    }
    small, large = found.shares
    assert set(small.members[0]) | set(small.members[1]) == {0, 3, 4, 5}
    assert set(large.members[0]) | set(large.members[1]) == {3, 4}
    assert {0, 5} <= set(small.members[0]).intersection(small.members[1])


def test_an_area_without_a_size_names_the_keys_that_say_so():
    rules = SizeRules(areas=areas_of([32], (0.5, 2.0)))
    with pytest.raises(DataError, match=r"no size of this area has sides that are multiples of data\.multiple"):
        assign([(32, 32)], rules, 1)


CLIPS = SizeRules(areas=areas_of(["32x32x33", "32x32x17", "32x24x17", "32x32"], None))


def test_a_clip_has_the_size_of_most_frames_that_it_can_fill_and_nothing_is_dropped():
    frames = [1, 1, 16, 17, 32, 33, 90, 40]
    pictures = [(32, 32), (64, 32), (32, 32), (32, 24), (32, 32), (32, 32), (64, 64), (32, 16)]
    found = assign(pictures, CLIPS, 1, frames=frames)
    size_of = {number: share.size for share in found.shares for epoch in share.members for number in epoch}
    assert [size_of[number].frames for number in range(8)] == [1, 1, 1, 17, 17, 33, 33, 33]
    assert size_of[3] == Clip(width=32, height=24, frames=17)
    assert not found.left_out


def test_clips_give_themselves_away_to_sizes_of_fewer_frames_alone():
    found = assign([(32, 32)] * 6, CLIPS, 2, frames=[1, 1, 17, 17, 17, 33])
    assert found.joined == ((Clip(width=32, height=32, frames=33), Clip(width=32, height=32, frames=17), 1),)
    with pytest.raises(DataError, match=r"17 frames of 32 x 32 pixels has 1 picture where 3 lie side by side"):
        assign([(32, 32)] * 4, SizeRules(areas=areas_of(["32x32x33", "32x32x17"], None)), 3, frames=[17, 33, 33, 33])


def test_a_clip_that_is_shorter_than_every_size_is_left_out_by_name():
    found = assign([(32, 32)] * 3, SizeRules(areas=areas_of(["32x32x33", "32x32x17"], None)), 1, frames=[16, 17, 40])
    assert found.left_out == {0: "it has 16 frames, and every size has more"}


@pytest.mark.parametrize("text", ["16", "16x", "axb", "8x8x8x8", "8x-8"])
def test_a_text_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a width and a height"):
        stated_size(text)


def test_texts_of_sizes_are_read_back():
    for size in (Clip(width=8, height=16), Clip(width=8, height=16, frames=33)):
        assert stated_size(size_text(size)) == size
