"""The recipes that are measured on digits, trained as `python -m benchmarks.recipes` does."""

import re

import pytest

from benchmarks.recipes.adapters import adapters
from benchmarks.recipes.in_time import in_time
from benchmarks.recipes.masks import masks
from benchmarks.recipes.narrow import narrow
from benchmarks.recipes.patches import patches
from benchmarks.recipes.prototypes import prototypes
from benchmarks.recipes.speed import speed

pytestmark = [pytest.mark.slow, pytest.mark.night, pytest.mark.timeout(3600)]

STEPS = 400


def numbers(pattern, lines):
    """The first number of the pattern in each line that has it, by the words before the line's colon."""
    found = {line.partition(":")[0]: re.search(pattern, line) for line in lines}
    return {name: float(match[1]) for name, match in found.items() if match}


def test_a_drawn_half_is_recognised_more_often_than_a_grey_one(tmp_path):
    lines = masks(tmp_path, STEPS)
    shares = numbers(r"([0-9.]+)% recognised", lines)
    assert shares["right halves drawn without a caption"] > shares["right halves left grey"], lines


def test_narrow_digits_are_recognised_as_often_and_ranges_at_one_time_are_worse(tmp_path):
    lines = narrow(tmp_path, STEPS)
    shares, errors = numbers(r"([0-9.]+)% recognised", lines), numbers(r"error ([0-9.]+)", lines)
    assert min(shares["w8"], shares["w8a8"]) >= shares["wide"] - 2, lines
    assert errors["w8a8"] < errors["w8a8, ranges at one times"], lines
    assert min(numbers(r"([0-9.]+)% of [0-9,]+ numbers", lines).values()) > 80


@pytest.mark.parametrize("recipe", [speed, prototypes])
def test_a_recipe_reaches_the_plain_loss_at_all(recipe, tmp_path):
    lines = recipe(tmp_path, STEPS)
    assert any("by None" not in line for line in lines[1:3]), lines


def test_patches_come_within_a_tenth_of_the_loss_of_whole_pictures_at_as_many_pixels(tmp_path):
    whole, *_, equal = patches(tmp_path, STEPS)
    plain, patched = (float(re.search(r"loss ([0-9.]+)", line)[1]) for line in (whole, equal))
    assert "patches: loss" in equal
    assert patched < 1.1 * plain, (whole, equal)


def test_steps_at_the_same_time_draw_the_digits_of_steps_in_turn(tmp_path):
    lines = in_time(tmp_path, STEPS)
    assert numbers(r"the same digit: ([0-9.]+)%", lines)["the same digit"] >= 99, lines


def test_digits_of_adapters_on_nf4_are_recognised_as_often_as_on_bfloat16(tmp_path):
    lines = adapters(tmp_path, 160)
    shares = numbers(r"([0-9.]+)% of [0-9]+ digits", lines)
    assert shares["adapters on nf4"] >= shares["adapters on bfloat16"] - 2, lines
    assert min(numbers(r"([0-9.]+)% of the numbers", lines).values()) >= 80
