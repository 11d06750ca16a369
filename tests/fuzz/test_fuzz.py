"""The harness itself, a small part of its cases, and what it has found before."""

import sys
import time
from random import Random

import pytest
from fuzz import folders, kinds
from fuzz.__main__ import counts_of, run
from fuzz.isolation import Ending, Isolated
from fuzz.kinds import KINDS
from fuzz.mutation import changed_table, mutated_json
from fuzz.originals import Case, make_originals

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.checkpoints.checkpoint_folder import resolve


def outcome_of(act, folder):
    process = Isolated(act, folder)
    while (outcome := process.outcome()) is None:
        time.sleep(0.002)
    return outcome


def refuse():
    raise ConfigError("recipe.toml: wrong")


@pytest.mark.parametrize(
    ("act", "ending", "text"),
    [
        (lambda: None, Ending.ACCEPTED, ""),
        (refuse, Ending.REFUSED, "recipe.toml: wrong\n"),
        (lambda: sys.exit(2), Ending.REFUSED, ""),
        (lambda: {}["x"], Ending.TRACEBACK, "KeyError: 'x'\n"),
        (lambda: bytearray(2**31), Ending.MEMORY, "MemoryError\n"),
    ],
    ids=["accepted", "refused", "exit status", "traceback", "memory"],
)
def test_the_ending_of_a_case_is_told(tmp_path, act, ending, text):
    outcome = outcome_of(act, tmp_path)
    assert outcome.ending is ending
    assert outcome.text.endswith(text)


def test_a_case_that_does_not_end_is_a_hang_with_its_stack(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.isolation.PATIENCE", 0.2)

    def wait_for_ever():
        time.sleep(1000)

    outcome = outcome_of(wait_for_ever, tmp_path)
    assert outcome.ending is Ending.HANG
    assert "wait_for_ever" in outcome.text


def test_a_failure_or_a_refusal_without_the_name_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.__main__.make_originals", lambda folder: None)
    monkeypatch.setattr("fuzz.__main__._import_all", lambda: None)
    planted = {
        "unnamed": (lambda *_: Case(refuse, ("plan.json",)), 1),
        "named": (lambda *_: Case(refuse, ("recipe.toml",)), 2),
        "broken": (lambda *_: Case(lambda: 1 // 0), 1),
    }
    counts = {kind: count for kind, (_, count) in planted.items()}
    report = run(counts, seed=0, processes=2, folder=tmp_path, kinds=planted)
    assert report.table().splitlines()[-1].split() == ["all", "4", "2", "0", "1", "0", "0", "1"]
    assert len(report.failures) == 2
    assert any("ZeroDivisionError" in failure for failure in report.failures)


def test_there_are_2500_cases():
    assert sum(counts_of(None, None).values()) == 2500


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return make_originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("overrides", "odd files", "arguments")])
def test_the_unchanged_input_is_accepted(originals, tmp_path, monkeypatch, kind):
    """Otherwise every changed one would be refused for the same reason, and nothing would be shown."""
    for module in (kinds, folders):
        for name in ("mutated_text", "mutated_json", "mutated_bytes", "encoded"):
            monkeypatch.setattr(module, name, lambda content, random: content)
    monkeypatch.setattr(kinds, "changed_table", lambda content, random: content)
    case = KINDS[kind][0](originals, Random(0), tmp_path)
    outcome = outcome_of(case.act, tmp_path / "said")
    assert outcome.ending is Ending.ACCEPTED, outcome.text


def test_every_change_of_a_table_can_be_written(originals):
    data = (resolve(originals.old, "latest") / ".metadata").read_bytes()
    for seed in range(300):
        assert changed_table(data, Random(seed)) != data


@pytest.mark.slow
def test_a_hundred_changed_inputs_are_read_or_refused_by_name(tmp_path):
    report = run(counts_of(100, None), seed=0, processes=2, folder=tmp_path)
    assert not report.failures, "\n\n".join(report.failures)


def test_a_case_follows_from_its_seed_and_not_from_the_cases_before():
    def text(seed):
        return mutated_json('{"a": [1, {"b": "c"}], "d": []}', Random(seed))

    first = [text(seed) for seed in range(300)]
    assert [text(seed) for seed in range(300)] == first
