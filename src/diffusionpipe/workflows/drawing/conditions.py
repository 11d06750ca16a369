"""The pictures that steer a ControlNet in `diffusionpipe sample`: from --condition, or the run's validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.inference.conditions import SampleRequest


def steered(wish: "SampleRequest", run: Path, folder: Path, given: Sequence[Path], count: int) -> "SampleRequest":
    """The request with a conditioning picture for each of its prompts; each prompt is in it `count` times.

    `given`: the pictures, one for each prompt or one for all; without any, from the run's validation data. `folder`:
    the model's. For a model other than a ControlNet it is the same request.

    Raises:
        ConfigError: there is no picture for each prompt, or there are some and the model is not a ControlNet.
        DataError: the run's validation data have no conditioning pictures.
    """
    from dataclasses import replace

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import is_steered, steering_pictures
    from diffusionpipe.workflows.drawing.run_recipe import validation_of

    if not is_steered(folder):
        if given:
            raise ConfigError(f"--condition: {folder} holds no ControlNet; leave it out")
        return wish
    num_prompts = len(wish.prompts) // count
    found, data = list(given) * num_prompts if len(given) == 1 else list(given), validation_of(run)
    if not found and data is not None:
        found = list(steering_pictures(data, num_prompts))
    if len(found) != num_prompts:
        raise ConfigError(
            f"a ControlNet draws from a conditioning picture for each prompt; there are {len(found)} for "
            f"{num_prompts}: give --condition once for each prompt, or once for all"
        )
    return replace(wish, conditions=tuple(path for path in found for _ in range(count)))
