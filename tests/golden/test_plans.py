"""Recorded plans still open and cost the same, and today's planner finds none that is slower."""

import pytest
from golden.plans import TOLERANCE, predicted, questions, recorded_plan, setting_of
from kit.oracle import makespan

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.timing.legal import check

QUICK = {"paper-00-2-stages", "paper-05-2-stages", "paper-20-2-stages"}
"""A tenth of them, in every run."""
QUESTIONS = questions()
ANSWERED = [question for question in QUESTIONS if question.answer]
TOO_LARGE = {"paper-15-best", "cards-00-recomputed", "cards-10-kept", "cards-10-recomputed", "cards-15-kept"}
"""Their recorded plans hold more than their devices: raw inputs, what frozen layers read and write while they run (up
to 0.8 GiB), and what split backwards of recomputed layers keep (9.5 GiB), which the recorded version did not count."""


def parameters(asked):
    return [pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow) for one in asked]


def is_slower(step, than):
    return step > than * (1 + TOLERANCE)


def judged(proposal):
    """The step with the iteration that the machine of tests/kit/oracle.py takes."""
    return makespan(proposal.train, proposal.costs) + proposal.update


@pytest.mark.parametrize("question", parameters(ANSWERED))
def test_a_recorded_plan_opens_is_legal_and_takes_the_recorded_time(question):
    plan = recorded_plan(question)
    for schedule in (plan.train, plan.validate, *plan.sample, *((plan.prologue,) if plan.prologue else ())):
        check(schedule)
    found = predicted(question, plan)
    step, iteration = float.fromhex(question.answer.step), float.fromhex(question.answer.iteration)
    if plan.encoders != "device":  # compute between two fills hides copies, which the recorded version did not count
        assert 0.99 * step < found.step < step
    else:
        assert found.step == pytest.approx(step, rel=TOLERANCE)
        assert found.iteration == pytest.approx(iteration, rel=TOLERANCE)
    assert (found.overflow > 0) == (question.name in TOO_LARGE)
    assert judged(found) == pytest.approx(found.step, rel=1e-12)


@pytest.mark.parametrize("question", parameters(ANSWERED))
def test_the_planner_finds_no_slower_plan_than_the_recorded_one(question):
    """By the simulator and by a machine that shares nothing with it. Of one that does not fit: any that does.

    What is found is apart from what is chosen, which may be a near-tie.
    """
    recorded = predicted(question, recorded_plan(question))
    choice = choose(setting_of(question))
    assert choice.proposal.overflow <= 0
    if question.name in TOO_LARGE:
        return
    found = choice.fastest.proposal
    assert not is_slower(found.step, than=recorded.step), f"{found.step} s instead of {question.answer.layout}"
    assert not is_slower(judged(found), than=judged(recorded))
    for one in (choice.proposal, found):
        assert judged(one) == pytest.approx(one.step, rel=1e-12)
    assert choice.step <= found.step * (1 + NEAR_TIE)


@pytest.mark.slow
@pytest.mark.parametrize("question", [pytest.param(one, id=one.name) for one in QUESTIONS if not one.answer])
def test_where_nothing_fitted_the_planner_says_so_or_finds_what_fits(question):
    try:
        found = choose(setting_of(question)).proposal
    except ConfigError as error:
        assert "No layout fits" in str(error)  # noqa: PT017
    else:
        assert found.overflow <= 0


def test_a_plan_that_is_slower_by_a_millionth_is_noticed():
    step = float.fromhex(ANSWERED[0].answer.step)
    assert is_slower(step * 1.000001, than=step)
    assert not is_slower(step * (1 + TOLERANCE / 2), than=step)
    assert not is_slower(step / 2, than=step)


def test_a_worse_plan_of_the_same_question_is_slower():
    """What is compared depends on the plan, not on the question alone."""
    best, stages = (next(one for one in ANSWERED if one.name == f"paper-00-{end}") for end in ("best", "4-stages"))
    assert is_slower(predicted(best, recorded_plan(stages)).step, than=predicted(best, recorded_plan(best)).step)


def test_enough_is_recorded():
    assert len(ANSWERED) >= 25
    assert all(set(question.workload) >= {"batch", "frozen_bytes", "encode_chunk"} for question in QUESTIONS)
