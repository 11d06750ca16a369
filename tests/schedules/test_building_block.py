import pytest

from diffusionpipe.ir import Op
from diffusionpipe.schedules.building.building_block import repeated, v_block


def slots(block, op, stage):
    return next(worker[stage, op] for worker in block if (stage, op) in worker)


def test_a_microbatch_goes_down_and_up_the_v_and_back():
    block = v_block(3, hops=(2, 1, 2, 1), waits=(0, 0, 1))
    way = [slots(block, Op.F, stage) for stage in range(6)] + [slots(block, Op.I, stage) for stage in range(5, -1, -1)]
    assert way == [0, 2, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16]


@pytest.mark.parametrize("p", range(1, 25))
def test_blocks_of_v_min_and_v_half_are_where_the_paper_puts_them(p):
    d_min, d_half = 2 if p % 3 == 0 else 0, 3 if p % 2 == 0 else 0
    v_min = v_block(p, hops=(1, 1, 1, 1), waits=(0, d_min, 0))
    v_half = v_block(p, hops=(2, 1, 2, 1), waits=(0, d_half, 1))
    for i in range(p):
        assert list(v_min[i].values()) == [i, 2 * p - 1 - i, 2 * p + d_min + i, 4 * p - 1 + d_min - i]
        assert list(v_half[i].values()) == [2 * i, 3 * p - 2 - i, 3 * p + d_half - 1 + 2 * i, 6 * p + d_half - 2 - i]


def test_a_repeated_block_does_the_same_every_six_slots_and_w_where_there_is_room():
    orders = repeated(v_block(2, hops=(1, 1, 1, 1), waits=(0, 0, 0)), 3)
    assert " ".join(map(str, orders[0])) == "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0I2 0W2"


def test_a_block_that_overlaps_its_repetitions_is_an_error():
    with pytest.raises(AssertionError, match="overlap"):
        repeated(v_block(3, hops=(1, 1, 1, 1), waits=(0, 0, 0)), 4)
