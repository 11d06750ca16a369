"""What `sample` draws from words is what diffusers draws from them in another process."""

import pytest
from drawn_from_words import SAVED, WITHOUT, calls_of, compared, drawn_tenth

from diffusionpipe.models.opening.folder import REGISTRY

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = 36


def test_every_pipeline_is_called_or_named_with_the_reason():
    assert {*SAVED, *WITHOUT} == set(REGISTRY)
    assert not SAVED.keys() & WITHOUT.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), drawn_tenth(SEED))
def test_words_draw_what_diffusers_draws_from_them_in_another_process(tmp_path, kind, number):
    told = calls_of(kind, SAVED[kind](tmp_path / "model"))
    own = told[number]
    beside = [one for one in told if own.flag and one.name == "guided, without a negative prompt"]
    assert compared([*beside, own], tmp_path / "apart")
