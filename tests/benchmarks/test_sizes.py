"""Mixed steps of several sizes beside steps of one size."""

from benchmarks.sizes.__main__ import CASES, figures


def test_mixed_steps_do_at_least_97_percent_of_one_size_s_tokens_a_second():
    for case in CASES:
        assert figures(*case, None, 0).simulated >= 0.97
