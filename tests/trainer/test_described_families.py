"""Runs of tiny models of the families that are described as data."""

import shutil

import diffusers
import pytest
from kit.drawn_families import check as check_drawn
from kit.family_runs import LAYOUTS, SAMPLING, SAVED, WITHOUT_ADAPTERS, Place, check, run_all, some_of
from kit.tiny_described import PIPELINES, RESOLUTIONS, save_described
from kit.tiny_runs import recipe_of, save_pictures, train_here

from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.opening.folder import REGISTRY

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("data") / "pictures", 8)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, each made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = save_described(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


def _size(kind):
    return RESOLUTIONS.get(kind, 16)


def _recipe(model, pictures, folder, resolution=16, **sections):
    data = {"caption_dropout": 0.3, "resolution": resolution}
    sections = {"training": {"steps": 2}, **sections}
    return recipe_of(model, pictures, folder, data=data, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVED)
def test_two_ranks_learn_what_one_process_learns_and_1_to_3_ranks_draw_what_diffusers_draws(kind, tmp_path):
    """In every layout; diffusers opens the exports."""
    place = Place(tmp_path, kind)
    outcome = run_all(place, some_of(kind))
    for case, result in outcome.trained.items():
        if isinstance(result, Exception):
            raise result
        check(place, case)
    if isinstance(outcome.drawn, Exception):
        raise outcome.drawn
    for drawn in outcome.drawn:
        check_drawn(drawn)


def test_every_family_meets_every_layout_and_every_way_and_every_layout_draws():
    cases = [case for kind in SAVED for case in some_of(kind)]
    for kind in SAVED:
        own = [case for case in cases if case.kind == kind]
        assert [case.layout for case in own] == list(LAYOUTS)
        assert {case.is_adapted for case in own} == ({False} if kind in WITHOUT_ADAPTERS else {False, True})
        assert sum(case.is_drawn for case in own) == (kind in PIPELINES)
    assert {(case.layout, case.is_adapted) for case in cases} == {(one, way) for one in LAYOUTS for way in (0, 1)}
    assert {case.layout for case in cases if case.is_drawn} == set(LAYOUTS)
    assert {kind for kind in SAVED if not REGISTRY[kind].has_adapters} <= WITHOUT_ADAPTERS


@pytest.mark.slow
def test_weights_that_nobody_reads_are_zero_in_a_model_from_scratch(models, pictures, tmp_path):
    model = shutil.copytree(models("QwenImagePipeline"), tmp_path / "model")
    for file in (model / "transformer").glob("*.safetensors"):
        file.unlink()
    sections = {"training": {"steps": 1}, "model": {"from_scratch": True}}
    assert train_here(recipe_of(model, pictures, tmp_path / "run", data={"resolution": 16}, **sections)) == 1
    exported = next((tmp_path / "run").rglob("model_index.json")).parent
    blocks = diffusers.QwenImagePipeline.from_pretrained(exported).transformer.transformer_blocks
    assert not any(p.any() for p in blocks[-1].txt_mlp.parameters())
    assert all(p.any() for p in blocks[0].txt_mlp.parameters())


def test_adapters_that_diffusers_would_not_load_are_refused_before_the_first_step(models, pictures, tmp_path):
    recipe = _recipe(models("PixArtSigmaPipeline"), pictures, tmp_path / "run", lora={"rank": 2})
    with pytest.raises(ModelError, match="loads no adapters; train the whole transformer"):
        train_here(recipe)


def test_what_the_pipeline_refuses_is_refused_before_the_first_step(models, pictures, tmp_path):
    sampling = SAMPLING | {"scheduler": "FlowMatchHeunDiscreteScheduler"}
    recipe = _recipe(models("ZImagePipeline"), pictures, tmp_path / "run", sampling=sampling)
    with pytest.raises(ConfigError, match="ZImagePipeline cannot draw with a FlowMatchHeunDiscreteScheduler"):
        train_here(recipe)
