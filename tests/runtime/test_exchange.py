"""Messages between ranks: exact, of one kind, and never code."""

from pathlib import Path

import pytest
from kit.crew import Crew
from kit.exchanges import (
    FLOATS,
    collect_rows,
    fail_on_first,
    join_as_guest,
    send_all,
    send_another_kind,
    send_much,
    send_nothing,
    send_unwritable,
)

from diffusionpipe.costs import Link
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.runtime.comm.exchange import PLAIN, form_of, optional
from diffusionpipe.trainer.data.scan.dataset import Sample


def test_values_arrive_as_they_were_sent(crew: Crew):
    first, second = crew.run(send_all)
    assert (first.pop("own"), second.pop("own")) == ({0}, {1})
    assert first == second
    assert [list(map(repr, floats)) for floats in first["floats"]] == [list(map(repr, FLOATS))] * 2
    assert first["dataclass"] == [Link(0.0, 1e9), Link(1 / 3, 1e9)]
    assert first["names"] == [["café \udcff\x1b", 0], ["café \udcff\x1b", 1]]
    assert first["first"] == 5
    assert (first["one"], first["none"]) == ([None, 3], [None] * 5)
    assert first["numbers"] == [list(FLOATS), [value + 1 for value in FLOATS]]


@pytest.mark.parametrize("call", ["agree", "save"])
def test_a_guest_that_sends_a_pickle_runs_no_code_and_is_named(crew: Crew, tmp_path: Path, call: str):
    refused, _ = crew.run(join_as_guest, tmp_path, call)
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith("rank 1 has sent a message that cannot be read")
    assert not (tmp_path / "code").exists()


def test_too_long_a_message_is_refused_by_all_before_it_is_sent(crew: Crew):
    first, second = map(str, crew.run(send_much))
    assert first == second
    assert first.startswith("rank 1 has sent a message of 202 bytes; a message has 0 to 100.")


def test_a_value_of_another_kind_is_refused_and_its_sender_named(crew: Crew):
    first, second = map(str, crew.run(send_another_kind))
    assert first.startswith('rank 1 has sent a message that cannot be read (value: must be a whole number; got "code")')
    assert second.startswith("rank 0 has sent a message that cannot be read (value: must be a text; got 1)")


def test_a_message_without_content_is_refused_where_a_value_is_needed(crew: Crew):
    first, second = crew.run(send_nothing)
    assert second is None
    assert str(first).startswith("rank 1 has sent a message that cannot be read (value: must be a whole number")


@pytest.mark.parametrize("call", ["gather", "agree", "collect", "broadcast", "from_first"])
def test_a_value_that_cannot_travel_ends_the_exchange_alike_on_all_ranks_and_the_next_one_works(crew: Crew, call: str):
    first, second = crew.run(send_unwritable, call)
    assert first == second
    rank = 0 if call in ("broadcast", "from_first") else 1
    said = "TypeError: a PosixPath cannot travel as JSON; give the exchange form=form_of(PosixPath)"
    assert first == [f"rank {rank}: {said}", 0, 1]


def test_the_first_rank_alone_reads_rows_and_refuses_others(crew: Crew):
    rows = [(Sample(name=f"{rank}.png", label=rank), Sample(name="b.png", text="b")) for rank in range(2)]
    assert crew.run(collect_rows) == [[*rows, "refused"], []]


def test_an_error_of_the_first_rank_keeps_class_and_text_on_the_others(crew: Crew):
    for error in crew.run(fail_on_first):
        assert type(error) is DataError
        assert (str(error), error.is_common) == ("no pictures", True)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, object(), [Link(1.0, 1.0)], b"text"])
def test_what_is_not_plain_needs_a_form(value: object):
    with pytest.raises(TypeError, match=r"cannot travel as JSON; give the exchange form=|a key is not a text"):
        PLAIN.write(value)


def test_none_is_a_value_of_optional_forms_alone():
    form = form_of(Link)
    assert optional(form).read(optional(form).write(None)) is None
    with pytest.raises(ValueError, match="must be an object with latency, bandwidth"):
        form.read(None)
