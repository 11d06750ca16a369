"""The README.md of an exported model."""

from diffusionpipe.models.objective import Prediction


def model_card(
    *,
    pipeline: str,
    base_model: str,
    trained: tuple[str, ...],
    prediction: Prediction,
    step: int,
    is_average: bool,
    recipe: str | None,
) -> str:
    """The card in the Hugging Face Hub's form: where the model comes from, what was trained, how to sample it."""
    weights = "the exponential moving average of the weights" if is_average else "the weights as trained"
    parts = [
        "---\nlibrary_name: diffusers\npipeline_tag: "
        + ("text-to-image" if pipeline.startswith("StableDiffusion") else "unconditional-image-generation")
        + "\n---\n",
        f"# {pipeline} trained from {base_model}\n",
        f"Trained with DiffusionPipe: {', '.join(trained)}, {step} steps, objective `{prediction}`.\n",
        f"The files hold {weights}; everything else is the base model's.\n",
        "## Sampling\n",
        _sampling(pipeline, prediction),
    ]
    if recipe is not None:
        parts += ["## Recipe\n", f"```toml\n{recipe.strip()}\n```\n"]
    return "\n".join(parts)


def _sampling(pipeline: str, prediction: Prediction) -> str:
    """How to draw from the model."""
    if prediction is Prediction.FLOW_MATCHING:
        return (
            f"The model predicts a flow, and its scheduler is `FlowMatchEulerDiscreteScheduler`. The {pipeline} of "
            "diffusers\nopens this folder, but cannot sample it: it was written for models that predict noise, and "
            "scales and initialises the\nlatents accordingly. Use DiffusionPipe:\n\n"
            "```\ndiffusionpipe sample RUN --prompt ... --out grid.png\n```\n"
        )
    return (
        f"```python\nfrom diffusers import {pipeline}\n\n"
        f'pipeline = {pipeline}.from_pretrained("path/to/this/folder")\n```\n'
    )
