"""What `sample` draws from words is what diffusers draws from them in another process."""

import pytest
from kit.drawn_from_words import SAVED, WITHOUT, calls_of, compared, drawn_apart, drawn_tenth

from diffusionpipe.models.opening.folder import REGISTRY

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = drawn_tenth(36)


def test_every_pipeline_is_called_or_named_with_the_reason():
    assert {*SAVED, *WITHOUT} == set(REGISTRY)
    assert not SAVED.keys() & WITHOUT.keys()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The calls of each case, and what diffusers draws of them: one other process draws for all cases."""
    calls = {}
    for kind, number in CASES:
        told = calls_of(kind, SAVED[kind](tmp_path_factory.mktemp("words") / "model"))
        own = told[number]
        beside = [one for one in told if own.flag and one.name == "guided, without a negative prompt"]
        calls[kind, number] = [*beside, own]
    pictures = iter(drawn_apart([one for told in calls.values() for one in told], tmp_path_factory.mktemp("apart")))
    return {case: (told, [next(pictures) for _ in told]) for case, told in calls.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_words_draw_what_diffusers_draws_from_them_in_another_process(drawn, kind, number):
    assert compared(*drawn[kind, number])
