"""Event files of TensorBoard: numbers, pictures with their prompts, and the recipe."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffusionpipe.trainer.reporting.tracker import LoggedImage


class TensorBoard:
    """A tracker that writes TensorBoard's event files; it hides steps that a resumed run repeats."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        """Open an event file in the folder. `resume_step` is the last step that a resumed run has done, else None."""
        from torch.utils.tensorboard import SummaryWriter

        _wait_for_a_later_name(folder)
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        self._first_step = resume_step or 0
        self._has_captions = False

    def describe(self, recipe: str, values: Mapping[str, object]) -> None:
        """Records the recipe as a text, under the step at which this part of the run begins."""
        self._writer.add_text("recipe", f"```toml\n{recipe}\n```", self._first_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records each number of a step as a scalar under its tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def pictures(self, step: int, shown: Sequence[LoggedImage]) -> None:
        """Records each picture under its file's name, and at the first call also a list of the captions in full."""
        if not self._has_captions:
            lines = (f"- `{one.name}`: {one.caption}" for one in shown)
            self._writer.add_text("samples/captions", "\n".join(lines), step)
            self._has_captions = True
        for one in shown:
            self._writer.add_image(f"samples/{one.name}", one.picture, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, under a second, until a new event file's name comes after the names that are there.

    TensorBoard reads a folder's event files in the order of their names, which begin with the second of their making
    (events.out.tfevents.1795311368.host.pid.count); within one second process numbers would decide the order.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(1 - time.time() % 1)
