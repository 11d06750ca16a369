from diffusionpipe.planner.correction.transfers import Crossing, usual_ratio


def test_messages_that_waited_for_others_do_not_slow_their_link_down():
    seen = [
        Crossing(pair=(0, 1), num_bytes=8, predicted=2.0, seconds=seconds, is_bound=False)
        for seconds in (20.0, 3.0, 16.0, 3.0, 24.0)
    ]
    assert usual_ratio(seen) == 1.5
