import subprocess
import sys
import threading
import time
from queue import Queue

import pytest
from torch.distributed import HashStore

from diffusionpipe.runtime.job.progress import PLANNING, STEP, Moment, Progress, Whereabouts, is_in_collective
from diffusionpipe.runtime.job.stall import (
    are_settled,
    dump_stacks,
    may_judge,
    moment_to_text,
    parse_moment,
    reason_of,
    root_cause,
)
from diffusionpipe.runtime.job.watch_post import Post
from diffusionpipe.runtime.job.watchdog import Watchdog
from diffusionpipe.runtime.recording.trace import marks_of, position_of


def moments(*given):
    """(waits, time without progress) of each rank; the limit is 10 s."""
    return {
        rank: Moment(rank=rank, phase=STEP, step=3, waits=waits, still=still, limit=10)
        for rank, (waits, still) in enumerate(given)
    }


@pytest.mark.parametrize(
    ("given", "culprit"),
    [
        ([((1,), 14), ((2,), 13), (None, 12)], 2),  # a chain: the one that waits for nobody
        ([((1,), 14), (None, 12), ((1,), 13)], 1),  # two wait for one
        ([((), 14), ((), 14), (None, 12)], 2),  # a collective that one has not joined
        ([((1, 2), 14), (None, 1), (None, 12)], 2),  # of two that are awaited the one that stands still
        ([((1,), 14), (None, 9), ((1,), 14)], None),  # the root has time left: it is slow
        ([((1,), 14), (None, 0), (None, 0)], None),
        ([((1,), 14), ((2,), 14), ((1,), 14)], 1),  # a circle that rank 0 waits for
        ([((1,), 14), ((0,), 14), (None, 0)], 0),
        ([((1,), 14), ((0,), 2), (None, 0)], None),  # rank 1 was seen at another time: it goes on
    ],
)
def test_the_root_of_the_waits_is_named(given, culprit):
    found = root_cause(moments(*given), 0)
    assert (found.rank if found is not None else None) == culprit


def test_of_ranks_that_all_wait_the_one_furthest_behind_is_named():
    late = Moment(rank=1, phase=STEP, step=2, waits=(), still=14, limit=10)
    assert root_cause(moments(((), 14), ((), 14)) | {1: late}, 0) == late


def test_a_waiting_rank_leaves_the_verdict_to_the_one_it_waits_for_for_a_while():
    waiting, working = moments(((1,), 11), (None, 11)).values()
    assert may_judge(working, grace=3)
    assert not may_judge(waiting, grace=3)
    assert may_judge(waiting, grace=0.5)


def test_a_verdict_waits_for_ranks_that_are_on_their_way_to_a_wait():
    assert are_settled(moments((None, 11), ((0,), 4), ((), 0)))
    assert are_settled(moments((None, 11), (None, 12)))
    assert not are_settled(moments((None, 11), (None, 4)))


def test_a_moment_survives_the_store():
    for moment in moments(((1, 2), 14), (None, 12)).values():
        assert parse_moment(moment_to_text(moment)) == moment


def test_the_message_names_rank_action_and_who_waits(tmp_path):
    culprit = Moment(rank=1, phase=STEP, step=7, action="action 1B0", still=12.4, limit=10)
    waiting = Moment(rank=0, phase=STEP, step=7, action="action 0B0", waits=(1,), still=12, limit=10)
    assert reason_of(culprit, {0: waiting, 1: culprit}, tmp_path) == (
        "has made no progress for 12 s: step 7, action 1B0\n"
        "rank 0 waits for it: step 7, action 0B0\n"
        f"The Python stacks of all ranks are in {tmp_path}/rank_*.stacks.\n"
        "The limit here was 10 s; run.stuck_after changes it."
    )
    loading = Moment(rank=1, phase="saving", step=7, helper=99, still=12.4, limit=100)
    assert "saving (step 7), waiting for its data worker (process 99)" in reason_of(loading, {}, None)


class Fake:
    """An executor."""

    def __init__(self):
        self.runs, self.marks, self.where = 0, 0, None

    def passed(self):
        return self.runs, self.marks

    def whereabouts(self):
        return self.where


