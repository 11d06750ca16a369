"""The predicted timeline beside a plan file: plan.json has plan.timeline.json."""

import logging
from pathlib import Path

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir import Plan, Timeline
from diffusionpipe.ir.files import read_timeline, write_timeline

logger = logging.getLogger(__name__)


def prediction_file(plan_file: Path) -> Path:
    """The file with the prediction of a plan file."""
    return plan_file.with_suffix(".timeline.json")


def write_prediction(timeline: Timeline, plan_file: Path) -> Path:
    """Put the timeline beside the plan file; its path."""
    path = prediction_file(plan_file)
    write_timeline(timeline, path)
    return path


def read_prediction(plan_file: Path, plan: Plan) -> Timeline | None:
    """The prediction beside a plan file; None, with a warning, if it is not one of this plan's training iteration."""
    path = prediction_file(plan_file)
    if not path.exists():
        return None
    try:
        timeline = read_timeline(path)
    except FileFormatError as error:
        logger.warning("prediction=%s drawn=False reason=%s", path, error)
        return None
    if {(span.worker, span.action) for span in timeline.spans} != set(plan.train.actions()):
        logger.warning("prediction=%s drawn=False reason=of_another_plan", path)
        return None
    return timeline
