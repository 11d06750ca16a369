"""The list of faults fits the source of today, and a fault that nobody notices is reported."""

import os

import pytest
from planted import trial
from planted.__main__ import is_surprise, run
from planted.draw import changes, draw, unique_lines
from planted.faults import ROOT, SOURCE, Fault, all_faults, faults_of, misfits
from planted.trial import Outcome, strangers

FAULTS = all_faults()
PACKAGE = {
    "src/pack/__init__.py": "",
    "src/pack/sums.py": "def total(values):\n    return sum(values)\ndef mean(values):\n    return total(values) / 2\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['-q']\n",
    "tests/test_sums.py": """
import subprocess, sys
import pack.sums

def test_a_total_is_the_sum_also_in_another_process():
    program = "import pack.sums; print(pack.sums.total([1, 2]))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "3\\n"

def test_a_total_of_nothing_is_zero():
    assert pack.sums.total([]) == 0
""",
}
TEST = "tests/test_sums.py"


@pytest.fixture
def package(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def fault(old, new, **others):
    return Fault(**{"module": "pack.sums", "wrong": "It is wrong.", "old": old, "new": new, "tests": (TEST,)} | others)


def tried(package, *faults):
    said = []
    status = run(faults, processes=1, source=package / "src", root=package, say=said.append)
    return status, "\n".join(said)


def test_each_fault_is_in_the_source_once_and_names_files_of_tests():
    assert misfits(FAULTS, SOURCE) == []


def test_faults_are_of_all_packages_and_many_of_them_drawn():
    packages = {path.parent.name for path in (SOURCE / "diffusionpipe").glob("*/__init__.py")}
    assert packages - {fault.module.split(".")[1] for fault in FAULTS} == set()
    assert len(FAULTS) >= 60
    assert len({fault.module for fault in FAULTS}) >= 40
    assert sum(fault.drawn for fault in FAULTS) >= 40  # features bring faults of their own kind beside these
    assert sum(fault.quick and not fault.unnoticed for fault in FAULTS) >= 45


def test_no_fault_is_listed_twice():
    assert len({(fault.module, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


def test_the_first_test_that_fails_is_shown_and_an_unnoticed_fault_is_an_error_unless_its_reason_is_known(package):
    seen, unseen = fault("sum(values)", "sum(values) + 1"), fault("total(values) / 2", "total(values) / 3")
    status, said = tried(package, seen, unseen, fault(unseen.old, "0", unnoticed="Nobody takes a mean."))
    assert status == 1
    assert said.splitlines()[2].strip() == f"{TEST}::test_a_total_is_the_sum_also_in_another_process"
    assert said.count("NOT noticed") == 2
    assert "known: Nobody takes a mean." in said
    assert "1 of 3 faults in 1 modules are noticed, 1 by tests that make test runs" in said
    assert {name: (package / name).read_text(encoding="utf-8") for name in PACKAGE} == PACKAGE


def test_only_a_fault_without_a_known_reason_is_a_surprise():
    unnoticed = Outcome(failed=(), problem="", cpu_s=1.0)
    assert is_surprise(fault("a", "b"), unnoticed)
    assert not is_surprise(fault("a", "b", unnoticed="Nobody calls it."), unnoticed)
    assert not is_surprise(fault("a", "b"), Outcome(failed=("test",), problem="", cpu_s=1.0))


def test_a_copy_is_imported_in_place_of_the_installed_package_also_by_processes_that_a_test_starts(tmp_path):
    (tmp_path / "diffusionpipe").mkdir()
    (tmp_path / "diffusionpipe/__init__.py").touch()
    assert strangers(tmp_path) == []


def test_a_package_that_comes_from_elsewhere_is_named(tmp_path, monkeypatch):
    (tmp_path / "diffusionpipe").mkdir()
    (tmp_path / "diffusionpipe/__init__.py").touch()
    monkeypatch.setattr(trial, "environment_of", lambda copy: os.environ | {"PYTHONPATH": str(SOURCE)})
    assert strangers(tmp_path) == [str(SOURCE / "diffusionpipe/__init__.py")] * 3


def test_tests_that_fail_without_a_fault_are_named_and_nothing_is_tried(package):
    (package / TEST).write_text("def test_it_fails():\n    assert False\n", encoding="utf-8")
    assert tried(package, fault("sum(values)", "0")) == (
        2,
        f"1 faults; first their tests run without any\nwithout a fault: {TEST}::test_it_fails",
    )


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"old": "min(values)", "new": "0"}, "pack.sums: the old text is not in the module"),
        ({"old": "(values)", "new": "0"}, "pack.sums: the old text is 4 times in the module"),
        ({"old": "sum(values)", "new": "sum(values)"}, "the new text is the old one"),
        ({"old": "sum(values)", "new": "sum(values"}, "was never closed"),
        ({"old": "sum(values)", "new": "0", "module": "pack.means"}, "pack.means: there is no such module"),
        (
            {"old": "sum(values)", "new": "0", "tests": ("tests/test_means.py",)},
            "no test is called tests/test_means.py",
        ),
        ({"old": "sum(values)", "new": "0", "tests": (f"{TEST}::test_mean",)}, f"no test is called {TEST}::test_mean"),
    ],
    ids=["gone", "several", "same", "no Python", "no module", "no file", "no test"],
)
def test_a_fault_that_does_not_fit_is_refused_before_any_test_runs(package, faults, words):
    status, said = tried(package, fault(**faults))
    assert status == 2
    assert words in said


def test_the_drawn_kinds_of_changes_are_found():
    text = "def f(a, limit=2):\n    if a < limit:\n        return g(a, deep=True)\n    a.x = [1]\n    return a\n"
    found = {(change.kind, unique_lines(text, change)[1].strip()) for change in changes(text)}
    assert found == {
        ("a comparison turned", "if a <= limit:"),
        ("a constant changed", "def f(a, limit=3):"),
        ("a constant changed", "return g(a, deep=False)"),
        ("a constant changed", "a.x = [2]"),
        ("an argument dropped", "return g(a)"),
        ("a statement dropped", "pass"),
    }


def test_a_seed_draws_the_same_faults_each_time_and_they_fit(tmp_path):
    entries = list(draw(1, 6))
    assert entries == list(draw(1, 6))
    assert len(set(entries)) == 6
    drawn = tmp_path / "drawn.toml"
    drawn.write_text("\n".join(entries).replace('tests = [""]', 'tests = ["Makefile"]'), encoding="utf-8")
    assert misfits(faults_of(drawn), SOURCE, ROOT) == []
