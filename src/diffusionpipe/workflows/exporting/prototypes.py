"""`diffusionpipe prototypes FOLDER`: a file with a prototype of each class of pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    from diffusionpipe.trainer.data.prototypes import Prototypes


def write_prototypes(
    data: Path, model: str, out: Path, *, resolution: int, seed: int, device: str, tell: Telling = SILENCE
) -> "Prototypes":
    """Write the prototypes, by class, of the labelled pictures in a folder for a model; returns them.

    Raises:
        ConfigError: the pictures have no labels, the model no classes, or the file cannot be written.
    """
    from safetensors.torch import save

    from diffusionpipe.files.output_file import write_atomically
    from diffusionpipe.models.opening.folder import resolve_folder
    from diffusionpipe.models.parameters.class_embeddings import PROTOTYPES
    from diffusionpipe.trainer.data.prototypes import prototypes_of
    from diffusionpipe.workflows.device import chosen_device

    folder = resolve_folder(model)
    tell.say(f"mean features of the pictures in {data}, by class")
    with tell.progress("reading pictures") as report:
        found = prototypes_of(
            data, folder, resolution=resolution, seed=seed, device=chosen_device(device), on_picture=report
        )
    metadata = {"model": model, "pictures": str(found.pictures), "seed": str(seed), "resolution": str(resolution)}
    write_atomically(out, save({PROTOTYPES: found.values.contiguous()}, metadata))
    return found