def test_time_stands_still_only_between_signs_of_progress():
    progress, executor = Progress(0), Fake()
    progress.executors = [executor]
    progress.configure(10.0, None)

    def still():
        return progress.look(1.0).still

    with progress.phase(STEP):
        assert [still(), still(), still()] == [0, 1, 2]
        executor.marks += 1
        assert [still(), still()] == [0, 1]
        progress.advance()
        assert [still(), still()] == [0, 1]
        progress.end_step(1.0)
        assert [still(), still()] == [0, 1]
        with progress.phase("saving"):
            assert [still(), still()] == [0, 1]
        assert still() == 0


def test_bytes_that_are_written_are_progress_while_saving(tmp_path):
    progress = Progress(0)
    progress.configure(10.0, None)
    for phase, expected in (("saving", [0, 0]), (STEP, [0, 1])):
        with progress.phase(phase):
            found = [progress.look(1.0).still]
            (tmp_path / "file").write_bytes(bytes(2**18))
            assert [*found, progress.look(1.0).still] == expected


def test_bytes_that_an_awaited_data_worker_reads_are_progress():
    class Worker:
        """Another process with files."""

        def __init__(self):
            self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.awaited = self.process.pid

        def read(self, data):
            self.process.stdin.write(data)
            self.process.stdin.flush()
            assert len(self.process.stdout.read(len(data))) == len(data)

        def stacks(self):
            return "stacks of the worker"

    progress, worker = Progress(0), Worker()
    progress.configure(10.0, None)
    worker.read(b"x")
    progress.help_from(worker)
    seen = []

    def batches():
        seen.extend(progress.look(1.0).still for _ in range(3))
        worker.read(bytes(2**17))
        seen.extend(progress.look(1.0).still for _ in range(2))
        assert progress.look(1.0).helper == worker.awaited
        yield "batch"

    with progress.phase(STEP):
        assert list(progress.taken(batches())) == ["batch"]
    assert seen == [0, 1, 2, 0, 1]
    assert progress.look(1.0).helper is None
    worker.process.communicate()


def test_a_thread_beside_the_steps_may_be_slow_but_not_hang(tmp_path):
    progress, orders, done = Progress(2), Queue(), Queue()
    progress.configure(10.0, None)

    def write():
        with progress.beside("writing the checkpoint of step 5"), (tmp_path / "file").open("wb") as file:
            done.put("begun")
            while orders.get():
                file.write(bytes(2**17))
                file.flush()
                done.put("written")
        done.put("ended")

    def look(elapsed):
        progress.advance()  # the steps go on
        return progress.look(elapsed)

    thread = threading.Thread(target=write, daemon=True)
    with progress.phase(STEP):
        progress.step = 7
        thread.start()
        done.get(timeout=10)
        assert [look(99.0).phase for _ in range(2)] == [STEP, STEP]
        orders.put(True)
        done.get(timeout=10)
        assert [look(99.0).phase for _ in range(2)] == [STEP, STEP]
        hanging = look(2.0)
        assert (hanging.is_over_limit, hanging.waits, hanging.limit) == (True, None, 100.0)
        assert hanging.place() == "writing the checkpoint of step 5 (step 7)"
        assert root_cause({2: hanging}, 2) == hanging
        orders.put(False)
        done.get(timeout=10)
        assert look(99.0).phase == STEP
    thread.join()


def test_an_action_that_waits_names_whom_it_waits_for():
    progress, executor = Progress(0), Fake()
    progress.executors = [executor]
    executor.where = Whereabouts(action="action 0B1", awaited=(2,))
    assert progress.look(0).waits == (2,)
    executor.where = Whereabouts(action="action 0B1")
    assert progress.look(0).waits is None
    with progress.waiting():
        assert progress.look(0).waits is None, "the iteration is under way on the device"
        executor.where = None
        assert progress.look(0).waits == ()


