"""Runs with a cache of encoders' results, and the entries of their caches."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from kit.tiny_runs import losses_of, train
from safetensors import safe_open
from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.setup import caching
from diffusionpipe.trainer.step import cache_writer

LAYOUT = {"microbatches": 2, "encode_chunk": 2}


@contextmanager
def small_shards() -> Iterator[None]:
    """Every step writes a shard."""
    with mock.patch.object(cache_writer, "SHARD", 1):
        yield


def train_in_small_shards(job: Job, recipe: Recipe, resume: str | None = None) -> int:
    """The run of a recipe, in which every step writes a shard."""
    with small_shards():
        return train(job, recipe, resume)


def train_without_settings(job: Job, recipe: Recipe) -> int:
    """The run of a recipe on a rank; the settings of its cache cannot be written."""
    with mock.patch.object(caching, "write_settings", side_effect=ConfigError("the disk is full")):
        return train(job, recipe)


def assert_close(found: Recipe, expected: Recipe, most: float = 1e-6) -> None:
    """The losses of two runs, step by step."""
    own, other = losses_of(found.run.folder), losses_of(expected.run.folder)
    assert own.keys() == other.keys()
    assert max(abs(own[step] - other[step]) for step in own) < most


def entries_of(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Key -> tensor of every folder of a cache; ranks that meet a result at the same time may both write it."""
    found: dict[tuple[str, str], Tensor] = {}
    for shard in sorted(folder.glob("*/*.safetensors")):
        with safe_open(shard, "pt") as opened:
            for key in list(opened.keys()):
                value = opened.get_tensor(key)
                torch.testing.assert_close(value, found.setdefault((shard.parent.name, key), value))
    return found


def is_whole(shard: Path) -> bool:
    """Whether a shard has the checksums of its own bytes."""
    with safe_open(shard, "pt") as opened:
        sums = opened.metadata()
        rows = {key: opened.get_tensor(key).numpy().tobytes() for key in sums}
    return all(f"{zlib.crc32(row):08x}" == sums[key] for key, row in rows.items())
