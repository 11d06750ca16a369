"""What model_index.json and a pipeline's constructor say beside the components is honoured or refused."""

import inspect
import json
from dataclasses import replace

import diffusers
import pytest
import torch
from kit.drawn_families import asked_of, by_diffusers, difference, drawn_here, size_of
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES, sdxl

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Absent
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import REGISTRY, build_graph, open_components, weight_sources
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.trainer.data.text.tokens import token_ids
from diffusionpipe.trainer.inference.conditions import open_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

NO_NUMBER = {
    "feature_extractor",
    "id2label",
    "image_encoder",
    "image_processor",
    "requires_safety_checker",
    "safety_checker",
    "scheduler",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
}
"""Arguments that are read elsewhere, or that change nothing of what is computed from captions and labels."""
AFTERWARDS = {"add_watermarker", "watermarker"}
"""They mark finished pictures, if a package of its own is installed."""
HONOURED = {"is_distilled": "Guidance of the pipeline's class is ignored; see `pipeline_defaults`."}


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_argument_of_a_pipelines_constructor_is_known(kind):
    """A new one of a later diffusers must be honoured or refused: see `zeroed`, `settings` and `absent` of `Family`."""
    family = REGISTRY[kind]
    arguments = set(inspect.signature(getattr(diffusers, kind).__init__).parameters) - {"self"}
    known = {*family.components, *family.absent, *family.settings, family.zeroed, family.augmentation}
    assert arguments - known - NO_NUMBER - AFTERWARDS - HONOURED.keys() == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pipeline = sdxl()
    randomise_pipeline(pipeline)
    path = tmp_path_factory.mktemp("model") / "sdxl"
    pipeline.save_pretrained(path)
    return path


def set_entry(folder, name, value):
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def without_negatives(folder, kind="StableDiffusionXLPipeline"):
    return asked_of(folder, size_of(kind), has_negative=False)


def test_sdxl_without_a_negative_prompt_draws_as_its_flag_says(folder):
    drawn = []
    for is_zeroed in (True, False):
        set_entry(folder, "force_zeros_for_empty_prompt", is_zeroed)
        asked = without_negatives(folder)
        drawn.append(by_diffusers(asked))
        assert difference(drawn_here(asked), (drawn[-1],)) < 1e-5
    assert abs(drawn[0] - drawn[1]).max() > 1e-3
    # An empty negative prompt is one.
    asked = without_negatives(folder)
    empty = replace(asked, wish=replace(asked.wish, negatives=("",) * len(asked.wish)))
    set_entry(folder, "force_zeros_for_empty_prompt", True)
    assert difference(drawn_here(empty), (drawn[1],)) < 1e-5


@pytest.mark.parametrize("is_zeroed", [True, False])
def test_a_dropped_caption_trains_the_states_that_the_pipeline_draws_with(folder, is_zeroed):
    set_entry(folder, "force_zeros_for_empty_prompt", is_zeroed)
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(folder)
    _, states, _, pooled = pipeline.encode_prompt("a cat", do_classifier_free_guidance=True)
    graph = build_graph(folder, objective=ObjectiveSettings(), resolution=16)
    names = [layer.name for layer in graph.layers if layer.component.startswith("text_encoder")]
    materialize(graph, names, weight_sources(folder, graph), device="cpu", dtype=torch.float32, seed=0)
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    texts = [Absent(), "a cat"]
    raw = {
        name: token_ids(open_tokenizer(folder, name), texts, shapes[name][0]) for name in ("input_ids", "input_ids_2")
    }
    targets = ["text_states", "pooled_text"]
    found = run_layers(needed_layers(graph.layers, targets, raw), graph.components, raw, targets=targets)
    assert torch.allclose(found["text_states"][:1], states, atol=1e-6)
    assert torch.allclose(found["pooled_text"][:1], pooled, atol=1e-6)
    assert found["text_states"][1].abs().min() > 0
    assert (found["pooled_text"][0] == 0).all() == is_zeroed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd3", "flux"])  # of FLUX.1 that means without guidance
def test_without_a_negative_prompt_the_other_pipelines_draw_as_diffusers_does(tmp_path, kind):
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(tmp_path)
    asked = without_negatives(tmp_path, kind)
    assert difference(drawn_here(asked), (by_diffusers(asked),)) < 1e-5


def test_what_wan_2_2_adds_is_refused(tmp_path):
    index = {"_class_name": "WanPipeline", "expand_timesteps": True}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="expand_timesteps is True; supported: False"):
        open_components(tmp_path)
