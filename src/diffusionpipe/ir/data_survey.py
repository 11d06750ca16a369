"""The facts about a run's training data, which are printed before step 1 and kept in its folder, survey.json."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named text about the training data, and whether it is a warning."""

    name: str
    text: str
    is_warning: bool = False
    """Whether the fact is probably not as the user wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSize:
    """One size at which samples are trained, with the number of its samples and the part that is cut away."""

    size: str
    """Width and height in pixels, of clips the frames too, e.g. "768 x 512"."""
    samples: int
    """The number of different samples of this size."""
    visits: int
    """The number of visits of its samples in a cycle of epochs; shares of a training are shares of visits."""
    cut: float | None
    """Mean share of a sample that is cut away, 0 to 1; None where the sizes of the files are not known."""
    enlarged: float | None
    """The largest factor by which a sample is enlarged, below 1 where none is; None where the sizes are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts about the training data of a run: lines to print, further lines to keep, and the sizes in use."""

    lines: tuple[Line, ...]
    further: tuple[Line, ...]
    """The lines that are kept and not printed: the lengths of captions."""
    sizes: tuple[TrainedSize, ...]
    """The sizes that have samples, in the order of the rules for sizes."""
