import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import generators, sized

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.schedules import REGISTRY, forward_only, gpipe, one_f_one_b
from diffusionpipe.timing.legal import check

sizes = st.integers(1, 12)


@given(generators, sizes, sizes, st.integers(1, 4))
def test_every_family_is_legal_for_every_size(family, num_workers, num_microbatches, microbatch_size):
    schedule = sized(family, num_workers, num_microbatches, microbatch_size)
    check(schedule)
    assert schedule.num_workers >= num_workers
    assert schedule.num_microbatches() >= num_microbatches
    pipelines = schedule.placement.pipelines
    assert {size for pipeline in pipelines for size in pipeline.microbatches} == {microbatch_size}
    assert schedule.placement.num_samples == microbatch_size * schedule.num_microbatches()


@given(generators, sizes, sizes)
def test_a_family_is_a_pure_function_of_its_sizes(family, num_workers, num_microbatches):
    assert sized(family, num_workers, num_microbatches) == sized(family, num_workers, num_microbatches)


@pytest.mark.parametrize("family", [*REGISTRY.values(), forward_only])
@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-3, 2, 2)])
def test_sizes_below_one_are_refused(family, wrong):
    with pytest.raises(ConfigError):
        family(*wrong)


def test_all_wrong_sizes_are_named_at_once():
    with pytest.raises(ConfigError, match=r"num_workers=0, num_microbatches=-1"):
        gpipe(0, -1)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_schedule_carries_the_name_it_is_registered_under(name):
    assert sized(REGISTRY[name], 2, 2).name == name


@given(sizes, sizes)
def test_1f1b_warms_up_with_one_forward_less_on_each_next_stage(num_workers, num_microbatches):
    for stage, order in enumerate(one_f_one_b(num_workers, num_microbatches).orders):
        before_backward = [a.op for a in order].index(Op.B)
        assert before_backward == min(num_workers - stage, num_microbatches)


@given(sizes, sizes)
def test_forward_only_does_no_backward(num_workers, num_microbatches):
    schedule = forward_only(num_workers, num_microbatches)
    assert {action.op for _, action in schedule.actions()} == {Op.F}
