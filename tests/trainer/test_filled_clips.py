"""Holes of clips: Wan from known frames reads and draws what diffusers' own pipeline does, and trains."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from kit.known_frames import CLIP, CPU, by_diffusers, differences, settings_of
from kit.tiny_clips import save_clips
from kit.tiny_described import save_described
from kit.tiny_runs import losses_of, recipe_of, train, train_here
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import build_graph
from diffusionpipe.models.parts.masks import CHANNELS
from diffusionpipe.trainer.data.batches.batch import BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.masks.holes import MaskSource, guide_frames
from diffusionpipe.trainer.data.masks.kinds import MaskKind
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.folder_drawing import Source, draw_from_folder, open_source
from diffusionpipe.trainer.inference.known_pixels import KnownPixels

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_described("WanImageToVideoPipeline", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A picture of the size of the clips."""
    values = np.random.default_rng(0).integers(0, 256, (CLIP.height, CLIP.width, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("picture") / "first.png"
    Image.fromarray(values).save(path)
    return path


def in_float64(folder, first):
    """The differences of `known_frames` where all of both is computed in float64."""
    program = Path(__file__).parents[1] / "kit/known_frames.py"
    run = subprocess.run([sys.executable, program, folder, first], capture_output=True, text=True, check=True)
    return [float(number) for number in run.stdout.split()]


def test_the_transformer_reads_and_draws_what_diffusers_pipeline_does(model, first):
    inputs, frames = differences(model, first)
    assert inputs < 1e-5
    assert frames < 5e-5  # rounding of float32, as the next test shows


@pytest.mark.slow
def test_in_float64_frames_are_those_of_diffusers_pipeline_to_1e_10(model, first):
    assert max(in_float64(model, first)) < 1e-10


def test_the_first_and_the_last_frame_are_read_as_diffusers_pipeline_reads_them(model, first):
    objective = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    graph = build_graph(model, objective=objective, resolution=32, clip=CLIP)
    frozen = [layer for layer in graph.layers if layer.name in ("vae.masked_pixels", "vae.masked_encoder")]
    frozen += [layer for layer in graph.layers if layer.name == "vae.mask_channels"]
    vae = diffusers.AutoencoderKLWan.from_pretrained(model / "vae")
    picture = torch.from_numpy(np.array(Image.open(first))).permute(2, 0, 1) / 127.5 - 1
    pixels = torch.randn(1, 3, 5, 16, 32, generator=torch.Generator().manual_seed(0))
    pixels[:, :, 0] = pixels[:, :, -1] = picture
    mask = torch.ones(1, 1, 5, 16, 32)
    mask[:, :, [0, -1]] = 0
    found = run_layers(frozen, {"vae": vae}, {"pixels": pixels, "mask": mask}, targets=[CHANNELS])[CHANNELS]
    _, read = by_diffusers(model, first, last_image=Image.open(first))
    assert (found - read).abs().max() < 1e-5
    inverted = run_layers(frozen, {"vae": vae}, {"pixels": pixels, "mask": 1 - mask}, targets=[CHANNELS])[CHANNELS]
    assert (inverted - read).abs().max() > 0.5


def test_a_latent_reads_of_a_mask_whether_its_corner_is_known_in_each_of_its_frames(model):
    objective = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    graph = build_graph(model, objective=objective, resolution=32, clip=CLIP)
    layers = [layer for layer in graph.layers if layer.name == "vae.mask_channels"]
    masks = torch.randint(2, (3, 1, 5, 16, 32), generator=torch.Generator().manual_seed(0)).float()
    latents = torch.randn(3, 4, 3, 4, 8)
    given = dict(zip(layers[0].reads, (masks, latents), strict=True))
    found = run_layers(layers, {"vae": None}, given, targets=[CHANNELS])[CHANNELS]
    for row, frame, channel, y, x in product(range(3), range(3), range(2), range(4), range(8)):
        own = 2 * (frame - 1) + 1 + channel if frame else 0  # the first latent has the first frame alone
        assert found[row, channel, frame, y, x] == 1 - masks[row, 0, own, 4 * y, 4 * x]
    assert torch.equal(found[:, 2:], latents)


def test_known_pixels_of_the_first_frame_come_back_bit_for_bit(model, first, tmp_path):
    hole = np.zeros((CLIP.height, CLIP.width), dtype=bool)
    hole[3:10, 5:20] = True
    Image.fromarray(hole.astype(np.uint8) * 255).save(tmp_path / "mask.png")
    known = (KnownPixels(first), KnownPixels(first, tmp_path / "mask.png"))
    wish = SampleRequest(prompts=("a cat", "b"), known=known)
    whole, part = draw_from_folder(model, wish, settings_of(model), resolution=CLIP.width, clip=CLIP, device=CPU)
    values = np.array(Image.open(first))
    assert whole.shape == (5, 16, 32, 3)
    assert np.array_equal(whole[0], values)
    assert np.array_equal(part[0][~hole], values[~hole])
    assert (part[0][hole] != values[hole]).mean() > 0.5


def test_guide_frames_of_a_hundred_thousand_draws_are_within_a_percent_of_their_shares():
    numbers = np.random.default_rng(0).random((100_000, 6))
    counts = Counter(tuple(guide_frames(MaskKind.EDGES, own.tolist(), 5)) for own in numbers)
    shares = {frames: count / 100_000 for frames, count in counts.items()}
    single = 0.35 / 32
    assert shares[(False,) * 5] == pytest.approx(0.3 + single, abs=0.01)
    assert shares[(True, False, False, False, True)] == pytest.approx(0.35 + single, abs=0.01)
    assert len(shares) == 32


def masks_of(kind, folder, positions=range(64), step=0):
    """Masks of clips at these places of a step, (N, 1, 5, 16, 32)."""
    source = BatchSource(
        dataset=Dataset(folder=folder, samples=(Sample(name="a.gif"),)),
        inputs=(TensorSpec(name="mask", shape=(1, 5, 16, 32)),),
        seed=0,
        masks=MaskSource(kind=kind),
    )
    return make_batch(source, Rows(samples=(0,) * len(positions), positions=tuple(positions), step=step))["mask"]


def test_a_clip_has_one_mask_in_all_frames_but_its_guide_frames(tmp_path):
    masks = masks_of(MaskKind.EDGES, tmp_path)
    has_hole = masks.flatten(3).any(3).squeeze(1)  # (B, F)
    assert has_hole.any(1).float().mean() > 0.9
    for clip, own in zip(masks, has_hole, strict=True):
        frames = [frame for frame, is_there in zip(clip[0], own, strict=True) if is_there]
        assert all(torch.equal(one, other) for one, other in pairwise(frames))


def test_holes_and_guide_frames_of_clips_depend_on_step_and_place_alone(tmp_path):
    masks = masks_of(MaskKind.EDGES, tmp_path)
    assert torch.equal(masks_of(MaskKind.EDGES, tmp_path, positions=(41, 7)), masks[[41, 7]])
    assert not torch.equal(masks_of(MaskKind.EDGES, tmp_path, step=1), masks)


def test_of_image_to_video_the_first_frame_is_known_and_all_others_are_holes(model, first, tmp_path):
    masks = masks_of(MaskKind.FIRST, tmp_path)
    assert not masks[:, :, 0].any()
    assert masks[:, :, 1:].all()
    wish = SampleRequest(prompts=("a cat",), known=(KnownPixels(first),))
    drawn = open_source(Source(folder=model, resolution=CLIP.width, clip=CLIP), wish, settings_of(model))
    assert torch.equal(drawn.raw["mask"][:1], masks[:1])  # trained as it is drawn, and as diffusers' pipeline has it


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["edges", "first"])
def test_m3ddm_masks_train_clips_on_two_stages_as_on_one_rank_and_diffusers_opens_the_export(
    masks, model, first, tmp_path, crew
):
    clips = save_clips(tmp_path / "clips", 4, frames=8, width=32, height=16)
    data = {"resolution": 32, "height": 16, "frames": 5, "masks": masks}
    sampling = {"every": 2, "prompts": ["a cat"], "steps": 1, "images": str(first)}
    sections = {"data": data, "sampling": sampling, "training": {"steps": 2, "precision": "float64"}}
    train_here(recipe_of(model, clips, tmp_path / "one", **sections))
    crew.run(train, recipe_of(model, clips, tmp_path / "two", **sections))
    expected, found = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert [found[1], found[2]] == pytest.approx([expected[1], expected[2]], rel=1e-9)
    for run in ("one", "two"):
        (drawn,) = (tmp_path / run / "samples" / "step-00000002").glob("*.png")
        assert np.array_equal(np.array(Image.open(drawn).convert("RGB")), np.array(Image.open(first)))
    export = tmp_path / "one" / "export"
    card = (export / "README.md").read_text(encoding="utf-8")
    assert "WanImageToVideoPipeline" in card
    assert "mask_image" not in card
    assert differences(export, first)[1] < 5e-5
    assert max(in_float64(export, first)) < 1e-10
