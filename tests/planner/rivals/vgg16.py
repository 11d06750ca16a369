"""The published profile of VGG-16 as lists, and as a profile that `diffusionpipe plan` reads."""

from dataclasses import replace

from planner import synthetic

from diffusionpipe.costs import Profile

GB = 1e9
MINIBATCH = 128
"""Samples of the published times."""

VGG16 = """
17.972 77070336 0, 46.920 1644167168 7168, 9.999 1644167168 0, 159.531 1644167168 147712, 9.766 1644167168 0,
9.374 411041792 0, 54.803 822083584 295424, 5.097 822083584 0, 75.441 822083584 590336, 5.133 822083584 0,
4.999 205520896 0, 29.149 411041792 1180672, 2.757 411041792 0, 44.481 411041792 2360320, 3.103 411041792 0,
48.133 411041792 2360320, 2.870 411041792 0, 2.682 102760448 0, 23.823 205520896 4720640, 1.722 205520896 0,
37.259 205520896 9439232, 1.527 205520896 0, 40.445 205520896 9439232, 1.523 205520896 0, 1.583 51380224 0,
12.989 51380224 9439232, 1.050 51380224 0, 11.466 51380224 9439232, 0.653 51380224 0, 12.690 51380224 9439232,
0.630 51380224 0, 0.787 12845056 0, 0 12845056 0, 7.050 2097152 411058176, 0.407 2097152 0, 0 2097152 0,
1.443 2097152 67125248, 0.309 2097152 0, 0 2097152 0, 0.941 512000 16388000
"""
"""Forward and backward in ms, output and parameter bytes of each layer: the profile of VGG-16 that PipeDream's
repository publishes (msr-fiddle/pipedream, profiler/image_classification/profiles/vgg16, MIT licence), without the
node that only reads a size."""


def vgg16() -> tuple[list[float], list[int], list[int]]:
    """Seconds, output bytes and parameter bytes of each layer for one minibatch."""
    rows = [line.split() for line in VGG16.replace("\n", " ").split(",")]
    times = [float(row[0]) / 1e3 for row in rows]
    times[0] = 0.0  # reading the input is no work of the pipeline
    return times, [int(row[1]) for row in rows], [int(row[2]) for row in rows]


def vgg16_profile() -> Profile:
    """The same as a file for `diffusionpipe plan`: a third of each time is forward. The encoder reads the input."""
    times, outputs, parameters = vgg16()
    sketch = synthetic.Sketch(inputs=("raw",))
    read = sketch.tensor("raw", 1)
    for index, (num_bytes, weights) in enumerate(zip(outputs, parameters, strict=True)):
        name = "loss" if index == len(times) - 1 else f"x{index}"
        written = sketch.tensor(name, num_bytes // MINIBATCH // 4, grad=index > 0, dtype="float32")
        sketch.layer(f"layer{index}", "unet" if index else "vae", [read], [written], seconds=1, parameters=weights // 4)
        read = written
    profile = sketch.profile(overhead=0.0, sizes=(MINIBATCH,))
    layers = []
    for layer, seconds in zip(profile.layers, times, strict=True):
        third = (max(seconds, 1e-9) / 3,)
        kept = layer.kept or (0,)
        layers.append(replace(layer, forward=third, input_grad=third, weight_grad=third, kept=kept))
    return replace(profile, layers=tuple(layers), precision="float32")
