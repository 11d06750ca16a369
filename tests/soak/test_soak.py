"""The short form of `make soak`, and what it calls growth."""

import time

import pytest
from kit.tiny_runs import losses_of
from soak.__main__ import await_steps, watch
from soak.job import Job
from soak.readings import Reading, Span, growth

MIB = 2**20


def span(start=0.0, *, descriptors=(20, 23), threads=(9, 10), memory=500 * MIB, shared=(0, 4), name="rank 0"):
    readings = [Reading(d, t, memory) for d, t in zip(descriptors, threads, strict=True)]
    return Span(start, {name: readings}, shared)


def test_what_a_process_holds_for_a_moment_only_is_no_growth():
    assert growth([span(), span(120.0, descriptors=(30, 20), threads=(14, 9), shared=(9, 0))]) == []


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        ({"descriptors": (21, 24)}, "rank 0: 21 descriptors after 20"),
        ({"threads": (10, 10)}, "rank 0: 10 threads after 9"),
        ({"memory": 506 * MIB}, "rank 0: 506.0 MiB after 500.0"),
        ({"shared": (1, 4)}, "/dev/shm: 1 bytes after 0"),
        ({"name": "rank 1"}, "processes were ['rank 0'] and are ['rank 1']"),
    ],
)
def test_growth_is_named(later, problem):
    assert growth([span(), span(60.0), span(120.0, **later)]) == [problem]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_saves_validates_and_draws_keeps_its_descriptors_and_threads(tmp_path):
    job = Job(tmp_path, drawn=50)
    try:
        await_steps(job, 60)  # it has drawn once
        started = time.monotonic()
        spans = [watch(job, 0.0, 4.0)]
        await_steps(job, max(losses_of(job.recipe.run.folder)) + 60)  # it has saved, validated and drawn again
        spans.append(watch(job, time.monotonic() - started, 4.0))
        assert job.is_running, job.log.read_text()
    finally:
        status = job.end()
    assert status == 75
    assert job.log.read_text().count(" checkpoint=") >= 4
    found = [problem for problem in growth(spans) if "MiB" not in problem]
    assert found == []
