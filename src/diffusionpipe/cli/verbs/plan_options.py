"""The arguments and options of `diffusionpipe plan`."""

from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[
    Path | None,
    typer.Argument(help="The recipe to plan for. Without a recipe, give --batch, and --model or --profile."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Keys of the recipe to change: key.path=value.", show_default=False),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A cluster file or a known cluster, e.g. rtx3090x4, or a100-80x8:4 for four nodes of that kind; default: "
        "pipeline.cluster.",
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file that `diffusionpipe profile` wrote. With a recipe it is optional: layer times are then "
        "computed for a known device, or measured once on this machine and kept in "
        "$XDG_CACHE_HOME/diffusionpipe/profiles "
        "(~/.cache if that is not set).",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Global batch: samples of one step over all devices; a list such as 8,16,32 compares them, `auto` finds "
        "the batch from which on more gains little. Default: the recipe's, else auto.",
        show_default=False,
    ),
]
All = Annotated[
    bool,
    typer.Option("--all", help="Show every layout that was looked at, the legend, and all that is worth knowing."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Write the plan file, which pipeline.plan takes, and its prediction; with --draw: the figures of drawing."
    ),
]
Fill = Annotated[
    bool | None,
    typer.Option(
        help="Run the encoders for the next batch in the pipeline bubbles, or for each batch before its first "
        "forward; default: pipeline.fill of the recipe, else the faster of the two."
    ),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Show the layouts that other systems' planners choose, simulated: all, or some of pipedream, dapple, spp, "
        "gpipe, bapipe, megatron, ddp, zero3, with commas between. With one name, --out writes that system's plan.",
    ),
]
Quality = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Compare batches and layouts by the time to the loss that this run reached, from the gradient noise scale "
        "in its metrics. With --batch: these batches.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Activation checkpointing: layers to recompute in the backward pass, e.g. '*', or none; default: the "
        "faster of all and none that fits. Not with a recipe.",
    ),
]
Ema = Annotated[
    bool,
    typer.Option(help="Keep an exponential moving average (EMA) of the trained parameters. Not with a recipe."),
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        help="A class of torch.optim, e.g. SGD, or the path of another, e.g. bitsandbytes.optim.AdamW8bit; default: "
        "AdamW. Not with a recipe."
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A shipped model, e.g. sd-2.1, a diffusers folder or a hub id, in place of --profile: its layer times are "
        "computed for the cluster's device and kept. Not with a recipe.",
        show_default=False,
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Which shipped models fit, as a whole and by adapters: all, or some with commas between. Not with a "
        "recipe, --model or --profile.",
        show_default=False,
    ),
]
ModelClass = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A transformer class of the installed diffusers at its default size, e.g. MiniMaxH3Transformer3DModel, in "
        "place of --model: without a folder, encoders or VAE. Not with a recipe.",
        show_default=False,
    ),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE",
        help="With --model or --model-class: side of a picture in pixels, or WIDTHxHEIGHTxFRAMES, e.g. 832x480x81, to "
        "plan for clips; default: the published side.",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="With --model or --model-class: train adapters of this rank on the denoiser."),
]
CaptionChunks = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4,
        help="With --model, Stable Diffusion 1, 2 and XL: parts of 75 tokens that are read of each caption.",
        show_default=False,
    ),
]
FrozenDtypeName = Annotated[
    str | None,
    typer.Option(
        help="With --model or --model-class: bfloat16 stores frozen matrices in bfloat16; float8, int8 and nf4 store "
        "linear layers in one byte or four bits a number; none as wide as the trained ones; auto tries bfloat16, int8 "
        "and nf4, and shows the cost of each; default: bfloat16 where the arithmetic is bfloat16."
    ),
]
WeightsName = Annotated[
    str | None,
    typer.Option(
        help="With --model or --model-class: float32 (the default), or bfloat16, which keeps trained matrices in two "
        "bytes and rounds each update (training.weights). A profile and a recipe state it: leave it out there.",
        show_default=False,
    ),
]
GradientsName = Annotated[
    str | None,
    typer.Option(
        help="With weights in bfloat16: sum gradients in float32 (the default), or in bfloat16, with two bytes a "
        "number (training.gradients). Not with a recipe.",
        show_default=False,
    ),
]
Draw = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        min=1,
        max=1_000_000,
        help="Predict drawing in place of training: seconds a picture, seconds until all are there, and memory for "
        "--batch pictures that are drawn together over all devices, as `sample --ranks` does, with this number of "
        "denoising steps. Not with a recipe.",
        show_default=False,
    ),
]
Cache = Annotated[bool, typer.Option(help="Keep new profiles for later commands, and reuse kept ones.")]
Use = Annotated[
    str | None,
    typer.Option(
        metavar="RANKS",
        help="Plan for these ranks of the cluster alone, e.g. 0,1,3; default: pipeline.use of the recipe, else all.",
        show_default=False,
    ),
]
UsedRanks = Annotated[
    str | None,
    typer.Option(
        metavar="RANKS",
        help="The ranks of --cluster for which the plan was made, as for `plan --use`; default: all.",
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="Take at most this many GiB of each device; default: pipeline.memory of the recipe, else all that "
        "training may use.",
        show_default=False,
    ),
]
