"""The CPU seconds that a test run prints count processes that tests start, and ranks of the fork server."""

import multiprocessing
import subprocess
import sys
import time

from kit.cpu_seconds import CpuSeconds, seconds_of_tree

BURNING = "import time\nwhile time.process_time() < {}: pass"


def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_process_that_was_waited_for_counts_with_its_own_start():
    before = seconds_of_tree()
    subprocess.run([sys.executable, "-S", "-c", BURNING.format(0.15)], check=True)
    assert seconds_of_tree() - before >= 0.1  # the system counts hundredths


def test_a_forked_process_counts_while_it_lives():
    before, own = seconds_of_tree(), time.process_time()
    ready, ends = multiprocessing.Event(), multiprocessing.Event()

    def work():
        burn(0.15)
        ready.set()
        ends.wait(60)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert ready.wait(60)
    counted = seconds_of_tree() - before - (time.process_time() - own)
    ends.set()
    process.join()
    assert counted >= 0.1


def test_the_seconds_of_set_up_call_and_end_are_one_tests():
    class Report:
        nodeid, cpu_seconds = "tests/test_a.py::test_it@group", 0.5

    class Screen:
        lines = []  # noqa: RUF012
        section = write_line = staticmethod(lines.append)

    counted = CpuSeconds()
    for _ in range(3):
        counted.pytest_runtest_logreport(Report())
    counted.pytest_terminal_summary(Screen())
    assert "    1.50 s  tests/test_a.py::test_it" in Screen.lines
    assert "    1.50 s  tests/test_a.py" in Screen.lines
