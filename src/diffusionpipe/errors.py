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
    """The base class of every error that DiffusionPipe raises on purpose."""


class ConfigError(DiffusionPipeError):
    """A problem that the user can fix, as in a recipe, an argument or a size; the message says how."""

    is_common = False
    """Whether all ranks have raised the same error, so that its report names no rank."""


class RecipeError(ConfigError):
    """A key, a value or a combination in the recipe is wrong."""


class DataError(ConfigError):
    """The folder of pictures and captions cannot be used as it is."""


class ModelError(ConfigError):
    """The model's folder, class, configuration or weights cannot be used as they are."""


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
    """Training cannot continue because of the weights, the loss or the learning rate. All ranks raise it alike."""


class NonFiniteLossError(TrainingError):
    """The loss is NaN or infinite; the message names the step and the samples."""


class NonFiniteWeightsError(TrainingError):
    """A weight is NaN or infinite; nothing was saved."""


class LossSpikeError(TrainingError):
    """The loss or the gradient norm is far above its values in the steps before; nothing was updated."""


class PeerError(DiffusionPipeError):
    """Another rank died or stopped; this rank ends too. The message names the other rank."""
