"""The plain data of a rank's work: actions, placements, schedules, fills, plans, timelines.

Frozen, with file formats.
"""

from diffusionpipe.ir.action import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    RECV_OPS,
    SEND_OPS,
    STAGE_OPS,
    Action,
    Op,
    compute_action,
    parse_action,
)
from diffusionpipe.ir.placement import WHOLE, Edge, Pipeline, Placement, Range, Share, Stage
from diffusionpipe.ir.plan import Mesh, Plan, PlanPhase, Sharded, sampling_phase
from diffusionpipe.ir.schedule import Fill, Message, Schedule
from diffusionpipe.ir.timeline import MemorySample, Phase, Span, Timeline

__all__ = [
    "COMPUTE_OPS",
    "MESSAGE_OPS",
    "RECV_OPS",
    "SEND_OPS",
    "STAGE_OPS",
    "WHOLE",
    "Action",
    "Edge",
    "Fill",
    "MemorySample",
    "Mesh",
    "Message",
    "Op",
    "Phase",
    "Pipeline",
    "Placement",
    "Plan",
    "PlanPhase",
    "Range",
    "Schedule",
    "Sharded",
    "Share",
    "Span",
    "Stage",
    "Timeline",
    "compute_action",
    "parse_action",
    "sampling_phase",
]
