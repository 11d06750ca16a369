"""Random candidates of small settings, and the plans that they are."""

from dataclasses import dataclass
from random import Random

from planner import synthetic

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.holding import DEVICE, HOST
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.structure import generated
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.schedules import REGISTRY

FAMILIES = tuple(sorted(REGISTRY))
PATTERNS = ((), ("*",), ("layer[147]",))
"""Layers that are recomputed."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A candidate and its plan."""

    setting: Setting
    candidate: Candidate
    proposal: Proposal


def planned(random: Random, families=FAMILIES, *, has_replicas=True, is_sharded=False) -> Planned:
    """A candidate of one of the families that can be planned, its frozen work in bubbles or in front of them."""
    while True:
        p, m, d = random.choice((2, 3, 4)), random.choice((1, 2, 4, 6)), 2 if is_sharded else random.choice((1, 1, 2))
        replicas = tuple(random.choice((1, 1, 2)) if has_replicas else 1 for _ in range(p))
        profile = synthetic.chain(
            [random.randint(1, 9) / 10 for _ in range(12)],
            parameters=[random.randint(1, 900) for _ in range(12)],
            frozen=random.choice((0.1, 0.5)),
        )
        batch = d * m * random.choice((2, 4))
        setting = Setting(
            profile=synthetic.with_casts(profile, seconds=0.01, num_bytes=20),
            cluster=synthetic.cluster(sum(replicas) * d),
            workload=synthetic.workload(
                batch,
                ema=random.choice((0, 4)),
                has_backup=random.random() < 0.3,
                checkpointed=random.choice(PATTERNS),
                encoders=HOST if random.random() < 0.2 else DEVICE,
            ),
        )
        name = random.choice(families)
        try:
            num_blocks = 1 + max(stage.weights for stage in generated(name, p, m, 2).placement.stages)
            candidate = Candidate(
                arrangement=Arrangement(data_parallel=d, units=sum(replicas)),
                schedule=name,
                microbatches=m,
                starts=(0, *sorted(random.sample(range(1, 12), num_blocks - 1))),
                replicas=replicas,
                buckets=random.choice((1, 1, 2)),
                sharded=Sharded.ALL if is_sharded else Sharded.NONE,
            )
            filler = random.choice((None, filler_of(setting)))
            proposal = propose(setting, candidate.layout(setting), filler)
        except (ConfigError, ScheduleError, ValueError):
            continue
        return Planned(setting=setting, candidate=candidate, proposal=proposal)
