"""`dp.run`: a plan's ranks at work on a model."""

import atexit
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from diffusionpipe.errors import CheckpointError, ConfigError, PeerError
from diffusionpipe.ir import Plan
from diffusionpipe.ir import Timeline as Spans
from diffusionpipe.ir.files import read_timeline, write_timeline
from diffusionpipe.library.checks import check_plan, check_ranks
from diffusionpipe.library.crews import GUARD, Crew, Processes, Threads, TorchrunRank
from diffusionpipe.library.environment import place_in_job
from diffusionpipe.library.models import Model, aliases
from diffusionpipe.library.notebook import shown_run
from diffusionpipe.library.profiles import precision_of
from diffusionpipe.library.saves import Index, begin, finish, read_index, saves, unfinished
from diffusionpipe.library.timelines import Timeline
from diffusionpipe.runtime.recording.clocks import RankTrace, timeline_of
from diffusionpipe.workflows.report.metrics import Metrics

THREADS, PROCESSES = "threads", "processes"
_TIMELINE = "timeline.json"


class Run:
    """The ranks of a plan, started to train copies of a model's layers. Mutable: close it, or use it in a `with` block.

    Under torchrun each process has the run, calls the same methods in the same order, and holds one rank.
    """

    def __init__(self, model: Model, plan: Plan, crew: Crew) -> None:
        self._model, self._plan, self._crew = model, plan, crew
        self._over: BaseException | None = None
        self._kind = ""
        self._clip: float | None = None
        self._known: Spans | None = None
        """The timeline of the save from which the run was resumed; after `close`, the timeline of the last step."""
        self._metrics, self._done = Metrics(), 0
        """Loss and time of each step, and the number of steps that are done."""
        # Processes must not outlive a program that does not close its run.
        atexit.register(self._end)

    # Training.

    def optimizer(self, cls: type[torch.optim.Optimizer], *, clip_norm: float | None = None, **options: Any) -> None:
        """Make an optimizer, with whose update each `step` then ends; each rank updates the parameters that it holds.

        Args:
            cls: a class of torch.optim, or another one that treats each parameter by itself.
            clip_norm: the norm to which longer gradients of the whole model are shortened; None: no limit.
            options: arguments of the class besides the parameters.

        Raises:
            ConfigError: the class is not such an optimizer, or does not take these options.
        """
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ConfigError(
                f"{cls!r} is not an optimizer; give a class of torch.optim, such as AdamW, and its options by name"
            )
        if issubclass(cls, torch.optim.LBFGS):
            raise ConfigError("LBFGS calls the model again within a step; use an optimizer that needs gradients alone")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"clip_norm={clip_norm}: give a number above 0, or leave it out")
        try:
            # A trial on a small matrix: wrong options are refused here and not on each rank.
            cls([torch.nn.Parameter(torch.zeros(2, 2))], **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{cls.__name__}: {error}; change its options") from None
        self._here("set_optimizer", cls, clip_norm, options)
        self._kind = cls.__name__

    def set(self, **options: Any) -> None:
        """Change options of the optimizer, such as lr, from the next step on.

        Raises:
            ConfigError: there is no optimizer.
        """
        if not self._kind:
            raise ConfigError("there is no optimizer; call run.optimizer first")
        self._here("set_options", options)

    def step(self, *batch: Tensor) -> float:
        """Train on a batch: forward, backward and, with an optimizer, its update; returns the mean loss of the forward.

        `batch`: the tensors of the model's example, in its order, for as many samples as the plan's batch.

        Raises:
            ConfigError: the batch has another size than the plan, or other tensors than the model's example.
        """
        named = self._model.batch(batch)
        if len(batch[0]) != self._plan.batch:
            raise ConfigError(
                f"a batch of {len(batch[0])} samples, but the plan is for {self._plan.batch}; give as many, or plan "
                f"for batch={len(batch[0])}"
            )
        began = time.perf_counter()
        found: float = self._here("step", named)[0]
        self._done += 1
        self._metrics.add({"step": self._done, "loss": found, "step_s": time.perf_counter() - began})
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Name in `model.named_parameters()` -> whole gradient of the last step, after clipping, on the CPU."""
        return self._whole("gradients")

    def evaluate(self, *batch: Tensor) -> float:
        """The mean loss of any number of samples, without gradients; `batch`: the tensors of the model's example."""
        found: float = self._here("evaluate", self._model.batch(batch))[0]
        return found

    def predict(self, *inputs: Tensor) -> Tensor:
        """The outputs of the last layer for any number of samples, given all tensors of a batch but the target."""
        found: Tensor = self._here("predict", self._model.batch(inputs, has_target=False))[0]
        return found

    @property
    def rows(self) -> range:
        """The positions in the batch of the samples that `step` reads in this process; others may hold any values."""
        found = self._here("rows")
        return found[0] if len(found) == 1 else range(self._plan.batch)

    def state_dict(self) -> dict[str, Any]:
        """Name in `model.state_dict()` -> CPU copy of each parameter, trained up to now, and of each buffer."""
        state = {name: value.detach().cpu().clone() for name, value in self._model.state_dict().items()}
        trained = self._whole("parameters")
        first = aliases(self._model)
        return {name: trained.get(first.get(name, name), value) for name, value in state.items()}

    # Saves.

    def save(self, folder: str | os.PathLike[str], step: int) -> None:
        """Save parameters, optimizer states and the last timeline, so that a run can resume from here.

        `step`: the number of steps that are done, which names the save. `folder`: the folder of all saves.

        A folder keeps the last two saves. With several processes it must be on a file system that all of them see.

        Raises:
            ConfigError: `step` is not a number of steps.
            CheckpointError: the folder cannot be written.
        """
        place = Path(folder)
        if not isinstance(step, int) or step < 0:
            raise ConfigError(f"step={step!r}: give the number of steps that are done")
        timeline = self._measured()
        if self._crew.speaks:
            begin(place, step)
        self._here("barrier")
        self._here("save", unfinished(place, step))
        self._here("barrier")
        if self._crew.speaks:
            if timeline is not None:
                write_timeline(timeline, unfinished(place, step) / _TIMELINE)
            finish(place, Index(step=step, num_ranks=self._plan.mesh.num_ranks, optimizer=self._kind))
        self._here("barrier")

    def resume(self, folder: str | os.PathLike[str]) -> int:
        """Resume from the newest save in a folder, of any layout; returns its number of steps, 0 if there is no save.

        Raises:
            CheckpointError: the save is damaged, or belongs to another model or another optimizer.
        """
        found = saves(Path(folder))
        step = int(self._here("agreed", max(found, default=0))[0])
        if not step:
            return 0
        if step not in found:
            raise CheckpointError(
                f"{folder}: rank 0 found a save of step {step}, which is not here; use a shared folder"
            )
        index = read_index(found[step])
        if index.optimizer != self._kind:
            saved = index.optimizer or "no optimizer"
            raise CheckpointError(
                f"{found[step]}: was saved with {saved}, and the run has {self._kind or 'none'}; call run.optimizer "
                "with the same class before run.resume, or give another folder"
            )
        self._here("load", found[step])
        if (found[step] / _TIMELINE).is_file():
            self._known = read_timeline(found[step] / _TIMELINE)
        self._done = step
        return step

    # What people see.

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print the values as Python's `print` does, but only in one of the processes that run the program."""
        if self._crew.speaks:
            sys.stdout.write(sep.join(map(str, values)) + end)
            sys.stdout.flush()

    def timeline(self) -> Timeline:
        """The measured timeline of the last step on all ranks; before the first step, the timeline of the resumed save.

        Raises:
            ConfigError: there was no step yet, and no save with a timeline of as many ranks.
        """
        spans = (None if self._over else self._measured()) or self._known
        if spans is None or spans.num_workers != self._plan.mesh.num_ranks:
            raise ConfigError("no step has been measured yet; call run.step first")
        return Timeline(self._plan.train, spans)

    def _repr_html_(self) -> str:
        return shown_run(self._plan, self._shown_timeline(), self._metrics)

    def _shown_timeline(self) -> Spans | str:
        # Under torchrun the timeline is asked of all ranks together, and one cell alone would wait for them.
        if isinstance(self._crew, TorchrunRank):
            return "the ranks are processes of torchrun; call run.timeline on all of them"
        try:
            return self.timeline().spans
        except (ConfigError, PeerError) as error:
            return str(error)

    def _measured(self) -> Spans | None:
        traces: list[RankTrace | None] = self._everywhere("trace")
        found = [trace for trace in traces if trace is not None]
        if len(found) < len(traces):
            return None
        return timeline_of(self._plan.mesh, self._plan.train, found)

    # The ranks.

    def _here(self, name: str, *arguments: Any) -> list[Any]:
        return self._asked(self._crew.here, name, arguments)

    def _everywhere(self, name: str, *arguments: Any) -> list[Any]:
        return self._asked(self._crew.everywhere, name, arguments)

    def _asked(self, ask: Callable[..., list[Any]], name: str, arguments: tuple[Any, ...]) -> list[Any]:
        if self._over is not None:
            raise PeerError(f"the run has ended ({self._over or type(self._over).__name__}); start another one")
        try:
            return ask(name, *arguments)
        except BaseException as error:
            self._over = error
            raise

    def _whole(self, name: str) -> dict[str, Tensor]:
        """Name -> gradient or trained parameter, from all ranks; `name`: "gradients" or "parameters".

        They are in the order of the model's parameters.
        """
        found: dict[str, Tensor] = {}
        for part in self._everywhere(name):
            found |= part
        return {known: found[known] for known, _ in self._model.named_parameters() if known in found}

    def close(self, error: BaseException | None = None) -> None:
        """End the ranks. Afterwards only `timeline` works, for the last step, but not under torchrun.

        `error`: the reason, if it is not a normal end.
        """
        # Under torchrun all ranks would have to ask together, and this one may be alone here.
        if error is None and self._over is None and not isinstance(self._crew, TorchrunRank):
            with suppress(PeerError):  # a rank that has died has no timeline, and the run ends all the same
                self._known = self._measured() or self._known
        self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        atexit.unregister(self._end)
        crew, self._crew = self._crew, _Closed()
        self._over = self._over or ConfigError("it was closed")
        crew.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


class _Closed:
    """The crew of a run that was closed: it has no ranks."""

    speaks = False

    def here(self, name: str, *arguments: Any) -> list[Any]:
        """Return the results of no rank, []; see `Crew`."""
        return []

    everywhere = here

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing, because there is no rank to end; see `Crew`."""


def run(
    model: Model | Callable[[], Model], plan: Plan, *, ranks: str | None = None, precision: str | None = None
) -> Run:
    """Start the ranks of a plan; returns a `Run`, which trains a copy of the model.

    Args:
        model: from `dp.pipeline`; for "processes" a function of an importable module that returns it, which every
            process calls.
        plan: the `plan` of a `dp.plan`, for this model.
        ranks: "threads" of this process, or "processes" that this one starts; None: the processes of torchrun, if it
            has started this one, else threads.
        precision: "bfloat16" to compute under autocast; None: in the dtype of the parameters.

    Raises:
        ConfigError: the plan is for another model or another number of ranks.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"dp.run takes a plan, not a {type(plan).__name__}; give the .plan of what dp.plan returns")
    if ranks not in (None, THREADS, PROCESSES):
        raise ConfigError(f'ranks={ranks!r}: use "{THREADS}" or "{PROCESSES}", or leave it out')
    if ranks == PROCESSES:
        return _in_processes(model, plan, precision)
    if not isinstance(model, Model):
        raise ConfigError(f"dp.run takes a model, not a {type(model).__name__}; make one with dp.pipeline")
    check_plan(model, plan)
    member = place_in_job() if ranks is None else None
    if member is not None:
        check_ranks(plan, member.world_size)
        return Run(model, plan, TorchrunRank(model, plan, precision or precision_of(model), member))
    return Run(model, plan, Threads(model, plan, precision or precision_of(model)))


def _in_processes(build: Model | Callable[[], Model], plan: Plan, precision: str | None) -> Run:
    if isinstance(build, Model) or not inspect.isfunction(build):
        raise ConfigError(
            'ranks="processes" takes a function that returns the model, because each process makes its own; give one '
            "from a module that can be imported"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # this process reads its parent's script
        raise ConfigError(GUARD)
    if build.__module__ == "__main__" or "<" in build.__qualname__:
        raise ConfigError(
            f"{build.__qualname__} of {build.__module__} cannot be imported by other processes; define it at the top "
            "level of a module of its own"
        )
    model = build()
    if not isinstance(model, Model):
        raise ConfigError(f"{build.__qualname__} returned a {type(model).__name__}; return what dp.pipeline makes")
    check_plan(model, plan)
    return Run(model, plan, Processes(build, plan, precision))
