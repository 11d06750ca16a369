"""Pictures over several ranks are those of one process, for every kind of model that is drawn."""

from pathlib import Path

import diffusers
import pytest
import torch
from kit.drawn_families import GUIDED, Asked, asked_of, by_diffusers, check, drawn_everywhere, of_cascade
from kit.steered import asked_of_steered, save_controlled, save_steered
from kit.tiers import quick_and_slow
from kit.tiny_class_unet import save_class_pair
from kit.tiny_deepfloyd import save_cascade
from kit.tiny_models import randomise_parameters, randomise_pipeline, tiny_unet
from kit.tiny_pipelines import sdxl
from kit.tiny_runs import save_dit, save_stable_diffusion

from diffusionpipe.errors import ConfigError
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.trainer.inference.drawing import Arithmetic
from diffusionpipe.trainer.inference.folder_drawing import open_source
from diffusionpipe.trainer.recipe import RecipePrecision
from diffusionpipe.workflows.drawing.ranks import _plan

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")

CPU = torch.device("cpu")


def save_adapters(model: Path, folder: Path) -> Path:
    """Adapters of every attention of the folder's U-Net, as diffusers saves them."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    unet = diffusers.UNet2DConditionModel.from_pretrained(model / "unet")
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    randomise_parameters(unet, 5)
    state = diffusers.utils.convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
    diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=state)
    return folder


def save_self_conditioned(folder: Path) -> Path:
    """A Stable Diffusion whose U-Net reads its own estimate."""
    save_stable_diffusion(folder)
    unet = tiny_unet(in_channels=8)
    randomise_parameters(unet, 3)
    unet.save_pretrained(folder / "unet")
    return folder


def save_sdxl(folder: Path) -> Path:
    """A Stable Diffusion XL with random weights."""
    pipeline = sdxl()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return folder


def _adapted(place: Path) -> list[Asked]:
    model = save_stable_diffusion(place / "model")
    adapters = save_adapters(model, place / "adapters")
    return [asked_of(model, 8, guidance, adapters) for guidance in (GUIDED, 1.0)]


def _steered(place: Path) -> list[Asked]:
    return [asked_of_steered(save_controlled(place / "model"), save_steered(place / "data", 8), GUIDED)]


KINDS = {
    "StableDiffusionPipeline": (lambda place: [asked_of(save_stable_diffusion(place), 8)], by_diffusers),
    "adapters": (_adapted, by_diffusers),
    "StableDiffusionXLPipeline": (lambda place: [asked_of(save_sdxl(place), 16)], by_diffusers),
    "DeepFloyd IF": (lambda place: [of_cascade(save_cascade(place))], None),
    "a pair of classes": (lambda place: [of_cascade(save_class_pair(place))], None),
    "StableDiffusionControlNetPipeline": (_steered, by_diffusers),
    "self-conditioned": (lambda place: [asked_of(save_self_conditioned(place), 8)], None),
}
"""What is drawn beside the families of test_described_families, and by diffusers too where it has a pipeline for it.
The others are compared with one process, whose pictures test_deepfloyd_runs compares with those of diffusers."""


@pytest.mark.parametrize("kind", quick_and_slow(KINDS, quick=["adapters"]))
def test_1_to_3_ranks_draw_what_diffusers_draws_in_bfloat16_the_same_bits(kind, tmp_path):
    asked, by = KINDS[kind]
    for drawn in drawn_everywhere(asked(tmp_path), by):
        check(drawn)


def case(save, size, place):
    """A source, a wish and settings."""
    asked = asked_of(save(place / "model"), size)
    return asked.sources, asked.wish, asked.settings


def test_encoders_are_stored_as_bfloat16_reads_them_and_write_the_same_bits(tmp_path):
    (source,), wish, (settings,) = case(save_stable_diffusion, 8, tmp_path)
    device, arithmetic = CPU, Arithmetic(precision=RecipePrecision.BFLOAT16)
    narrow, wide = (open_source(source, wish, settings) for _ in range(2))
    ours = narrow.conditions(device, arithmetic)
    wide.materialize(wide.frozen, device, Arithmetic())
    with torch.no_grad(), arithmetic.context(device):
        theirs = run_layers(wide.frozen, wide.graph.components, wide.raw, targets=set(ours) - set(wide.raw))
    assert theirs
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    sizes = [sum(p.nbytes for p in one.graph.components["text_encoder"].parameters()) for one in (narrow, wide)]
    assert sizes[0] < 0.7 * sizes[1]


def test_more_ranks_than_layers_are_refused_with_the_number_that_fits(tmp_path):
    (source,), wish, (settings,) = case(save_dit, 8, tmp_path)
    model = describe(open_source(source, wish, settings).graph)
    most = len(model.backbone_layers)
    assert _plan(model, most, 4, 1).mesh.pipeline == most
    with pytest.raises(ConfigError, match=rf"{most + 1} ranks cannot share the {most} layers .*; use --ranks {most} "):
        _plan(model, most + 1, 4, 1)
