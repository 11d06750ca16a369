"""Imported by the fork server of `make torture`: does once what every rank would do for itself at its start."""

# ruff: noqa: E402  # noise of the imports is left out only if it is said before them
import importlib
import os
import tempfile
from pathlib import Path

from diffusionpipe.cli.verbs.output import quieten

quieten()

import torch
from kit.tiny_runs import recipe_of, save_dit, save_stable_diffusion
from transformers.utils.logging import disable_progress_bar

from diffusionpipe.trainer.model.members import build_model

NAMES = (
    "diffusionpipe.cli.verbs.train",
    "diffusionpipe.cli.text.run_text",
    "diffusionpipe.workflows.training.run_timeline",
    "diffusionpipe.planner",
    "diffusionpipe.viz.grid",
    "diffusionpipe.viz.metrics",
    "matplotlib.backends.backend_agg",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
)


def _describe_models() -> None:
    """Fill torch's caches of fake operations, for which a rank would compute for two seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        for save in (save_dit, save_stable_diffusion):
            folder = save(Path(temporary) / save.__name__)
            build_model(recipe_of(folder, folder, folder), "cpu")


disable_progress_bar()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
for name in NAMES:
    importlib.import_module(name)
_describe_models()
