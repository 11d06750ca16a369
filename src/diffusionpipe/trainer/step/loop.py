"""The training loop of one rank.

    batch ──> feed ──> run the schedule ──> sums over all ranks ──> clip ──> optimizer ──> average
              (executor.store)  (gradients)  (norm², loss, votes)

Two small sums over all ranks carry everything that they must agree on at the end of a step: one the numbers from which
the update follows and the votes to save and to stop, the other all further votes. The host waits for the device there
and nowhere else; with `training.post_validation` it waits nowhere.

The device's own times of a step are known only once it has run, so the sum of the next step carries them
(`Stepper.take_times`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot, isfinite
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from diffusionpipe.errors import LossSpikeError
from diffusionpipe.ir import Phase
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.runtime.recording.trace import Recording
from diffusionpipe.trainer.optim.named_rates import LossRates
from diffusionpipe.trainer.optim.optimizer import set_learning_rates
from diffusionpipe.trainer.optim.prodigy import PATHS, SharedProdigy
from diffusionpipe.trainer.optim.undo import Backup
from diffusionpipe.trainer.recipe import OnSpike
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.host_sum import HostSum
from diffusionpipe.trainer.step.noise_scale import NoiseMeter, unmeasurable
from diffusionpipe.trainer.step.not_finite import NOTHING_UPDATED, NamesOf, bad_positions, not_finite
from diffusionpipe.trainer.step.spikes import Spikes
from diffusionpipe.trainer.step.step_result import StepResult, StepTimes
from diffusionpipe.trainer.step.stopping import Stopping
from diffusionpipe.trainer.step.trained_backbone import trained_backbone
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

UNCLIPPED_STEPS_BEFORE_OPTIMISM = 10
"""The number of steps in a row without clipping after which steps are post-validated (as in Qi et al.'s code)."""

MOST_SKIPPED = 10
"""The most spikes in a row that are skipped; the next one ends the run."""

_UPDATED = "; the backward has updated weights already, so resume from the last checkpoint"
"""The end of the message about a loss that is not finite, if parameters are stepped within the backward."""


class Saves(Protocol):
    """The methods of a checkpoint on its way to the disk that the steps call."""

    def vote(self) -> int:
        """The rank's vote to complete the asynchronous checkpoint that is being written.

        0 while it is written or if there is none, 1 when it is written, the number of ranks if writing has failed. All
        ranks complete it when the sum of their votes reaches the number of ranks.
        """
        ...

    def protect(self) -> None:
        """Waits until the weights are copied for the checkpoint, so that they may change."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """The outputs and the recorded times of one run of the schedule."""

    outputs: list[Output]
    """The tensors that no other stage reads, such as losses, by micro-batch."""
    recording: Recording
    """The times of this rank's actions."""
    before: Seconds = 0.0
    """The time of an earlier iteration that this one repeats, because its weights were taken back; 0 if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The time of this rank's iteration in a step, and the fraction of it that is not idle."""

    step: int
    """The number of the step, counted from 0."""
    busy: float
    """The fraction of the iteration in which the rank computed."""
    iteration: Seconds
    """The time of the iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsettled:
    """A step whose iteration is done and whose sums over all ranks have begun, but are not yet read."""

    step: int
    """The number of the step, counted from 0."""
    outputs: list[Output]
    """The tensors of the iteration that no other stage reads, such as losses."""
    sum: HostSum
    """Sums of squared norm and loss of each backbone, busy fraction of the step before, votes to save and to stop.

    Its further numbers are votes to draw and votes of `Saves`.
    """
    before: _Times | None
    """The times of the step before, if their busy fraction is in the sum."""
    is_updated: bool = False
    """Whether the optimizer has stepped already."""
    seconds: Seconds = 0.0
    """The host's time for the step."""
    noise: HostSum | None = None
    """Sums of the two numbers of the gradient noise scale; None if the step does not measure them."""


class Stepper:
    """Runs training steps on one rank: schedule, sum over all ranks, clipping, optimizer, average.

    A step is settled when the sums over all ranks are read and its result is known. Most steps are settled at once; a
    post-validated step is settled during the next one, see `post_validation`.
    """

    def __init__(
        self,
        session: Session,
        stopping: Stopping,
        names_of: NamesOf,
        spikes: Spikes | None = None,
        saves: Saves | None = None,
        loss_rates: LossRates | None = None,
    ) -> None:
        self._session = session
        self._saves = saves
        self._spikes = spikes or Spikes(OnSpike.NONE)
        self._loss_rates = loss_rates
        self._skipped_in_a_row = 0
        self._stopping = stopping
        self._names_of = names_of
        self._trained = [trained_backbone(session, backbone) for backbone in session.model.backbones]
        self._parameters = list(session.worker.parameters.values())
        self._backup = Backup(self._parameters, session.optimizer)
        self._prodigy = _shared_prodigy(session)
        self._unclipped = 0
        self._pending: _Unsettled | None = None
        self._untimed: tuple[int, _Iteration] | None = None
        """The last step, until a sum carries its times."""
        self._times: list[StepTimes] = []
        self._phases: list[str] = []
        every = session.recipe.training.noise_scale_every
        has_noise = session.worker.cut is None and unmeasurable(session.plan) is None
        self._noise_every = every if has_noise else None
        self._noise = NoiseMeter(session.worker, session.job.device) if self._noise_every else None

    def phases(self) -> tuple[Phase, ...]:
        """The times of the rank's work after the last iteration, such as clipping and optimizer; it waits for a GPU."""
        times = self._session.worker.train.recording.times_after()
        rank = self._session.job.membership.rank
        return tuple(
            Phase(worker=rank, name=name, start=start, end=end)
            for name, (start, end) in zip(self._phases, pairwise(times), strict=True)
        )

    def _end_phase(self, name: str) -> None:
        """Mark the present time as the end of the phase of this name; it began at the mark before."""
        self._session.worker.train.mark()
        self._phases.append(name)

    def step(self, step: int, inputs: dict[str, Tensor]) -> list[StepResult]:
        """Run step `step`, counted from 0, and return the results that are settled now, in order: none, one or two.

        `inputs` are the raw inputs of the samples that this rank encodes: of this step or, where the plan encodes
        ahead, of the next one.

        Raises:
            NonFiniteLossError: on all ranks, naming the step and the samples; nothing was updated, unless the optimizer
                steps within the backward.
            LossSpikeError: on all ranks, where the recipe stops at spikes, or after more than ten in a row.
            PeerError: another rank died.
        """
        started = perf_counter()
        if self._noise is not None:
            self._noise.watch(self._measures_noise(step))
        iteration = self._iterate(step, inputs)
        # The forwards and backwards above only read the weights, so a copy of them for a checkpoint ran beside them.
        # From here on they may change.
        if self._saves is not None:
            self._saves.protect()
        settled = self.settle()
        # The iteration above ran on weights that have just been taken back.
        if any(result.is_amended for result in settled):
            self._session.worker.train.rewind()
            # The lost iteration belongs to the time of the step.
            before = iteration.recording.busy()[1]
            iteration = replace(self._iterate(step, inputs), before=before)
        unsettled = self._start_sum(step, iteration)
        if self._is_optimistic:
            self._backup.keep()
            self._update(step)
            self._pending = replace(unsettled, is_updated=True, seconds=perf_counter() - started)
            return settled
        settled.append(replace(self._settle(unsettled), seconds=perf_counter() - started))
        return settled

    def take_times(self) -> list[StepTimes]:
        """The times of the steps that have become known since the last call, in the order of steps."""
        times, self._times = self._times, []
        return times

    def finish_times(self) -> None:
        """Sums the times of the last settled step over all ranks, so that `take_times` returns them too.

        Every rank calls it, and waits for its device.
        """
        times = self._own_times()
        if times is not None:
            device = self._session.job.device
            total = HostSum(torch.zeros(0, dtype=torch.float64, device=device), [times.busy])
            with self._session.job.progress.waiting():
                self._note_times(times, float(total.wait()[0]))

    def settle(self) -> list[StepResult]:
        """Settles the step that is not settled yet, so that the weights are final; returns its result, [] if none."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [self._settle(pending)]

    @property
    def _is_optimistic(self) -> bool:
        clips = any(one.clip_norm is not None for one in self._trained)
        return self._session.recipe.training.post_validation and (
            not clips or self._unclipped >= UNCLIPPED_STEPS_BEFORE_OPTIMISM
        )

    def _iterate(self, step: int, inputs: dict[str, Tensor]) -> _Iteration:
        worker = self._session.worker
        self._phases.clear()
        worker.reset_gradients()
        # The backward of this iteration updates the weights itself, so a copy for a checkpoint must be complete before
        # it, and the rates are set before it.
        if self._session.in_backward is not None:
            if self._saves is not None:
                self._saves.protect()
            self._set_rates(step)
            self._session.in_backward.begin(step)
        worker.feed(worker.train, inputs)
        # Each step by tokens chooses its executor, and the watchdog has to look at the one that runs.
        if worker.cut is not None:
            self._session.job.progress.executors = list(worker.executors.values())
        outputs = worker.train.run()
        return _Iteration(outputs=outputs, recording=worker.train.recording)

    def _own_times(self) -> _Times | None:
        """The rank's times of the last step; None if they were taken before. No wait if the step is settled."""
        if self._untimed is None:
            return None
        (step, iteration), self._untimed = self._untimed, None
        busy, seconds = iteration.recording.busy()
        return _Times(step=step, busy=busy / seconds if seconds else 0.0, iteration=iteration.before + seconds)

    def _note_times(self, own: _Times, busy: float) -> None:
        """Note the time of a step's iteration and its bubble; `busy`: the sum of all ranks' busy fractions."""
        bubble = 1 - busy / self._session.plan.mesh.num_ranks
        self._times.append(StepTimes(step=own.step + 1, iteration=own.iteration, bubble=bubble))

    def _start_sum(self, step: int, iteration: _Iteration) -> _Unsettled:
        """Start the sums over all ranks at the end of a step.

        They are the sums of squared norms, losses, the busy fractions of the step before, and votes.
        """
        device, outputs = self._session.job.device, iteration.outputs
        sums = [one.sums(outputs, device) for one in self._trained]
        if self._session.in_backward is not None:  # gradients are gone, and there is one backbone
            sums[0][0] += self._session.in_backward.squares
        saves, stops, draws = self._stopping.votes()
        saved = self._saves.vote() if self._saves is not None else 0
        before = self._own_times()
        # The busy share of the step before: the device may not have finished this one.
        numbers = [before.busy if before is not None else 0.0, saves, stops]
        total = HostSum(torch.cat(sums), numbers, further=[draws, saved])
        self._untimed = step, iteration
        # All ranks take part or none: it follows from the number of the step.
        noise = HostSum(self._noise.own(), []) if self._noise is not None and self._measures_noise(step) else None
        return _Unsettled(step=step, outputs=outputs, sum=total, before=before, noise=noise)

    def _measures_noise(self, step: int) -> bool:
        return self._noise_every is not None and (step + 1) % self._noise_every == 0

    def _settle(self, step: "_Unsettled") -> StepResult:
        """Wait for a step's sums, then clip, update and average; returns the step's result.

        An update that was made before the sums stays if it was right. It is taken back if the step is a spike, and
        taken back and made again if gradients have to be clipped.

        Raises:
            NonFiniteLossError: on all ranks, a loss or norm is not finite.
            LossSpikeError: on all ranks, as in `step`.
        """
        session = self._session
        with session.job.progress.waiting():
            total = step.sum.wait()
        draws, saving_votes = map(int, step.sum.further())
        *_, busy, saves, stops = total.tolist()
        if step.before is not None:
            self._note_times(step.before, busy)
        self._end_phase("sum over all ranks")
        sums = self._sums(total)
        batch = session.plan.batch
        rates = 1.0 if self._loss_rates is None else self._loss_rates.factor
        results = [one.result(step.step, own, batch, rates) for one, own in zip(self._trained, sums, strict=True)]
        broken = next((one for one in results if not (isfinite(one.loss) and isfinite(one.norm))), None)
        if broken is not None:
            # The update was taken before its gradients were seen to be broken.
            if step.is_updated:
                self._backup.restore()
            bad = bad_positions(session, self._trained, step.outputs, broken)
            consequence = NOTHING_UPDATED if session.in_backward is None else _UPDATED
            raise not_finite(session, step.step, self._names_of, broken, bad, consequence)
        loss, norm = sum(one.loss for one in results), hypot(*(one.norm for one in results))
        spike = self._spikes.judge(loss, norm)
        # On the host here, where the sums have arrived anyway; `_clip` computes them again on the device.
        factors = [one.factor(own) for one, own in zip(self._trained, sums, strict=True)]
        is_clipped = spike is not None or any(factor is not None and float(factor) < 1 for factor in factors)
        # An update without clipping was right if nothing had to be clipped.
        is_amended = step.is_updated and is_clipped
        if is_amended:
            self._backup.restore()
        self._skipped_in_a_row = 0 if spike is None else self._skipped_in_a_row + 1
        if spike is not None:
            self._skip(step.step, spike)
        elif not step.is_updated or is_amended:
            self._clip(self._sums(step.sum.total))
            self._update(step.step)
        self._unclipped = 0 if is_clipped else self._unclipped + 1
        # After the update: this loss decides the rates of the next one. A skipped loss decides nothing.
        if self._loss_rates is not None and spike is None:
            self._loss_rates.note(loss)
        # An update that was taken early is averaged only here, because it might have been taken back.
        if session.ema is not None and spike is None:
            session.ema.update(step.step)
            self._end_phase("average")
        return StepResult(
            step=step.step + 1,
            loss=loss,
            gradient_norm=norm,
            learning_rate=results[0].learning_rate,
            backbones=tuple(results),
            seconds=step.seconds,
            decision=self._stopping.decision((int(saves), int(stops), draws)),
            is_amended=is_amended,
            is_skipped=spike is not None,
            saving_votes=saving_votes,
            distance_rate=None if self._prodigy is None else self._prodigy.rate,
            noise=_pair(step.noise.wait()) if step.noise is not None else None,
        )

    def _sums(self, total: Tensor) -> tuple[Tensor, ...]:
        """(squared norm, loss) of each backbone, as tensors (2,), from the vector of a step's sum."""
        found: tuple[Tensor, ...] = total[: 2 * len(self._trained)].split(2)
        return found

    def _clip(self, sums: Sequence[Tensor]) -> None:
        """Clip the gradients of each backbone that the recipe clips, by its sums (squared norm, loss).

        The sums are on the device, so that the host waits for no factor.
        """
        factors = [one.factor(own) for one, own in zip(self._trained, sums, strict=True)]
        for one, factor in zip(self._trained, factors, strict=True):
            if factor is not None:
                one.clip(factor)
        if any(factor is not None for factor in factors):
            self._end_phase("clip")

    def _skip(self, step: int, spike: str) -> None:
        """Log that a step was skipped, or end the run, because it was a spike; `spike`: the reason.

        Raises:
            LossSpikeError: the recipe stops at spikes, or too many steps in a row were skipped.
        """
        if self._spikes.reaction is OnSpike.STOP or self._skipped_in_a_row > MOST_SKIPPED:
            many = f", after {MOST_SKIPPED} skipped steps in a row" if self._spikes.reaction is OnSpike.SKIP else ""
            raise LossSpikeError(
                f"step {step + 1}: {spike}{many}; nothing was updated.\n"
                "Lower optimizer.learning_rate or training.clip_norm, or set training.on_spike to another value."
            )
        if self._session.is_first:
            logger.warning('step=%d skipped_step=True reason="%s"', step + 1, spike)

    def _set_rates(self, step: int) -> float:
        """Set the optimizer's learning rates for an update; returns the highest of them."""
        factor = 1.0 if self._loss_rates is None else self._loss_rates.factor
        rates = [{name: factor * rate for name, rate in one.rates_at(step).items()} for one in self._trained]
        set_learning_rates(self._session.optimizer, {group: rate for of in rates for group, rate in of.items()})
        return max(rate for of in rates for rate in of.values())

    def _update(self, step: int) -> None:
        """Set the learning rates and step the optimizer, unless the backward has stepped the parameters."""
        if self._session.in_backward is None:
            highest = self._set_rates(step)
            if self._prodigy is not None:
                self._prodigy.step(highest)
            elif self._session.optimizer is not None:
                self._session.optimizer.step(step)
        self._end_phase("optimizer")


def _shared_prodigy(session: Session) -> SharedProdigy | None:
    """The object that steps Prodigy with its sums over all ranks; None if the recipe has another optimizer."""
    if session.recipe.optimizer.name not in PATHS:
        return None
    # A rank may train nothing; it still takes part in the sums.
    (own,) = session.optimizer.parts if session.optimizer is not None else (None,)
    owned = [p for name, p in session.worker.parameters.items() if name in session.worker.owned]
    return SharedProdigy(own, owned, lambda terms: HostSum(terms, []).wait(), session.job.device)


def _pair(total: Tensor) -> tuple[float, float]:
    square, trace = total.tolist()
    return square, trace
