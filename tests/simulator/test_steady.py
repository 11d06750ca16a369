"""The period of a window that repeats, against formulas."""

from fractions import Fraction

import pytest

from diffusionpipe.ir.unroll import unroll
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.simulator.steady import steady


@pytest.mark.parametrize(
    ("family", "latency", "periods"),
    [
        ("1f1b", 0, [3, 3, 3]),
        ("1f1b", 1, [4, Fraction(9, 2), Fraction(19, 4)]),
        ("dapple-b", 1, [3, 3, 3]),
    ],
)
def test_a_microbatch_takes_its_round_trip_over_what_is_in_flight(family, latency, periods):
    """max(F + B, (p (F + B) + 2 (p - 1) c) / n), with n micro-batches in flight on the first stage."""
    for num_workers, period in zip((2, 4, 8), periods, strict=True):
        found = steady(overlap(num_workers, 1, family), lambda schedule: uniform_costs(schedule, latency=latency))
        assert found.period == period
        assert found.bubble == 1 - Fraction(3) / period


def test_where_times_never_quite_repeat_the_mean_of_many_batches_counts(monkeypatch):
    """Seen with layer times measured once: waits drifted by rounding, and `plan` ended with an error."""
    monkeypatch.setattr("diffusionpipe.simulator.steady._are_equal", lambda *_: False)
    for num_workers, period in ((2, 4), (4, Fraction(9, 2))):
        found = steady(overlap(num_workers, 1), lambda schedule: uniform_costs(schedule, latency=1))
        assert found.period == pytest.approx(period, rel=0.01)
        assert found.bubble == pytest.approx(1 - 3 / float(period), abs=0.02)


def test_a_flush_every_few_batches_idles_as_long_as_one_flush():
    idle = []
    for batches in (1, 2, 4, 8, 16):
        schedule = unroll(overlap(4, 4), batches)
        makespan = simulate(schedule, uniform_costs(schedule)).makespan
        idle.append(1 - Fraction(12 * batches, makespan))
    assert idle == [Fraction(9, 9 + 12 * batches) for batches in (1, 2, 4, 8, 16)]
    assert [f"{float(part):.1%}" for part in idle] == ["42.9%", "27.3%", "15.8%", "8.6%", "4.5%"]
