"""A device that has no more memory: training names the place, drawing does without."""

import logging
from unittest import mock

import pytest
import torch
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train_here
from torch._subclasses.fake_tensor import FakeTensor

from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.machine.error_file import note_of
from diffusionpipe.trainer.inference import drawing

SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return save_dit(folder / "model"), save_pictures(folder / "data")


def test_the_note_names_the_action_the_memory_in_use_and_the_keys_to_change(sources, tmp_path):
    number = iter(range(10))

    def forward(self, *arguments, original=LayerStage.__call__):
        if next(number) == 3:  # two micro-batches, and the second one of the second step
            raise torch.OutOfMemoryError(SAYS)
        return original(self, *arguments)

    recipe = recipe_of(*sources, tmp_path, training={"steps": 4})
    with mock.patch.object(LayerStage, "__call__", forward), pytest.raises(torch.OutOfMemoryError) as caught:
        train_here(recipe)
    message = note_of(caught.value).message
    assert message.startswith(f"out of memory ({SAYS}).\n")
    assert "It ran out at action 0F1 (forward of stage 0, micro-batch 1); host memory " in message
    assert "pipeline.stages" in message
    assert len(message.splitlines()) == 3


def test_a_drawing_for_which_no_memory_is_left_does_not_end_training(sources, tmp_path, caplog):
    sampling = {"every": 1, "labels": [1, 2], "steps": 2}
    recipe = recipe_of(*sources, tmp_path, training={"steps": 2}, sampling=sampling)
    fail = mock.Mock(side_effect=torch.OutOfMemoryError(SAYS))
    with mock.patch.object(drawing, "decode", fail), caplog.at_level(logging.WARNING):
        assert train_here(recipe) == 2
    assert fail.call_count == 2
    assert sorted(losses_of(tmp_path)) == [1, 2]
    assert [SAYS in record.getMessage() for record in caplog.records if "samples=none" in record.getMessage()] == [
        True
    ] * 2


def test_another_error_of_a_drawing_is_not_hidden(sources, tmp_path):
    sampling = {"every": 1, "labels": [1], "steps": 2}
    recipe = recipe_of(*sources, tmp_path, training={"steps": 1}, sampling=sampling)
    with (
        mock.patch.object(drawing, "decode", side_effect=RuntimeError("shapes differ")),
        pytest.raises(RuntimeError, match="shapes differ"),
    ):
        train_here(recipe)


def test_pictures_are_decoded_one_at_a_time(tmp_path):
    from diffusers import AutoencoderKL

    folder = save_dit(tmp_path / "model")
    sizes = []
    decode = AutoencoderKL.decode

    def counted(self, latents, **options):
        if not isinstance(latents, FakeTensor):  # the count of what it takes
            sizes.append(len(latents))
        return decode(self, latents, **options)

    with mock.patch.object(AutoencoderKL, "decode", counted):
        pictures = drawing.decode(folder, torch.zeros(3, 4, 4, 4))
    assert (len(pictures), sizes) == (3, [1, 1, 1])
