"""Simulates the layouts that other systems' planners choose, as those systems run them: encoders first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Plan, Sharded
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.pricing.collectives import all_gather
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.guesses import PlannerEstimate
from diffusionpipe.planner.rivals.planners import PLANNERS, Planner, choices_of
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.naming import sizes_of
from diffusionpipe.planner.search.proposal import Proposal, exposed_frozen_time, pricing_of, propose
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A layout that another system's planner chooses, with its formula's time and its simulation."""

    planner: Planner
    setting: Setting
    """The setting of the simulation; its batch may be a little larger than the asked one, see `scale`."""
    candidate: Candidate
    formula: Seconds
    """Seconds of an iteration without encoders and update, as the system's planner predicts it."""
    proposal: Proposal
    scale: float
    """The asked batch divided by the simulated batch: below 1 if replicas cannot share the asked batch."""
    remark: str = ""
    """A sentence on what the other system would do here and DiffusionPipe cannot."""

    @property
    def sizes(self) -> str:
        """The sizes of the other system's layout in words."""
        return sizes_of(self.candidate) + (self.setting.workload.encoders.words)

    @property
    def step(self) -> Seconds:
        """The seconds of a step for the asked batch: encoders, iteration and update."""
        return self.scale * self.proposal.iteration + self.proposal.update

    @property
    def encoding(self) -> Seconds:
        """The seconds of a step in which only encoders run."""
        return self.scale * self.proposal.exposed

    @property
    def pipeline(self) -> Seconds:
        """The seconds of the iteration without encoders, which the formula predicts."""
        return self.scale * self.proposal.iteration - self.encoding

    def plan(self, *, sample_batch: int = 0) -> Plan:
        """The layout as a plan that trains; `sample_batch`: samples drawn at a time, 0 for one per stage."""
        layout = replace(self.candidate.layout(self.setting), sample_batch=sample_batch)
        return build_plan(self.setting.graph, layout, pricing=pricing_of(self.setting))


def simulated(names: Sequence[str], setting: Setting) -> tuple[Rival, ...]:
    """The simulated layouts of these systems' planners, fastest first, ones that do not fit last.

    `names` are keys of `PLANNERS`. Systems that cannot share the batch are left out.
    """
    found = [one for name in names if (one := _rival(PLANNERS[name], setting))]
    return tuple(sorted(found, key=lambda one: (one.proposal.overflow > 0, one.step)))


def _rival(planner: Planner, setting: Setting) -> Rival | None:
    """The simulation of the first of a planner's choices that fits with all buffers; of the last if none fits.

    None if the planner has no layout.
    """
    found: Rival | None = None
    for guess in choices_of(planner, setting):
        found = _simulated(planner, guess, setting.workload.batch)
        if found.proposal.overflow <= 0:
            break
    return found


def _simulated(planner: Planner, guess: PlannerEstimate, batch: int) -> Rival:
    own = guess.judge.setting
    variants = [replace(guess.candidate, schedule=name) for name in planner.schedules or (guess.candidate.schedule,)]
    proposals = [(_proposal(own, candidate), candidate) for candidate in variants]
    proposal, candidate = min(proposals, key=lambda pair: (max(0, pair[0].overflow), pair[0].step))
    return Rival(
        planner=planner,
        setting=own,
        candidate=candidate,
        formula=guess.seconds,
        proposal=proposal,
        scale=batch / own.workload.batch,
        remark=guess.remark,
    )


def _proposal(setting: Setting, candidate: Candidate) -> Proposal:
    proposal = propose(setting, candidate.layout(setting))
    if candidate.sharded is not Sharded.ALL:
        return proposal
    costs = _in_equal_parts(proposal, setting)
    timeline = simulate(proposal.train, costs)
    return replace(proposal, costs=costs, timeline=timeline, exposed=exposed_frozen_time(timeline))


def _in_equal_parts(proposal: Proposal, setting: Setting) -> Costs:
    """The costs of a proposal if every rank holds an equal part of each block, as in FSDP.

    In our own plans each parameter has one owner.
    """
    mesh, costs, workload = proposal.mesh, proposal.costs, setting.workload
    ranks = range(mesh.num_ranks)
    unshards, reduces = [0.0] * len(costs.unshards), [0.0] * len(costs.reduces)
    for index, stage in enumerate(proposal.train.placement.stages):
        layers = () if proposal.train.placement.is_frozen(index) else proposal.blocks[stage.weights]
        own = setting.graph.parameters_of(layers)
        sizes = [setting.ledger.gathered(p, setting.profile.precision) for p in setting.graph.parameters
                 if p.name in own]  # fmt: skip
        casts = sum(workload.cast_time(setting.profile.layer(name)) for name in layers) / min(
            device.speed for device in setting.cluster.devices
        )
        unshards[index] = all_gather(setting.cluster, sum(sizes), ranks) + casts / len(ranks)
        gradients = setting.ledger.held(setting.graph.parameters_of(layers)).gradients
        reduces[index] = all_gather(setting.cluster, gradients, ranks)
    return replace(costs, unshards=tuple(unshards), reduces=tuple(reduces))
