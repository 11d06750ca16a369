"""The ten recorded trainings, every key that bears on a loss written out: a later default changes none of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from golden.folders import RESOLUTION

from diffusionpipe.trainer.recipe import Recipe

STEPS = 5
PRECISIONS = ("float32", "float64")
FILLED_PLAN = Path(__file__).parent / "filled-plan.json"
"""The plan of "unet-filled". With `fill = true` layers would be measured, and the plan would depend on the clock."""

_BASE: Mapping[str, Mapping[str, object]] = {
    "model": {"train": (), "from_scratch": False, "frozen_dtype": "none"},
    "objective": {"kind": "epsilon", "snr_gamma": "none", "time_sampling": "uniform", "shift": 1.0},
    "data": {
        "resolution": RESOLUTION, "random_crop": False, "flip": True, "caption_dropout": 0.25, "workers": 0,
        "validation": "none",
    },
    "training": {
        "seed": 0, "steps": STEPS, "batch": 8, "clip_norm": 1.0, "post_validation": False, "ema_decay": 0.9,
        "activation_checkpointing": False,
    },
    "optimizer": {
        "name": "AdamW", "learning_rate": 0.01,
        "arguments": {"betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": 0.01},
    },
    "learning_rate": {"schedule": "constant", "warmup_steps": 0, "final": 0.0},
    "pipeline": {
        "plan": "none", "stages": 2, "microbatches": 4, "schedule": "1f1b", "replicas": (), "data_parallel": 1,
        "sharded": False, "splits": (), "encode_chunk": 2, "fill": False, "offload_frozen": False,
    },
    "validation": {"every": "none"},
    "sampling": {"every": "none", "guidance": 4.0},
    "checkpoint": {"every": "none", "keep": 1},
}  # fmt: skip
_FLOW = {"kind": "flow_matching"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One recorded training."""

    kind: str
    """Of its model, one of `folders.KINDS`."""
    ranks: int
    changes: Mapping[str, Mapping[str, object]]
    """Keys that differ from those all recipes have."""


TRAININGS: Mapping[str, Training] = {
    "dit-alone": Training(
        kind="dit",
        ranks=1,
        changes={
            "pipeline": {"stages": 1, "microbatches": 2},
            "training": {"activation_checkpointing": ("transformer.transformer_blocks.*",)},
        },
    ),
    "dit-sharded": Training(
        kind="dit",
        ranks=2,
        changes={
            "pipeline": {"stages": 1, "microbatches": 2, "data_parallel": 2, "sharded": True},
            "learning_rate": {"schedule": "cosine", "warmup_steps": 2},
        },
    ),
    "unet-1f1b": Training(
        kind="unet",
        ranks=2,
        changes={"model": {"train": ("unet", "text_encoder")}, "objective": {"kind": "v_prediction"}},
    ),
    "unet-zb-v": Training(
        kind="unet", ranks=2, changes={"pipeline": {"schedule": "zb-v"}, "objective": {"snr_gamma": 5.0}}
    ),
    "unet-chimera": Training(kind="unet", ranks=2, changes={"pipeline": {"schedule": "chimera"}}),
    "unet-filled": Training(kind="unet", ranks=2, changes={"pipeline": {"plan": str(FILLED_PLAN)}}),
    "unet-replicas": Training(
        kind="unet", ranks=3, changes={"pipeline": {"replicas": (2, 1)}, "optimizer": {"name": "SGD", "arguments": {}}}
    ),
    "flux-1f1b": Training(kind="flux", ranks=2, changes={"objective": _FLOW}),
    "flux-lora-data-parallel": Training(
        kind="flux",
        ranks=4,
        changes={
            "lora": {"rank": 2, "alpha": 6.0, "target_modules": ("to_q", "to_k", "to_v", "to_out.0"), "merge": False},
            "pipeline": {"schedule": "zb-h1", "microbatches": 2, "data_parallel": 2},
            "objective": {**_FLOW, "time_sampling": "logit_normal", "shift": 3.0},
        },
    ),
    "controlnet-interleaved": Training(
        kind="controlnet",
        ranks=2,
        changes={"pipeline": {"schedule": "interleaved"}, "training": {"activation_checkpointing": True}},
    ),
}


def recipe_of(training: Training, precision: str, *, model: str, data: str, folder: str, steps: int = STEPS) -> Recipe:
    """The whole recipe."""
    sections = {name: {**values, **training.changes.get(name, {})} for name, values in _BASE.items()}
    if "lora" in training.changes:
        sections["lora"] = dict(training.changes["lora"])
    if sections["pipeline"]["plan"] != "none":
        sections["pipeline"] = {"plan": sections["pipeline"]["plan"]}
    sections["model"]["path"] = model
    sections["data"]["train"] = data
    sections["training"] |= {"precision": precision, "steps": steps}
    sections["run"] = {"folder": folder}
    return Recipe.model_validate(sections)
