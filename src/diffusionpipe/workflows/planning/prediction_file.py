"""The predicted timeline beside a plan file: plan.json has plan.timeline.json."""

import logging
from pathlib import Path

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir import Plan, Timeline
from diffusionpipe.ir.files import read_timeline, write_timeline

logger = logging.getLogger(__name__)


def prediction_file(plan_file: Path) -> Path:
    """The path of the file beside a plan file that holds its predicted timeline."""
    return plan_file.with_suffix(".timeline.json")


def write_prediction(timeline: Timeline, plan_file: Path) -> Path:
    """Write the timeline into the file beside the plan file; returns its path."""
    path = prediction_file(plan_file)
    write_timeline(timeline, path)
    return path


def read_prediction(plan_file: Path, plan: Plan) -> Timeline | None:
    """The predicted timeline in the file beside a plan file; None if there is none.

    A file that is not the prediction of this plan's training iteration gives a warning, and None.
    """
    path = prediction_file(plan_file)
    if not path.exists():
        return None
    try:
        timeline = read_timeline(path)
    except FileFormatError as error:
        logger.warning("prediction=%s drawn=False reason=%s", path, error)
        return None
    # A prediction is of this plan if it runs the same actions on the same workers.
    if {(span.worker, span.action) for span in timeline.spans} != set(plan.train.actions()):
        logger.warning("prediction=%s drawn=False reason=of_another_plan", path)
        return None
    return timeline
