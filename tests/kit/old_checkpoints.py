"""Checkpoints in the form of before 28 November 2026, which torch.distributed.checkpoint writes."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from diffusionpipe.trainer.checkpoints import manifest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER


def save_by_torch(run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object]) -> Path:
    """A checkpoint of one rank in a run's folder, as an earlier version of ours has written it; its folder."""
    folder = run / FOLDER / f"step-{step:08d}"
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)
    (folder / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    manifest.write_manifest(
        folder, manifest.Manifest(step=step, sequence=1, files=manifest.describe_files(folder, names))
    )
    path = folder / manifest.MANIFEST
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"format": 1}), encoding="utf-8")
    return folder
