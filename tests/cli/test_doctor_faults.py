"""The shortest real runs of `make doctor-faults`, and the judge of its runs: that it would see what is wrong."""

from dataclasses import replace

import pytest
from doctor_faults.faults import FAULTS
from doctor_faults.program import examined, health
from doctor_faults.runs import NotAllowedError, Seen

MIXED = next(one for one in FAULTS if one.name == "mixed CUDA and CPU")
SHORT = [one for one in FAULTS if one.how in ("a listener on --port", "GLOO_SOCKET_IFNAME of no card, one machine")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*SHORT, MIXED], ids=lambda fault: fault.name)
def test_a_fault_of_a_real_run_is_found(fault, tmp_path):
    result, seen = examined(fault, tmp_path)
    assert result == "found" or result.startswith("skipped"), seen.output


def test_ten_faults_are_planted_each_in_its_own_ways():
    assert len({one.name for one in FAULTS}) == 10
    assert len({(one.name, one.how) for one in FAULTS}) == len(FAULTS)


FINDING = {"name": "devices", "status": "fail", "text": MIXED.words, "remedy": "use one kind"}
SEEN = Seen(
    status=1, output=f"fail  devices  {MIXED.words}\n               use one kind\n", findings=(FINDING,), seconds=1
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, "found"),
        ({"status": None}, "did not end"),
        ({"status": 0}, "exit status is 0"),
        ({"output": "ok    devices  all are well\n"}, "no line names the fault"),
        ({"output": SEEN.output.replace("use one kind", "")}, "no remedy"),
        ({"output": f"{SEEN.output}warn  disk  is full\n"}, "another line is wrong: warn  disk"),
        ({"output": f"{SEEN.output}Traceback (most recent call last)\n"}, "traceback"),
        ({"findings": ()}, "there is no JSON"),
        ({"findings": (FINDING | {"name": "names"},)}, "the JSON names names"),
        ({"findings": (FINDING | {"text": "vm is bad"},)}, "the JSON says: vm is bad"),
        ({"seconds": 61}, "more than 60 s"),
    ],
)
def test_an_answer_that_is_wrong_is_seen(change, problem, tmp_path):
    fault = replace(MIXED, run=lambda folder: replace(SEEN, **change))
    assert problem in examined(fault, tmp_path)[0]


def test_a_healthy_run_has_no_finding(tmp_path):
    well = Seen(status=0, output="ok    disk  is empty\n", findings=({"name": "disk", "status": "ok"},), seconds=1)
    wrong = replace(well, output=f"{well.output}warn  links  are slow\n")
    assert [health(lambda folder, seen=seen: seen, tmp_path)[0] for seen in (well, wrong, SEEN)][:2] == [
        "healthy",
        "warn  links  are slow",
    ]
    assert "exit status is 1" in health(lambda folder: SEEN, tmp_path)[0]


def test_a_case_that_is_not_allowed_is_skipped_and_says_so(tmp_path):
    def refused(folder):
        raise NotAllowedError("no namespaces here")

    assert examined(replace(MIXED, run=refused), tmp_path) == ("skipped: no namespaces here", None)
