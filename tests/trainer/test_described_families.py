"""Runs of tiny models of the families that are described as data."""

import shutil

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from tiers import quick_and_slow
from tiny_described import PIPELINES, RESOLUTIONS, save_described
from tiny_runs import losses_of, recipe_of, save_pictures, train, train_here

from diffusionpipe.cli.redraw import redraw
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.folder import REGISTRY
from diffusionpipe.trainer.kept_samples import sample_folder

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")

LAYOUTS = {
    "1F1B": {},
    "ZB-V": {"schedule": "zb-v", "microbatches": 4},
    "filled": {"fill": True},
    "sharded": {"stages": 1, "data_parallel": 2, "sharded": True},
}


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


@pytest.mark.parametrize(
    ("kind", "layout"),
    quick_and_slow(
        [
            (kind, layout)
            for i, kind in enumerate(PIPELINES)
            for j, layout in enumerate(LAYOUTS)
            if (i + j) % 2 == 0  # two layouts of each
            and (kind, layout) != ("Flux2Pipeline", "sharded")  # its transformer is that of [klein]
        ],
        quick=[("QwenImagePipeline", "1F1B")],
    ),
)
def test_two_ranks_learn_what_one_process_learns_and_diffusers_opens_it(kind, layout, crew, models, pictures, tmp_path):
    model = models(kind)
    recipe = _recipe(model, pictures, tmp_path / "over-two", _size(kind), pipeline=LAYOUTS[layout])
    assert crew.run(train, recipe) == [2, 2]
    assert train_here(_recipe(model, pictures, tmp_path / "in-one", _size(kind))) == 2
    over_two, in_one = losses_of(tmp_path / "over-two"), losses_of(tmp_path / "in-one")
    assert over_two.keys() == in_one.keys() == {1, 2}
    assert over_two[1] == pytest.approx(in_one[1], rel=1e-5)
    assert over_two[2] == pytest.approx(in_one[2], rel=1e-3)  # AdamW's first step makes much of small gradients
    assert in_one[1] != in_one[2]
    exported = next((tmp_path / "over-two").rglob("model_index.json")).parent
    opened = getattr(diffusers, kind).from_pretrained(exported)
    before = getattr(diffusers, kind).from_pretrained(model)
    assert _differ(opened.transformer, before.transformer)
    assert not _differ(opened.text_encoder, before.text_encoder)
    if kind == "QwenImagePipeline":  # nobody reads the captions' tokens of the last block
        assert not _differ(
            opened.transformer.transformer_blocks[-1].txt_mlp, before.transformer.transformer_blocks[-1].txt_mlp
        )
        assert _differ(
            opened.transformer.transformer_blocks[0].txt_mlp, before.transformer.transformer_blocks[0].txt_mlp
        )


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


def _differ(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)


ADAPTED = [kind for kind in PIPELINES if REGISTRY[kind].has_adapters and kind != "Flux2Pipeline"]


@pytest.mark.parametrize("kind", quick_and_slow(ADAPTED, quick=[]))
def test_adapters_over_two_stages_learn_what_they_learn_in_one_process(kind, crew, models, pictures, tmp_path):
    lora = {"lora": {"rank": 2}}
    assert crew.run(train, _recipe(models(kind), pictures, tmp_path / "over-two", _size(kind), **lora)) == [2, 2]
    assert train_here(_recipe(models(kind), pictures, tmp_path / "in-one", _size(kind), **lora)) == 2
    assert losses_of(tmp_path / "over-two") == pytest.approx(losses_of(tmp_path / "in-one"), rel=1e-5)
    adapters = next((tmp_path / "over-two").rglob("*lora*.safetensors"))
    pipeline = getattr(diffusers, kind).from_pretrained(models(kind))
    pipeline.load_lora_weights(adapters.parent)
    assert pipeline.get_active_adapters()


def test_adapters_that_diffusers_would_not_load_are_refused_before_the_first_step(models, pictures, tmp_path):
    recipe = _recipe(models("PixArtSigmaPipeline"), pictures, tmp_path / "run", lora={"rank": 2})
    with pytest.raises(ModelError, match="loads no adapters; train the whole transformer"):
        train_here(recipe)


SAMPLING = {"every": 2, "prompts": ["ab", "c"], "negative_prompt": "d", "steps": 3}


def _pictures_of(folder):
    return np.load(sample_folder(folder, 2).with_suffix(".npy"))


@pytest.mark.parametrize(
    ("kind", "layout"),
    quick_and_slow(
        [(kind, layout) for i, kind in enumerate(PIPELINES) for j, layout in enumerate(LAYOUTS) if (i + j) % 4 == 0],
        quick=[("PixArtSigmaPipeline", "sharded")],
    ),
)
def test_a_run_over_two_ranks_draws_what_sample_draws_of_its_export(kind, layout, crew, models, pictures, tmp_path):
    is_distilled = REGISTRY[kind].embedded_guidance is not None  # then a negative prompt needs a scale of its own
    sampling = SAMPLING | ({"true_cfg_scale": 1.5} if is_distilled else {})
    recipe = _recipe(models(kind), pictures, tmp_path / "run", _size(kind), pipeline=LAYOUTS[layout], sampling=sampling)
    assert crew.run(train, recipe) == [2, 2]
    drawn = _pictures_of(tmp_path / "run")
    assert drawn.shape == (2, _size(kind), _size(kind), 3)
    kept = sample_folder(tmp_path / "run", 2) / "000-ab.png"
    redraw(tmp_path / "run", kept, tmp_path / "again.png", torch.device("cpu"))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "again.png")), drawn[0])


def test_what_the_pipeline_refuses_is_refused_before_the_first_step(models, pictures, tmp_path):
    sampling = SAMPLING | {"scheduler": "FlowMatchHeunDiscreteScheduler"}
    recipe = _recipe(models("ZImagePipeline"), pictures, tmp_path / "run", sampling=sampling)
    with pytest.raises(ConfigError, match="ZImagePipeline cannot draw with a FlowMatchHeunDiscreteScheduler"):
        train_here(recipe)
