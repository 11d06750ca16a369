import torch
from torch import nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import Fill, Range
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.runtime.compute.frozen import Encoder
from diffusionpipe.runtime.compute.store import RowStore

ROWS = Range(0, 6)
LAYERS = (
    Layer(name="first", component="encoder", reads=("x",), writes=("y",), run=lambda module, x: (2 * x,)),
    Layer(name="second", component="encoder", reads=("y",), writes=("z",), run=lambda module, y: (y + 1,)),
)


def test_fills_in_other_chunks_read_the_rows_of_their_own_samples():
    fills = [
        Fill(stage=0, component="", layers=Range(layer, layer + 1), samples=Range(start, stop))
        for layer, start, stop in ((0, 0, 4), (0, 4, 6), (1, 0, 1), (1, 1, 3), (1, 3, 6))
    ]
    specs = {name: TensorSpec(name=name, shape=()) for name in ("x", "z")}
    store = RowStore(dict.fromkeys(specs, ROWS), specs, torch.device("cpu"))
    store.write("x", ROWS, torch.arange(6.0))
    encoder = Encoder(LAYERS, {"encoder": nn.Identity()}, outputs=["z"], fills=fills)
    for _ in range(2):  # nothing of one iteration is left for the next
        for fill in fills:
            encoder.run(fill, store)
        assert store.view("z", ROWS).tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
