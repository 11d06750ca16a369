"""The analytic profiles of the cards: `python -m benchmarks.cards.profiles [NAME ...]` makes them anew."""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.paper.profiles import FOLDER
from diffusionpipe.costs import Profile
from diffusionpipe.costs.files import read_profile, write_profile

NAMES = ("flux.1-dev-lora", "flux.1-dev", "sdxl", "sd3-medium")
DEVICES = ("rtx4090", "l40s", "h100")
BATCH_SIZES = (1, 2, 4, 8, 16)


@cache
def load(name: str, device: str) -> Profile:
    """The stored profile of a configured model on a device."""
    return read_profile(FOLDER / f"{name}-{device}.json")


def make(name: str) -> Iterator[Path]:
    """Count the model's work in bfloat16, as if frozen matrices were stored so, and write its profiles."""
    import torch

    from diffusionpipe.models.configured import configured_graph
    from diffusionpipe.models.describe import describe
    from diffusionpipe.profiler import analytic_profile

    graph = configured_graph(name)
    for component in graph.components.values():
        for module in component.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                for parameter in module.parameters(recurse=False):
                    if not parameter.requires_grad:
                        parameter.data = parameter.data.to(torch.bfloat16)
    model = describe(graph, autocast=torch.bfloat16)
    for device in DEVICES:
        profile = analytic_profile(graph, model, device=device, precision="bfloat16", batch_sizes=BATCH_SIZES)
        path = FOLDER / f"{name}-{device}.json"
        write_profile(profile, path)
        yield path


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        for written in make(wanted):
            print(written, flush=True)
