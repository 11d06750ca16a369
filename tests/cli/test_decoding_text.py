"""The sentence that says how samples are decoded, before a run starts."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.workflows.training.decoding_text import decoding_text

GIB = 2**30
DECODING = Decoding(weights=GIB, whole=8 * GIB, tiled=2 * GIB, picture=0, latents=0)


def said(room, decoding=DECODING):
    return decoding_text(replace(synthetic.chain([1.0]), decoding=decoding), 2, room * GIB)


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (10, "each as a whole: 9.0 GiB, and 10.0 GiB are left"),
        (5, "tile by tile: 3.0 GiB, because a whole one needs 9.0 GiB, and 5.0 GiB are left"),
        (2, "tile by tile: 3.0 GiB, but 2.0 GiB are left; draw smaller samples"),
    ],
)
def test_it_says_whether_samples_are_decoded_whole_or_by_tiles_and_what_that_takes(room, words):
    assert said(room).startswith("rank 0 decodes one sample at a time, ")
    assert words in said(room)


def test_samples_no_larger_than_a_tile_are_never_said_to_be_decoded_by_tiles():
    small = replace(DECODING, tiled=DECODING.whole)
    assert "each as a whole" in said(10, small)
    assert "needs 9.0 GiB for it, but 2.0 GiB are left" in said(2, small)


def test_nothing_is_said_where_decoding_is_not_known():
    assert said(10, None) == ""
