"""Which recorded steps count: not those that other programs disturbed, and of the others the calm ones first."""

import pytest

from diffusionpipe.runtime.machine.machine_use import CoreUse
from diffusionpipe.trainer.course.counted_steps import (
    COUNTED,
    ENOUGH,
    Note,
    error_of_median,
    representative_steps,
    used_text,
)


def notes_of(parts, iterations=(), others=()):
    times = [*iterations, *[1.0] * (len(parts) - len(iterations))]
    uses = [
        *(None if one is None else CoreUse(others=one, room=0.0, doubt=0.0) for one in others),
        *[None] * len(parts),
    ]
    return [
        Note(without_core=part, iteration=time, use=use) for part, time, use in zip(parts, times, uses, strict=False)
    ]


CALM, LATE = [0.0] * COUNTED, [0.2] * COUNTED


def test_steps_disturbed_by_other_programs_do_not_count():
    others = [0.4 if step % 3 == 0 else 0.01 for step in range(COUNTED)]
    counted = representative_steps(notes_of(CALM, others=others))
    assert counted.steps == tuple(step for step in range(COUNTED) if step % 3)
    assert (counted.num_disturbed, counted.others, counted.why_more) == (5, 0.01, "")


def test_nothing_is_judged_where_other_programs_disturb_nearly_all_steps():
    """Even where they are steady, and no rank was seen waiting for a core."""
    counted = representative_steps(notes_of(CALM, others=[0.01] * (ENOUGH - 1) + [0.4] * (COUNTED - ENOUGH + 1)))
    assert counted.steps == ()
    assert counted.others == 0.4
    assert counted.why_more == "other programs used 40 % of the cores, too much in 8 of 15 steps"
    assert used_text(counted.others) == "other programs used 40 % of the cores"


def test_steps_that_wait_for_our_own_ranks_count_and_are_no_other_programs():
    """Four ranks on two cores wait for a core in every step, and always will."""
    counted = representative_steps(notes_of(LATE, others=[0.0] * COUNTED))
    assert counted.steps == tuple(range(COUNTED))
    assert (counted.num_disturbed, counted.others) == (0, 0.0)
    assert "other programs" not in counted.why_more
    assert counted.why_more == "ranks and data workers of this run waited for a core in 15 of 15 steps"


def test_undisturbed_steps_count_at_once():
    counted = representative_steps(notes_of(CALM, others=[0.02] * COUNTED))
    assert (counted.steps, counted.num_disturbed, counted.why_more) == (tuple(range(COUNTED)), 0, "")


def test_other_programs_on_cores_that_the_ranks_leave_disturb_nothing():
    notes = [Note(without_core=0.0, iteration=1.0, use=CoreUse(others=0.5, room=0.5, doubt=0.0))] * COUNTED
    assert representative_steps(notes).num_disturbed == 0


def test_what_ticks_leave_open_is_no_other_program():
    notes = [Note(without_core=0.0, iteration=1.0, use=CoreUse(others=0.1, room=0.0, doubt=0.06))] * COUNTED
    assert representative_steps(notes).num_disturbed == 0


def test_where_nobody_can_say_what_others_use_calm_steps_count():
    counted = representative_steps(
        notes_of([0.5, 0.0, 0.02, 0.4, *[0.01] * (COUNTED - 4)], iterations=[2.0, 1.0, 1.0, 3.0])
    )
    assert counted.steps == (1, 2, *range(4, COUNTED))
    assert counted.others is None
    assert representative_steps(notes_of(LATE)).steps == tuple(range(COUNTED))


def test_further_steps_are_wanted_while_few_are_calm():
    calm, late = [0.0] * 4, [0.2] * (COUNTED - 4)
    assert representative_steps(notes_of(calm + late)).why_more
    assert representative_steps(notes_of((calm + late) * 2)).why_more  # 8 are calm, but not half
    counted = representative_steps(notes_of(calm + late + CALM))
    assert counted.steps == (0, 1, 2, 3, *range(COUNTED, 2 * COUNTED))
    assert not counted.why_more


def test_further_steps_are_wanted_while_calm_ones_vary():
    wide = notes_of(CALM, iterations=[1.0 + 0.01 * number for number in range(COUNTED)])
    assert error_of_median([note.iteration for note in wide]) == pytest.approx(0.0179, abs=1e-4)
    counted = representative_steps(wide)
    assert counted.why_more == "steps vary: the median of 15 is known within 1.8% only"
    assert counted.steps == tuple(range(COUNTED))
