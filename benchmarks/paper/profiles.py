"""The analytic profiles that are planned with: `python -m benchmarks.paper.profiles NAME ...` makes them anew."""

import sys
from pathlib import Path

from diffusionpipe.costs import Profile
from diffusionpipe.costs.files import read_profile, write_profile

FOLDER = Path(__file__).resolve().parents[2] / "profiles" / "analytic"
DEVICE = "a100-80"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def load(name: str) -> Profile:
    """The stored profile of a configured model on an A100 with 80 GB; made where there is none, in half a minute."""
    path = FOLDER / f"{name}-{DEVICE}.json"
    if not path.is_file():
        make(name)
    return read_profile(path)


def make(name: str) -> Path:
    """Count the model's work in bfloat16 and write its profile."""
    import torch

    from diffusionpipe.models.configured import configured_graph
    from diffusionpipe.models.describe import describe
    from diffusionpipe.profiler import analytic_profile

    graph = configured_graph(name)
    model = describe(graph, autocast=torch.bfloat16)
    profile = analytic_profile(graph, model, device=DEVICE, precision="bfloat16", batch_sizes=BATCH_SIZES)
    path = FOLDER / f"{name}-{DEVICE}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    return path


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(make(wanted))
