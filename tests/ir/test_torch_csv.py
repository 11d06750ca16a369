from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import sized

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Edge, Op, Pipeline, Placement, Schedule, Share, Stage
from diffusionpipe.ir.torch_csv import schedule_from_csv, schedule_to_csv
from diffusionpipe.schedules import REGISTRY

CHAINS = sorted(name for name in REGISTRY if len(sized(REGISTRY[name], 2, 2).placement.pipelines) == 1)
generators = st.sampled_from(CHAINS)
small = st.integers(1, 6)


def two_stages(*, stages=None, chain=(0, 1), orders=None, **changes) -> Schedule:
    fields = {
        "stages": chain,
        "microbatches": (1, 1),
        "ops": frozenset({Op.F}),
        "edges": (Edge(producer=0, consumer=1),),
        **changes,
    }
    placement = Placement(
        stages=stages or (Stage(worker=0, weights=0), Stage(worker=1, weights=1)), pipelines=(Pipeline(**fields),)
    )
    forwards = tuple(tuple(Action(stage=s, op=Op.F, microbatch=m) for m in range(2)) for s in range(2))
    return Schedule(name="mine", placement=placement, orders=orders or forwards)


@settings(deadline=None)
@given(generators, small, small, small)
def test_every_registered_schedule_over_a_chain_comes_back_from_its_csv(name, num_stages, num_microbatches, size):
    schedule = sized(REGISTRY[name], num_stages, num_microbatches, size)
    assert schedule_from_csv(schedule_to_csv(schedule), name=schedule.name, microbatch_size=size) == schedule


def test_the_csv_of_1f1b_is_one_row_per_rank_and_one_action_per_cell():
    assert schedule_to_csv(REGISTRY["1f1b"](2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


HALVES = (Share(stop=Fraction(1, 2)), Share(start=Fraction(1, 2)))


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            two_stages(edges=(Edge(producer=0, consumer=0),)),
            "stage 0 reads from stage 0, but the format supports only neighbours",
        ),
        (two_stages(chain=(1, 0)), "its stages run in the order 1, 0, but the format counts them upwards from 0"),
        (two_stages(microbatches=(1, 2)), "micro-batches have different sizes 1, 2"),
        (
            two_stages(stages=tuple(Stage(worker=i, weights=0, share=share) for i, share in enumerate(HALVES))),
            "stage 0 handles the share 0:1/2",
        ),
        (two_stages(stages=(Stage(worker=0, weights=5), Stage(worker=1, weights=5))), "stages 0, 1 share weights"),
        (
            two_stages(orders=((Action(stage=0, op=Op.SEND_F, microbatch=0, slot=0),), ())),
            "it has the actions SEND_F, but the compute-only format has only F, B, I, W",
        ),
        (two_stages(orders=((Action(stage=0, op=Op.ENCODE, slot=0),), ())), "it has the actions ENCODE"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_name(schedule, says):
    with pytest.raises(ScheduleError) as caught:
        schedule_to_csv(schedule)
    assert "schedule 'mine' has no torch CSV: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0\n", "line 1, cell 2: '0X0' is not an action"),
        ("0F0,\n1F0,1SEND_B0\n", "line 2, cell 2: '1SEND_B0' is not a computation"),
        ("0F0,0UNSHARD\n", "'0UNSHARD' is not a computation"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", "line 1, cell 2: '(0F1;0B0)OVERLAP_F_B' overlaps two actions"),
        ("0STEP\n", "'0STEP' is unknown to torch's format"),
        ("0F0\n0B0\n", "stage 0 is on line 1 and on line 2"),
        ("0F0,0F0\n", "the forward 0F0 occurs 2 times"),
        ("0F0,0F1\n1F0\n", "2 stages and 2 micro-batches need 4 forwards, 1 are missing, the first is 1F1"),
        ("1F0\n", "the first is 0F0"),
        ("0F99999999\n", "99999999 are missing, the first is 0F0"),
        ("", "holds no forward"),
        (",,\n", "holds no forward"),
    ],
)
def test_a_csv_that_is_no_compute_only_schedule_is_refused_with_line_and_cell(text, says):
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv(text)
    assert says in str(caught.value)


def test_all_wrong_cells_are_named_at_once():
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv("0F0,foo\n1F0,bar\n")
    assert len(caught.value.problems) == 2


def test_whole_backwards_beside_split_ones_become_input_and_weight_gradients_in_place():
    schedule = schedule_from_csv("0F0,0F1,0B0,0I1,0W1\n")
    assert schedule.placement.pipelines[0].ops == {Op.F, Op.I, Op.W}
    assert schedule_to_csv(schedule) == "0F0,0F1,0I0,0W0,0I1,0W1\n"
