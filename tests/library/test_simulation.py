import pytest

import diffusionpipe as dp
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_timeline


def test_equal_times_give_the_formulas_of_the_papers():
    flushed = dp.simulate(dp.schedule("1f1b", ranks=4, microbatches=8))
    assert flushed.makespan == 3 * (8 + 3)
    assert flushed.bubble == pytest.approx(3 / 11)
    assert dp.simulate(dp.schedule("gpipe", ranks=4, microbatches=8), backward=1).makespan == 2 * (8 + 3)


def test_times_are_of_one_ranks_part_whatever_the_number_of_stages():
    whole = dp.simulate(dp.schedule("zb-v", ranks=3, microbatches=6), forward=2, input_grad=2, weight_grad=2)
    assert whole.spans.busy(0) == 6 * (2 + 2 + 2)


def test_a_transfer_takes_time():
    schedule = dp.schedule("gpipe", ranks=3, microbatches=1)
    assert dp.simulate(schedule, comm=5).makespan == dp.simulate(schedule).makespan + 4 * 5


@pytest.mark.parametrize("times", [{"forward": -1}, {"comm": float("nan")}, {"backward": float("inf")}])
def test_impossible_times_are_refused(times):
    with pytest.raises(ConfigError, match="a time is a number of at least 0"):
        dp.simulate(dp.schedule("1f1b", ranks=2, microbatches=2), **times)


def test_a_name_is_not_a_schedule():
    with pytest.raises(ConfigError, match=r"not a str; make one with dp\.schedule"):
        dp.simulate("1f1b")


def test_a_timeline_is_drawn_and_written(tmp_path, capsys):
    timeline = dp.simulate(dp.schedule("1f1b", ranks=2, microbatches=2))
    timeline.show()
    assert capsys.readouterr().out.startswith("0 | F0 F1")
    for name in ("a.svg", "a.json"):
        timeline.save(tmp_path / name)
    timeline.perfetto(tmp_path / "trace.json")
    assert read_timeline(tmp_path / "a.json") == timeline.spans
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert '"traceEvents"' in (tmp_path / "trace.json").read_text()


def test_timelines_of_one_schedule_are_compared_and_drawn(tmp_path):
    schedule = dp.schedule("1f1b", ranks=2, microbatches=2)
    compared = dp.simulate(schedule, forward=2, backward=4).compare(dp.simulate(schedule))
    assert compared.ratio == 2
    compared.save(tmp_path / "both.svg")
    assert (tmp_path / "both.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("gpipe", (2, 2), "computation 1 of rank 1 is 1B0 in 1f1b and 1F1 in gpipe"),
        ("1f1b", (3, 2), "1f1b has 2 ranks, 1f1b has 3"),
        ("1f1b", (2, 3), "computation"),
    ],
)
def test_the_timeline_of_another_schedule_is_refused(name, sizes, says):
    own = dp.simulate(dp.schedule("1f1b", ranks=2, microbatches=2))
    other = dp.simulate(dp.schedule(name, ranks=sizes[0], microbatches=sizes[1]))
    with pytest.raises(ConfigError, match=says):
        own.compare(other)
