"""The pair of backbones: `python -m benchmarks.cascade.models` makes the second one's profile anew.

ASSUMPTION: DeepFloyd IF cannot be built yet. In place of IF-I-M and IF-II-M stand two U-Nets of Stable Diffusion 2.1
(UNet2DConditionModel, 0.9 G parameters each) at 512 and 1024 px, which share their text encoder.
"""

from dataclasses import replace

from benchmarks.paper.profiles import BATCH_SIZES, DEVICE, FOLDER, load
from diffusionpipe.costs import Profile
from diffusionpipe.costs.files import read_profile, write_profile
from diffusionpipe.costs.joining import joined_profile

MODEL, RESOLUTION = "sd-2.1", 1024
LARGE = FOLDER / f"{MODEL}-{RESOLUTION}px-{DEVICE}.json"


def pair() -> Profile:
    """Both backbones, with encoders on the fly."""
    return joined_profile({"base": load(MODEL), "super_resolution": read_profile(LARGE)})


def equal_pair() -> Profile:
    """Two backbones of equal work."""
    return joined_profile({"base": load(MODEL), "super_resolution": load(MODEL)})


def without_encoders(profile: Profile) -> Profile:
    """The same with encoder outputs from disk: nothing is frozen, so there is nothing to fill."""
    graph, frozen = profile.graph, set(profile.graph.frozen_layers)
    kept = [layer for layer in graph.layers if layer.name not in frozen]
    written = {name for layer in kept for name in layer.writes}
    read = dict.fromkeys(name for layer in kept for name in layer.reads if name not in written)
    return replace(
        profile,
        graph=replace(graph, layers=tuple(kept), inputs=tuple(read)),
        layers=tuple(layer for layer in profile.layers if layer.name not in frozen),
    )


def make() -> None:
    """Count the larger U-Net's work in bfloat16 and write its profile."""
    import torch

    from diffusionpipe.models.configured import configured_graph
    from diffusionpipe.models.describe import describe
    from diffusionpipe.profiler import analytic_profile

    graph = configured_graph(MODEL, resolution=RESOLUTION)
    model = describe(graph, autocast=torch.bfloat16)
    profile = analytic_profile(graph, model, device=DEVICE, precision="bfloat16", batch_sizes=BATCH_SIZES)
    write_profile(profile, LARGE)


if __name__ == "__main__":
    make()
    print(LARGE)
