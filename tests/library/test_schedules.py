import pytest

import diffusionpipe as dp
from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir.torch_csv import schedule_to_csv
from diffusionpipe.schedules import REGISTRY


def eager(ranks, microbatches):
    def row(rank):
        ahead = min(2 * (ranks - rank) - 1, microbatches)
        pairs = [(f"{rank}B{i}", f"{rank}F{i + ahead}") for i in range(microbatches)]
        return [f"{rank}F{i}" for i in range(ahead)] + [a for pair in pairs for a in pair if int(a[2:]) < microbatches]

    return [row(rank) for rank in range(ranks)]


def test_a_function_gives_its_own_orders_under_its_name():
    found = dp.schedule(eager, ranks=3, microbatches=4)
    assert found.name == "eager"
    assert [[str(action) for action in order] for order in found.orders] == eager(3, 4)


def test_a_function_may_write_each_row_as_one_text_or_return_a_schedule():
    rows = dp.schedule(lambda p, m: [" ".join(row) for row in eager(p, m)], ranks=3, microbatches=4)
    made = dp.schedule(lambda p, m: REGISTRY["zb-v"](p, m), ranks=3, microbatches=4)
    assert rows.orders == dp.schedule(eager, ranks=3, microbatches=4).orders
    assert made.orders == REGISTRY["zb-v"](3, 4).orders


def test_names_and_files_are_those_of_the_command_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(schedule_to_csv(REGISTRY["zb-h1"](3, 4)))
    assert dp.schedule(path).orders == dp.schedule(str(path), ranks=3).orders
    assert dp.schedule(path).orders == dp.schedule("zb-h1", ranks=3, microbatches=4).orders


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["0F0 0B0", "1B0 1F0"], "rank 1, position 0: worker 1: 1B0 comes before 1F0"),
        (["0F0 0B0", "1F0 1X0"], "rank 1, position 1: '1X0' is not an action"),
        (["0F0 0B0", "0F0 0B0"], "stage 0 is on rank 0 and on rank 1; a stage has one rank"),
        ([["0F0", "0B0", "0B0"], ["1F0", "1B0"]], "rank 0, position 2: worker 0: 0B0 is done 2 times"),
    ],
)
def test_an_illegal_order_is_refused_with_its_rank_and_position(rows, says):
    def mine(ranks, microbatches):
        return rows

    with pytest.raises(ScheduleError, match="mine: the orders are illegal") as caught:
        dp.schedule(mine, ranks=2, microbatches=1)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "sizes", "says"),
    [
        ("zb-v", {"ranks": 3}, "suits any sizes; give ranks= and microbatches="),
        ("zb-w", {"ranks": 3, "microbatches": 3}, "there is no schedule 'zb-w'; did you mean"),
        ("1f1b", {"ranks": 0, "microbatches": 3}, "ranks=0: give a number of at least 1"),
        (eager, {"ranks": 3}, "the schedule 'eager' suits any sizes"),
        (lambda p, m: ["0F0 0B0"], {"ranks": 2, "microbatches": 1}, "returned orders for 1 ranks"),
        (lambda p, m: 3, {"ranks": 2, "microbatches": 1}, "must return a row of actions for each rank"),
        (3, {"ranks": 2, "microbatches": 1}, "the name of a family, a file or a function"),
    ],
)
def test_what_is_not_a_schedule_is_refused(source, sizes, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        dp.schedule(source, **sizes)
