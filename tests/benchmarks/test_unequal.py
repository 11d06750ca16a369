from benchmarks.unequal.__main__ import CASES, figures


def test_drawn_steps_by_tokens_are_never_slower_and_their_mean_is_known_early():
    found = figures(*CASES[2], steps=40)
    assert found.slower == 0
    assert found.apart > 1
    assert found.peak <= 1
    assert abs(found.predicted - 1) < 0.05
