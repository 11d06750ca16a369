"""Orders by rules: those of the registry, and never an illegal one."""

from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.errors import ConfigError, FileFormatError
from diffusionpipe.ir import Op
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.files.rules import NAMES, SIZES, Rules, Shape, schedule_by_rules
from diffusionpipe.schedules.files.rules_text import rules_from_text
from diffusionpipe.timing.legal import check

EXAMPLES = Path(__file__).parents[2] / "examples/orders"
TWENTY = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (7, 8, 12, 15, 21)]


def problems_of(text):
    with pytest.raises(FileFormatError) as caught:
        rules_from_text(text, source="my.rules")
    head, *problems = str(caught.value).splitlines()
    assert head == "my.rules: these rules cannot be read"
    return [problem.strip() for problem in problems]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zeropp"])
def test_at_most_five_lines_give_the_orders_of_the_registry(name):
    text = (EXAMPLES / f"{name}.rules").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 5
    rules = rules_from_text(text, source=name)
    for sizes in TWENTY:
        assert schedule_by_rules(rules, *sizes, name=name) == REGISTRY[name](*sizes), sizes


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zeropp"])
def test_the_document_shows_the_example_files(name):
    text = (EXAMPLES.parents[1] / "docs/orders.md").read_text(encoding="utf-8")
    shown = text.partition(f"`{name}.rules`: ")[2].split("\n\n")[1]
    assert dedent(shown) + "\n" == (EXAMPLES / f"{name}.rules").read_text(encoding="utf-8")


def test_a_limit_of_one_is_the_sequential_schedule_and_a_wider_one_is_dapple():
    narrow = rules_from_text("stages: chain\nlimit: 1\npriority: F B", source="narrow")
    wide = rules_from_text("stages: chain\nlimit: 2 * (ranks - rank) - 1\npriority: F B", source="wide")
    assert schedule_by_rules(narrow, 3, 4).orders == REGISTRY["sequential"](3, 4).orders
    assert schedule_by_rules(wide, 3, 9).orders == REGISTRY["dapple-b"](3, 9).orders


@contextmanager
def refused_with(text):
    """Errors of another text are those of the test."""
    try:
        yield
    except ConfigError as error:
        if text not in str(error):
            raise AssertionError(str(error)) from error
        raise


ops = st.sampled_from([(Op.F, Op.B), (Op.F, Op.I, Op.W)]).flatmap(st.permutations).map(tuple)
expressions = st.sampled_from([None, "1", "2", "ranks", "ranks + 1", "microbatches"])
any_rules = st.builds(
    Rules,
    shape=st.sampled_from([Shape.LOOP, Shape.WAVE]),
    chunks=st.integers(1, 3),
    group=expressions,
    is_unit=st.booleans(),
    limit=expressions,
    priority=ops,
    meanwhile=st.sampled_from([(), (Op.F,), (Op.W, Op.F)]),
)


@settings(deadline=None, max_examples=60)
@given(any_rules, st.integers(1, 4), st.integers(1, 6))
def test_orders_by_rules_are_legal_or_refused_with_the_place_where_ranks_wait(rules, num_workers, num_microbatches):
    if rules.limit is None or rules.chunks == 1:
        check(schedule_by_rules(rules, num_workers, num_microbatches))
        return
    with suppress(ConfigError), refused_with("the ranks wait for each other in a circle: rank 0 "):
        check(schedule_by_rules(rules, num_workers, num_microbatches))


def test_a_limit_that_stops_everything_says_where_and_what_to_do():
    rules = rules_from_text("stages: loop 2\nlimit: 1\npriority: F B", source="stuck")
    with pytest.raises(ConfigError) as caught:
        schedule_by_rules(rules, 2, 3)
    assert str(caught.value) == (
        "with 2 ranks, 2 chunks, 3 microbatches the ranks wait for each other in a circle: rank 0 has reached its "
        "limit of 1; rank 1 has reached its limit of 1; raise `limit`, or name the ops that may run in waits under "
        "`meanwhile`"
    )


def test_orders_too_long_to_be_listed_are_refused():
    rules = rules_from_text("stages: loop 1000\npriority: F B", source="long")
    with pytest.raises(ConfigError, match=r"64 ranks x 1000 stages x 64 .* are 4,096,000 forwards; use at most 1,000"):
        schedule_by_rules(rules, 64, 64)


def test_a_limit_below_one_names_the_sizes():
    rules = rules_from_text("stages: chain\nlimit: 2 - rank\npriority: F B", source="low")
    with pytest.raises(ConfigError, match=r"limit: 2 - rank is 0 with ranks = 3, .*rank = 2.*; it must be at least 1"):
        schedule_by_rules(rules, 3, 3)


def test_every_problem_is_named_with_its_line():
    assert problems_of("stages: ring\n\nlimits: 3\npriority: F W\npriority: F B\nmeanwhile F") == [
        "line 3: there is no rule 'limits'; did you mean limit?",
        "line 5: priority is already on line 4; remove one of the two",
        "line 6: 'meanwhile F' is not a rule; write e.g. priority: F B",
        "line 1: stages: 'ring' is unknown; write chain, loop N or wave N, with N stages on each rank (1 to 1000)",
        "line 4: priority: 'F W' are not the ops of a schedule; write F and B, or F, I and W, the first choice first",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stages: loop 0", "'loop 0' is unknown; write chain"),
        ("stages: loop 9999", "'loop 9999' is unknown; write chain"),
        ("traversal: by chunk", "'by chunk' is unknown; write all at once, rounds of SIZE or units of SIZE"),
        ("traversal: rounds of rank", "there is no number 'rank'; known are ranks, chunks, microbatches"),
        ("limit: ranks ** 2", "'ranks ** 2' is not allowed; use whole numbers"),
        ("limit: __import__('os')", "\"__import__('os')\" is not allowed; use whole numbers"),
        ("limit: ranks -", "'ranks -' is not arithmetic; write e.g. 2 * (ranks - rank) - 1"),
        ("limit: 1.5", "'1.5' is not allowed"),
        ("limit: ranks // 0", "'ranks // 0' divides by zero"),
        ("limit: " + "(" * 150 + "1" + ")" * 150, "it has 301 characters; use at most 200"),
        ("meanwhile: W", "use only ops of priority: F B"),
        ("meanwhile: F F", "'F F' are not different ops of F, B, I and W; write e.g. F B"),
    ],
)
def test_a_wrong_value_says_what_is_known(line, says):
    lines = {"stages": "stages: chain", "priority": "priority: F B"}
    lines[line.partition(":")[0]] = line
    (problem,) = problems_of("\n".join(lines.values()))
    assert f"{line.partition(':')[0]}: {says}" in problem


def test_missing_rules_are_named():
    assert [problem.partition(" is")[0] for problem in problems_of("# nothing")] == ["`stages`", "`priority`"]


def test_the_names_of_a_limit_include_those_of_a_group():
    assert set(SIZES) < set(NAMES)
