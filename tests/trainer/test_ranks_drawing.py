"""Pictures over several ranks are those of one process, for every kind of model that is drawn."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
from crew import crew_of
from cuts import traced_once
from drawn_families import settings_of
from tiers import quick_and_slow
from tiny_deepfloyd import save_cascade
from tiny_described import save_described
from tiny_models import randomise_parameters
from tiny_runs import save_dit, save_stable_diffusion

from diffusionpipe.cli.sample_ranks import _plan
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.describe import describe
from diffusionpipe.models.run import run_layers
from diffusionpipe.trainer import drawing
from diffusionpipe.trainer.cascade_drawing import draw_from_folders
from diffusionpipe.trainer.conditions import Wish
from diffusionpipe.trainer.drawing import Arithmetic
from diffusionpipe.trainer.folder_drawing import Source, open_source
from diffusionpipe.trainer.ranks_drawing import Ranks, draw_on_ranks
from diffusionpipe.trainer.recipe import Precision

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")

KINDS = {
    "unet": (save_stable_diffusion, 8),
    "adapters": (save_stable_diffusion, 8),
    "dit": (save_dit, 8),
    "QwenImagePipeline": (lambda folder: save_described("QwenImagePipeline", folder), 32),
    "ZImagePipeline": (lambda folder: save_described("ZImagePipeline", folder), 32),
    "PixArtSigmaPipeline": (lambda folder: save_described("PixArtSigmaPipeline", folder), 32),
}
CAPTIONS, LABELS = Wish(prompts=("a cat", "b"), negatives=("", "c")), Wish(labels=(0, 1))


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


def drawn_in_job(job, sources, wish, settings, precision):
    """What `sample --ranks` draws, before it is rounded to 256 levels."""
    ranks = Ranks(job=job, make_plan=_plan, arithmetic=Arithmetic(precision=precision))
    with mock.patch.object(drawing, "in_levels", list), traced_once():
        return draw_on_ranks(sources, wish, settings, ranks)


def drawn_here(sources, wish, settings, arithmetic):
    with mock.patch.object(drawing, "in_levels", list):
        return draw_from_folders(sources, wish, settings, device=torch.device("cpu"), arithmetic=arithmetic)


def difference(ours, theirs):
    return max(
        (a - b).abs().max() for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def three():
    with crew_of(3) as crew:
        yield crew


@pytest.fixture(scope="module")
def alone():
    with crew_of(1) as crew:
        yield crew


def case(kind, place):
    """Sources, wish and settings of a kind of model."""
    save, side = KINDS[kind]
    folder = save(place / "model")
    adapters = save_adapters(folder, place / "adapters") if kind == "adapters" else None
    source = Source(folder=folder, resolution=side, adapters=adapters)
    return [source], LABELS if kind == "dit" else CAPTIONS, [settings_of(folder, 1.5)]


@pytest.mark.parametrize("kind", quick_and_slow(KINDS, quick=["adapters"]))
def test_pictures_on_three_ranks_are_those_of_one_process(three, tmp_path, kind):
    asked = case(kind, tmp_path)
    ours, *others = three.run(drawn_in_job, *asked, Precision.FLOAT32)
    assert others == [None, None]
    assert difference(ours, drawn_here(*asked, Arithmetic())) < 1e-5
    assert torch.stack(ours[0]).std() > 0.02


@pytest.mark.slow
def test_a_cascade_on_three_ranks_draws_what_one_process_draws(three, tmp_path):
    folder = save_cascade(tmp_path)
    sources = [
        Source(folder=folder / "base", resolution=8, name="base"),
        Source(folder=folder / "super", resolution=16, name="super", small=8),
    ]
    settings = [settings_of(one.folder, 1.5) for one in sources]
    settings[1] = replace(settings[1], noise_level=40)
    asked = sources, CAPTIONS, settings
    ours, *others = three.run(drawn_in_job, *asked, Precision.FLOAT32)
    assert others == [None, None]
    assert [one[0].shape[0] for one in ours] == [8, 16]
    assert difference(ours, drawn_here(*asked, Arithmetic())) < 1e-5
    assert torch.stack(ours[1]).std() > 0.02


@pytest.mark.parametrize("kind", quick_and_slow(KINDS, quick=["unet"]))
def test_in_bfloat16_all_numbers_of_ranks_draw_the_same_bits(alone, crew, three, tmp_path, kind):
    asked = case(kind, tmp_path)
    drawn = [ranks.run(drawn_in_job, *asked, Precision.BFLOAT16)[0] for ranks in (alone, crew, three)]
    drawn.append(drawn_here(*asked, Arithmetic(rows=1, precision=Precision.BFLOAT16)))  # as --like draws them again
    assert [difference(drawn[0], one) for one in drawn[1:]] == [0, 0, 0]
    assert difference(drawn[0], drawn_here(*asked, Arithmetic())) > 1e-5


def test_encoders_are_stored_as_bfloat16_reads_them_and_write_the_same_bits(tmp_path):
    (source,), wish, (settings,) = case("unet", tmp_path)
    device, arithmetic = torch.device("cpu"), Arithmetic(precision=Precision.BFLOAT16)
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
    (source,), wish, (settings,) = case("dit", tmp_path)
    model = describe(open_source(source, wish, settings).graph)
    most = len(model.backbone_layers)
    assert _plan(model, most, 4, 1).mesh.pipeline == most
    with pytest.raises(ConfigError, match=rf"{most + 1} ranks cannot share the {most} layers .*; use --ranks {most} "):
        _plan(model, most + 1, 4, 1)
