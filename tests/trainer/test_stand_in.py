"""Pictures of families that diffusers' own pipelines draw, with our layers in place of the transformer."""

import pytest
from drawn_families import SIZE, drawn_by_diffusers, drawn_here
from tiers import quick_and_slow
from tiny_described import PIPELINES, RESOLUTIONS, save_described

from diffusionpipe.models.folder import REGISTRY


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny models, each made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = save_described(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


CASES = [
    (kind, guidance)
    for kind in PIPELINES
    for guidance in (1.5, REGISTRY[kind].call.unguided)
    if REGISTRY[kind].call.scale or guidance != 1.5  # a pipeline without classifier-free guidance draws without it
]


@pytest.mark.parametrize(
    ("kind", "guidance"),
    quick_and_slow(CASES, quick=[("QwenImagePipeline", 1.5), ("ZImagePipeline", 1.5)]),
)
def test_sample_draws_what_diffusers_draws(monkeypatch, folders, kind, guidance):
    size = RESOLUTIONS.get(kind, SIZE)
    ours = drawn_here(monkeypatch, folders(kind), guidance, size)
    theirs = drawn_by_diffusers(folders(kind), guidance, size)
    assert ours.shape == theirs.shape == (2, size, size, 3)
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.02
