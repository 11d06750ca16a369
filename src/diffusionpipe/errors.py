"""Every error that DiffusionPipe raises on purpose.

    DiffusionPipeError
    ├── ConfigError            the user can fix it: recipe, arguments, sizes
    │   ├── RecipeError        a key, value or combination of the recipe
    │   ├── DataError          the folder of pictures and captions
    │   ├── ModelError         the model's folder, class or weights
    │   ├── CheckpointError    a checkpoint that is missing, truncated, altered or of another run
    │   └── FileFormatError    a plan, schedule, profile, cluster or timeline file cannot be read
    ├── ScheduleError          an order of actions is illegal
    ├── TrainingError          the weights, the loss or the learning rate: training cannot continue
    │   ├── NonFiniteLossError     a loss is NaN or infinite
    │   ├── NonFiniteWeightsError  a weight is NaN or infinite
    │   └── LossSpikeError         a loss or a gradient norm is far above those before
    └── PeerError              another rank died or stopped; this rank ends too

The command line prints each of these as one block without a traceback and exits with status 2 (`PeerError` and
`TrainingError`: status 1). Any error that is not in this tree is a bug.
"""

from collections.abc import Sequence


class DiffusionPipeError(Exception):
    """The root of the tree."""


class ConfigError(DiffusionPipeError):
    """Something that the user can fix; the message says how."""

    is_common = False
    """Whether all ranks have raised it alike, so that no rank is to be named."""


class RecipeError(ConfigError):
    """A key, a value or a combination in the recipe."""


class DataError(ConfigError):
    """The folder of pictures and captions."""


class ModelError(ConfigError):
    """The model's folder, class, configuration or weights."""


class CheckpointError(ConfigError):
    """A checkpoint is missing, truncated, altered, or belongs to another run."""


class ScheduleError(DiffusionPipeError):
    """An order of actions is illegal; `problems` names every one found, with worker and action."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class FileFormatError(ConfigError):
    """A plan, schedule, profile, cluster or timeline file cannot be read."""


class TrainingError(DiffusionPipeError):
    """Training cannot continue: the weights, the loss or the learning rate. All ranks raise it alike."""


class NonFiniteLossError(TrainingError):
    """The loss is NaN or infinite; the message names the step and the samples."""


class NonFiniteWeightsError(TrainingError):
    """A weight is NaN or infinite; nothing was saved."""


class LossSpikeError(TrainingError):
    """The loss or the gradient norm is far above its values in the steps before; nothing was updated."""


class PeerError(DiffusionPipeError):
    """Another rank died or stopped; this rank ends too. The message names the other rank."""