def test_limits_follow_the_steps_and_the_phase():
    progress = Progress(0)
    assert progress.limit() is None
    progress.configure("auto", None)
    with progress.phase(STEP):
        assert progress.limit() == 60
        for seconds in (900, 10, 10):
            progress.end_step(seconds)
        assert progress.limit() == 200
        with progress.phase("saving"):
            assert progress.limit() == 2000
        with progress.phase(PLANNING):
            assert progress.limit() is None
    progress.configure(3.0, None)
    with progress.phase(STEP):
        assert progress.limit() == 3
        assert progress.pause(1.0) == 0.75
    progress.configure(None, None)
    with progress.phase(STEP):
        assert progress.limit() is None


def test_the_position_in_an_order_follows_from_the_times_recorded():
    marks = marks_of([False, True, False])  # at 0; 0-1, wait 1-2, 2-3; 3-4
    assert [position_of(marks, passed) for passed in (1, 2, 3, 4, 5)] == [
        (0, False),
        (1, True),
        (1, False),
        (2, False),
        (3, False),
    ]


def test_a_thread_that_waits_for_a_transfer_is_recognised():
    done = threading.Lock()
    done.acquire()

    class Work:
        wait = done.acquire  # in C, as that of torch

    def receive():
        Work.wait()

    def compute():
        done.acquire()

    for target, expected in ((receive, True), (compute, False)):
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while sys._current_frames()[thread.ident].f_code is not target.__code__:
            assert time.monotonic() < deadline
        time.sleep(0.01)
        assert is_in_collective(sys._current_frames()[thread.ident]) is expected
        done.release()
        thread.join()
        done.acquire(blocking=False)
    assert not is_in_collective(None)


def test_stacks_of_all_threads_are_written(tmp_path):
    progress = Progress(3)
    progress.configure(1.0, tmp_path / "logs")
    progress.step = 4
    dump_stacks(progress)
    text = (tmp_path / "logs" / "rank_3.stacks").read_text()
    assert text.startswith("Rank 3: starting (step 4)\n")
    assert "test_stacks_of_all_threads_are_written" in text


def test_a_rank_that_stands_still_ends_all_with_one_verdict(tmp_path):
    """Two watchdogs in threads: rank 1 works for ever, rank 0 waits for it."""
    store, said = HashStore(), {}
    progresses = [Progress(rank) for rank in range(2)]
    executors = [Fake(), Fake()]
    executors[0].where = Whereabouts(action="action 0B0", awaited=(1,))
    executors[1].where = Whereabouts(action="action 1B0")
    watchdogs = []
    for rank, progress in enumerate(progresses):
        progress.executors = [executors[rank]]
        progress.configure(0.2, tmp_path)
        progress.step = 5
        post = Post(rank=rank, world_size=2, store_rank=None, interval=0.05, patience=20)
        watchdogs.append(
            Watchdog(
                post=post,
                connect=lambda: store,
                end=lambda text, rank=rank: said.update({rank: text}),
                progress=progress,
            )
        )
    with progresses[0].phase(STEP), progresses[1].phase(STEP):
        for watchdog in watchdogs:
            watchdog.start()
        for watchdog in watchdogs:
            assert watchdog._known.wait(10)
    assert "rank 1 (" in said[0]
    assert "has made no progress for 0." in said[0]
    assert " s: step 5, action 1B0\nrank 0 waits for it: step 5, action 0B0\n" in said[0]
    assert said[0] == said[1]
    assert {path.name for path in tmp_path.iterdir()} == {"rank_0.stacks", "rank_1.stacks"}


def test_ranks_that_go_on_are_left_alone(tmp_path):
    store, said = HashStore(), []
    progress, executor = Progress(0), Fake()
    progress.executors = [executor]
    progress.configure(0.2, tmp_path)
    post = Post(rank=0, world_size=2, interval=0.05, patience=20)
    watchdog = Watchdog(post=post, connect=lambda: store, end=said.append, progress=progress)
    with progress.phase(STEP):
        watchdog.start()
        for _ in range(12):
            time.sleep(0.05)
            executor.marks += 1
    watchdog._left.set()
    assert said == []
