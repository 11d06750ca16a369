import torch
from torch import nn

from diffusionpipe.ir.recorded import LayerTime, medians_of
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.recording.layer_watch import LayerWatch


def test_forwards_with_and_without_gradients_are_told_apart():
    watch = LayerWatch(torch.device("cpu"))
    layer = Layer(name="first", component="unet", reads=("x",), writes=("y",), run=lambda component, x: (component(x),))
    stage = LayerStage([layer], {"unet": nn.Linear(2, 2)}, outputs=["y"], watch=watch)
    stage({"x": torch.ones(3, 2)})  # nobody watches
    watch.start()
    stage({"x": torch.ones(3, 2)})
    with torch.no_grad():
        stage({"x": torch.ones(1, 2)})
    assert [(one.name, one.samples, one.keeps) for one in watch.stop()] == [("first", 3, True), ("first", 1, False)]


def test_medians_are_taken_of_equal_forwards_alone():
    def taking(*seconds, samples=2, keeps=True):
        return [LayerTime(name="first", samples=samples, seconds=one, keeps=keeps) for one in seconds]

    times = [*taking(1.0, 3.0, 2.0), *taking(5.0, 5.5, samples=4), *taking(0.5, keeps=False)]
    assert medians_of(times) == (*taking(2.0), *taking(5.25, samples=4), *taking(0.5, keeps=False))
