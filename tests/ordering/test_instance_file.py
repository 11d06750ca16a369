import json
from dataclasses import asdict

import pytest
from hypothesis import given
from ordering.instances import instances

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ordering.instance_file import parse_instance, read_instance, write_instance

HALF = {"forward": 1, "input_grad": 1.5, "weight_grad": 1, "activation": 2, "kept_after_input_grad": 1}
TABLE = {
    "ranks": 1, "microbatches": 3, "placement": "v", "stages": [HALF, HALF], "comm": 0.5, "memory_limit": [8],
    "objective": "window", "seconds": 5,
}  # fmt: skip


def problems_of(table):
    with pytest.raises(FileFormatError) as caught:
        parse_instance(table if isinstance(table, str) else json.dumps(table, indent=1), source="i.json")
    first, *rest = str(caught.value).split("\n  ")
    assert first.startswith("i.json")
    return rest or [first]


@given(instance=instances())
def test_what_is_written_is_read(instance):
    assert parse_instance(json.dumps(asdict(instance))) == instance


def test_a_file_holds_all_that_was_written(tmp_path):
    instance = parse_instance(json.dumps(TABLE))
    write_instance(instance, tmp_path / "instance.json")
    assert read_instance(tmp_path / "instance.json") == instance


def test_what_need_not_be_said_has_a_default(tmp_path):
    path = tmp_path / "instance.json"
    path.write_text(json.dumps({key: TABLE[key] for key in ("ranks", "microbatches", "placement", "stages")}))
    instance = read_instance(path)
    assert (instance.comm, instance.memory_limit, instance.objective, instance.seconds) == (0, None, "makespan", 10)


def test_whole_numbers_stay_whole():
    instance = parse_instance(json.dumps(TABLE))
    assert isinstance(instance.stages[0].forward, int)
    assert isinstance(instance.stages[0].input_grad, float)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ranks": 0}, "line 2: ranks: is 0; use a whole number of at least 1"),
        ({"ranks": 1.5}, "line 2: ranks: is 1.5; use a whole number of at least 1"),
        ({"microbatches": True}, "line 3: microbatches: is True; use a whole number of at least 1"),
        ({"placement": "w"}, "line 4: placement: is 'w'; use 'linear', 'v', 'loop' or 'any'"),
        ({"comm": -1}, "line 21: comm: is -1; use a number from 1e-100 to 1e100, or 0"),
        ({"comm": float("nan")}, "line 21: comm: is nan; use a number from 1e-100 to 1e100, or 0"),
        ({"comm": 1e-320}, "line 21: comm: is 1e-320; use a number from 1e-100 to 1e100, or 0"),
        ({"comm": 1e308}, "line 21: comm: is 1e+308; use a number from 1e-100 to 1e100, or 0"),
        ({"comm": "1"}, "line 21: comm: is '1'; use a number from 1e-100 to 1e100, or 0"),
        ({"memory_limit": 8}, "line 22: memory_limit: is 8; give a list"),
        ({"memory_limit": [8, 9]}, "line 22: memory_limit: 2 limits; give one for each of the 1 ranks"),
        ({"stages": [HALF]}, "line 5: stages: 1 half-stages; 1 ranks need 2"),
        ({"objektive": "window"}, "line 27: objektive: is not a field; did you mean objective?"),
        (
            {"stages": [HALF, {**HALF, "forward": None}]},
            "line 14: stages[1].forward: is None; use a number from 1e-100 to 1e100, or 0",
        ),
        (
            {"stages": [HALF, {**HALF, "kept_after_input_grad": 3}]},
            "line 18: stages[1].kept_after_input_grad: 3 of an activation of 2; use at most 2",
        ),
    ],
)
def test_a_problem_is_named_by_line_and_field_with_what_to_do(changes, problem):
    assert problem in problems_of(TABLE | changes)


def test_all_problems_are_named_at_once():
    assert len(problems_of(TABLE | {"ranks": 0, "comm": -1, "objective": "x", "seconds": []})) == 4


@pytest.mark.parametrize("text", ["", "{", '{\n"ranks": 1,}', "[" * 100_000])
def test_what_is_no_json_is_refused_with_its_line(text):
    (problem,) = problems_of(text)
    assert "not valid JSON" in problem
    assert "line" in problem


@pytest.mark.parametrize("text", ["3", "[]", "null", '"x"'])
def test_what_is_no_object_is_refused(text):
    (problem,) = problems_of(text)
    assert "give an object with the fields ranks," in problem


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"none\.json: cannot be read"):
        read_instance(tmp_path / "none.json")
