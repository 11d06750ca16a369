"""The README.md of an exported model."""

from dataclasses import dataclass

from diffusionpipe.models.objective import Prediction

_OF_TEXT = ("StableDiffusion", "Flux")
_OF_FLOWS = ("StableDiffusion3", "Flux")


@dataclass(frozen=True, slots=True)
class Adapters:
    """What was trained, if it was adapters."""

    rank: int
    is_merged: bool
    """Whether the files hold the whole model."""


def model_card(
    *,
    pipeline: str,
    base_model: str,
    trained: tuple[str, ...],
    prediction: Prediction,
    step: int,
    is_average: bool,
    recipe: str | None,
    adapters: Adapters | None = None,
) -> str:
    """The card in the Hugging Face Hub's form: where the model comes from, what was trained, how to sample it."""
    weights = "the exponential moving average of the weights" if is_average else "the weights as trained"
    what = ", ".join(trained)
    if adapters is not None:
        what = f"adapters (LoRA) of rank {adapters.rank} on {what}"
    are_alone = adapters is not None and not adapters.is_merged
    rest = "the base model is needed beside them" if are_alone else "everything else is the base model's"
    if adapters is not None and adapters.is_merged:
        rest = f"they are added to the base model's; {rest}"
    parts = [
        _head(pipeline, base_model if are_alone else None),
        f"# {'Adapters for ' + base_model if are_alone else f'{pipeline} trained from {base_model}'}\n",
        f"Trained with DiffusionPipe: {what}, {step} steps, objective `{prediction}`.\n",
        f"The files hold {weights}; {rest}.\n",
        "## Sampling\n",
        _sampling(pipeline, prediction, base_model if are_alone else None),
    ]
    if recipe is not None:
        parts += ["## Recipe\n", f"```toml\n{recipe.strip()}\n```\n"]
    return "\n".join(parts)


def _head(pipeline: str, base_model: str | None) -> str:
    """The card's metadata; adapters name their base model."""
    task = "text-to-image" if pipeline.startswith(_OF_TEXT) else "unconditional-image-generation"
    lines = ["library_name: diffusers", f"pipeline_tag: {task}"]
    if base_model is not None:
        lines += [f"base_model: {base_model}", "tags:", "- lora"]
    return "\n".join(["---", *lines, "---\n"])


def _sampling(pipeline: str, prediction: Prediction, base_model: str | None) -> str:
    """How to draw from the model; `base_model` is what adapters are loaded into."""
    if prediction is Prediction.FLOW_MATCHING and not pipeline.startswith(_OF_FLOWS):
        return (
            f"The model predicts a flow, and its scheduler is `FlowMatchEulerDiscreteScheduler`. The {pipeline} of "
            "diffusers\nopens this folder, but cannot sample it: it was written for models that predict noise, and "
            "scales and initialises the\nlatents accordingly. Use DiffusionPipe:\n\n"
            "```\ndiffusionpipe sample RUN --prompt ... --out grid.png\n```\n"
        )
    load = f'pipeline = {pipeline}.from_pretrained("{base_model or "path/to/this/folder"}")\n'
    if base_model is not None:
        load += 'pipeline.load_lora_weights("path/to/this/folder")\n'
    return f"```python\nfrom diffusers import {pipeline}\n\n{load}```\n"
