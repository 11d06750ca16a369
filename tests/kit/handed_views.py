"""An order in which a view of a received tensor outlives the stage that handed it on."""

from collections.abc import Sequence

from diffusionpipe.ir import parse_action
from diffusionpipe.planner import Layout
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, schedule_of

FIRST = "0F0,0F1,3F0,3I0,3W0,0F2,0I0,0W0,3F1,3I1,3W1,0F3,0I1,0W1,3F2,3I2,3W2,0I2,0W2,3F3,3I3,3W3,0I3,0W3"
SECOND = (
    "1F0,2F0,1F1,2I0,1I0,2F1,1F2,2W0,1W0,2I1,1I1,2F2,1F3,2W1,1W1,2I2,1I2,2F3,2W2,1W2,2I3,1I3,2W3,1W3",
    "1F0,2F0,1F1,2I0,1I0,1W0,2F1,1F2,2W0,2I1,1I1,1W1,2F2,1F3,2W1,2I2,1I2,1W2,2F3,2W2,2I3,1I3,1W3,2W3",
)
"""Of two workers with four stages in a V; two orders of the second one. Where stage 1 hands on a view of what it
received, W of stage 2 reads it after I of stage 1 and, in the second order, after its W too. The next receive of stage
1 is posted in between."""


def layout_in_orders(second: str, splits: Sequence[str], batch: int = 8) -> Layout:
    """Four micro-batches with this order of the second worker, the stages cut in front of these layers."""
    pipe = Pipe(workers=(0, 1, 1, 0), microbatches=(1,) * 4, ops=SPLIT)
    orders = [[parse_action(text) for text in order.split(",")] for order in (FIRST, second)]
    schedule = schedule_of("by hand", [pipe], orders)
    return Layout(batch=batch, stages=2, microbatches=4, orders=schedule, splits=tuple(splits))
