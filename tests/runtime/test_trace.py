from time import perf_counter
from types import SimpleNamespace

import torch

from diffusionpipe.ir import parse_action
from diffusionpipe.runtime.recording.trace import CudaRecorder, Recording, marks_of, recorder_for


def test_a_wait_stands_between_two_actions_and_belongs_to_neither():
    order = [parse_action(text) for text in ("0F0", "0SEND_F0>0", "0B0")]
    marks = marks_of([True, False, True])
    #        start, waited, F0, sent, waited, B0
    times = [0.0, 1.0, 3.0, 3.5, 6.0, 9.0, 9.5]
    recorder = SimpleNamespace(times=lambda stop: times[:stop])
    recording = Recording(worker=0, recorder=recorder, steps=list(zip(marks, order, strict=True)))
    spans, length = recording.spans()
    assert [(span.start, span.end) for span in spans] == [(1.0, 3.0), (3.0, 3.5), (6.0, 9.0)]
    assert [span.action for span in spans] == order
    assert (recording.busy(), length) == ((2.0 + 3.0, 9.5), 9.5)  # the send takes none of the worker's time


def test_there_is_one_mark_at_the_start_and_one_behind_every_wait_and_action():
    waits = [False, True, True, False]
    assert marks_of(waits)[-1][1] == len(waits) + sum(waits)


def test_the_host_recorder_counts_from_its_first_mark_after_a_reset():
    recorder = recorder_for(torch.device("cpu"))
    recorder.mark()
    recorder.reset()
    start = perf_counter()
    for _ in range(3):
        recorder.mark()
    times = recorder.times()
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) == 3
    assert times[-1] <= perf_counter() - start


def test_a_device_has_passed_the_events_up_to_the_first_that_is_not_over():
    class Event:
        def __init__(self, is_over):
            self.is_over = is_over

        def query(self):
            return self.is_over

    recorder = CudaRecorder()
    recorder._events = [Event(is_over) for is_over in (True, True, False, False, True)]  # the last one is of before
    recorder._num_marks = 4
    assert recorder.passed() == 2
    recorder.reset()
    assert recorder.passed() == 0
