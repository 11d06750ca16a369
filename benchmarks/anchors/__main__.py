"""Computed speeds beside published ones: `python -m benchmarks.anchors`."""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console

from benchmarks.anchors.published import ANCHORS, Anchor, Work
from benchmarks.tables import table
from diffusionpipe.costs import Profile
from diffusionpipe.costs.devices import device_rates
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.units import Seconds

UNKNOWN_BATCH = 32
"""Samples at a time where the source does not say; from there on the computed speed hardly changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A computed speed beside a published one."""

    anchor: Anchor
    computed: float
    """Samples a second on one device."""

    @property
    def ratio(self) -> float:
        """Computed over published: above 1 the profile is too fast."""
        return self.computed / self.anchor.speed

    @property
    def error(self) -> float:
        """The part of the published speed by which the computed one is wrong."""
        return abs(self.ratio - 1)


def compared(anchor: Anchor, profile: Profile) -> Comparison:
    """The speed that a profile of the anchor's model, resolution and device gives for the anchor's work."""
    if anchor.work is Work.SAMPLE:
        return Comparison(anchor=anchor, computed=1 / _seconds_of_picture(profile, anchor.steps))
    batch = anchor.batch or UNKNOWN_BATCH
    graph = profile.graph
    frozen = graph.frozen_layers if anchor.work is Work.TRAIN_AND_ENCODE else ()
    forward = sum(profile.forward(name, batch) for name in graph.backbone_layers)
    backward = sum(profile.input_grad(name, batch) + profile.weight_grad(name, batch) for name in graph.backbone_layers)
    encoding = sum(profile.forward(name, batch) for name in frozen)
    again = forward if anchor.is_checkpointed else 0.0
    casts = sum(layer.cast for layer in profile.layers)
    return Comparison(
        anchor=anchor, computed=batch / (forward + again + backward + encoding + casts + _update(profile, anchor))
    )


def _update(profile: Profile, anchor: Anchor) -> Seconds:
    """The optimizer's step, which all published speeds of training contain: bytes over bandwidth.

    Adam in float32 reads weight, gradient and both moments and writes three of them (28 bytes a parameter), clipping
    reads and writes the gradient and reads it for the norm (12), and it is set to zero (4).
    """
    rates = device_rates(anchor.device)
    trained = sum(math.prod(one.shape) for one in profile.graph.parameters if one.is_trainable)
    return 44 * trained / (rates.bandwidth * rates.efficiency.memory)


def _seconds_of_picture(profile: Profile, steps: int) -> Seconds:
    """All denoising steps, two samples each; text and decoding, which take a few hundredths, are left out."""
    return steps * sum(profile.forward(name, 2) for name in profile.graph.backbone_layers)


def profile_of(anchor: Anchor) -> Profile:
    """The computed profile in the anchor's mode at the sizes that it needs; some seconds to a minute."""
    graph = configured_graph(anchor.model, resolution=anchor.resolution)
    model = describe(graph, autocast=torch.bfloat16)
    batch = 2 if anchor.work is Work.SAMPLE else anchor.batch or UNKNOWN_BATCH
    return analytic_profile(
        graph, model, device=anchor.device, precision="bfloat16", batch_sizes=(2, batch), mode=anchor.mode
    )


def _mode(anchor: Anchor) -> str:
    return f"{anchor.mode}, recomputed" if anchor.is_checkpointed else str(anchor.mode)


def main() -> None:
    """Print the table, or everything as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.anchors")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    profiles: dict[tuple[object, ...], Profile] = {}
    found = []
    for anchor in ANCHORS:
        key = anchor.model, anchor.resolution, anchor.device, anchor.batch, anchor.mode, anchor.work is Work.SAMPLE
        if key not in profiles:
            profiles[key] = profile_of(anchor)
        found.append(compared(anchor, profiles[key]))
    fitted, held_out = ([one.error for one in found if one.anchor.is_held_out is held] for held in (False, True))
    summary = {
        "fitted_largest_error": max(fitted),
        "held_out_median_error": median(held_out),
        "held_out_largest_error": max(held_out),
    }
    if arguments.json:
        rows = [asdict(one.anchor) | {"computed": one.computed, "ratio": one.ratio} for one in found]
        print(json.dumps({"summary": summary, "anchors": rows}, indent=2))
        return
    made = table(
        "Samples a second on one device", ("measured by others", "mode", "held out", "published", "computed", "ratio"),
        num_left=3,
    )  # fmt: skip
    for one in found:
        anchor = one.anchor
        made.add_row(
            anchor.name, _mode(anchor), "yes" if anchor.is_held_out else "", f"{anchor.speed:.2f}",
            f"{one.computed:.2f}", f"{one.ratio:.2f}",
        )  # fmt: skip
    console = Console(width=120)
    console.print(made)
    for name, value in summary.items():
        console.print(f"{name} {value:.1%}")


if __name__ == "__main__":
    main()
