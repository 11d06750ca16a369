import pytest

from diffusionpipe.trainer.recipe.overrides import override, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ('"3"', "3"),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ("runs/a b", "runs/a b"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("{a = 1}", {"a": 1}),
    ],
)
def test_a_value_is_toml_and_otherwise_a_string(text, value):
    assert parse_value(text) == value


def test_overrides_create_sections_replace_values_and_the_last_one_wins():
    done = override({"a": {"b": 1, "c": 2}}, ["a.b=3", "d.e=x=y", "a.b=4"])
    assert done.table == {"a": {"b": 4, "c": 2}, "d": {"e": "x=y"}}
    assert done.keys == {"a.b", "d.e"}
    assert done.problems == ()


def test_the_given_table_stays_as_it_is():
    table = {"a": {"b": {"c": 1}}}
    override(table, ["a.b.c=2"])
    assert table == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize("text", ["steps", "=3", "a..b=3", ".a=3", "a.b.c=3"])
def test_what_cannot_be_applied_is_a_problem_that_quotes_it(text):
    done = override({"a": {"b": 1}}, [text])
    assert len(done.problems) == 1
    assert repr(text) in done.problems[0]
    assert done.table == {"a": {"b": 1}}
