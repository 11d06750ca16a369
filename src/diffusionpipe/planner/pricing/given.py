"""The sizes that a user gives, which the search keeps to while it chooses the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Sharded
from diffusionpipe.schedules import REGISTRY, generator_of, is_published
from diffusionpipe.schedules.building.branches import GRAPHPIPE
from diffusionpipe.schedules.several.opposed import JOINT
from diffusionpipe.schedules.traits import can_shard, holds_blocks_once, is_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The sizes that a search must keep to; None leaves a size to it."""

    stages: int | None = None
    """The number of stages, each on one rank: the search then makes no replicas."""
    microbatches: int | None = None
    schedule: str | None = None
    data_parallel: int | None = None
    """Copies of the whole pipeline."""
    sharded: Sharded | None = None
    """The things that data-parallel copies hold in parts; None allows all choices."""
    encoders: str | None = None
    """The storage in which the frozen part's weights rest, by its name; None allows all."""

    @property
    def is_sharded(self) -> bool:
        """Whether copies have to hold something in parts."""
        return self.sharded not in (None, Sharded.NONE)

    def allows(self, *, units: int, data_parallel: int) -> bool:
        """Whether `data_parallel` pipelines of `units` ranks each keep to the given sizes."""
        return self.stages in (None, units) and self.data_parallel in (None, data_parallel)

    @property
    def allows_chains(self) -> bool:
        """Whether the given sizes allow a schedule with one stage on each worker."""
        return self.schedule is None or is_chain(self.schedule)


NOTHING = Given()


def check_given(given: Given, *, batch: int, num_ranks: int, num_backbones: int = 1) -> None:
    """Raise an error if no plan can keep to these sizes, before anything is profiled; return None otherwise.

    Raises:
        ConfigError: the sizes do not fit each other, the ranks or the batch; all problems are listed.
    """
    problems = list(_all_problems(given, batch, num_ranks, num_backbones))
    if problems:
        raise ConfigError("\n".join(problems))


def is_possible(given: Given, *, batch: int, num_ranks: int, num_backbones: int = 1) -> bool:
    """Whether `check_given` accepts these sizes."""
    return not any(_all_problems(given, batch, num_ranks, num_backbones))


def _all_problems(given: Given, batch: int, num_ranks: int, num_backbones: int) -> Iterator[str]:
    yield from _problems_of_schedule(given, num_backbones)
    yield from _problems(given, batch, num_ranks)


def _problems_of_schedule(given: Given, num_backbones: int) -> Iterator[str]:
    if given.schedule is None:
        return
    if num_backbones > 1:
        if given.schedule not in JOINT:
            yield (
                f"the schedule {given.schedule!r} has one model: for several the search compares {' and '.join(JOINT)} "
                "with one after the other; set schedule to one of these two, or leave it out"
            )
        elif given.sharded is Sharded.ALL:
            yield (
                f"the schedule {given.schedule!r} has both models on several stages, but sharded copies run one model "
                "after the other; leave out schedule or sharded"
            )
        return
    try:
        generator_of(given.schedule)
    except ConfigError as error:
        yield str(error)
        return
    if given.schedule not in REGISTRY and given.schedule != GRAPHPIPE:
        origin = "has groups of its own" if is_published(given.schedule) else "comes from a package"
        yield (
            f"the schedule {given.schedule!r} {origin}, and the search compares the published ones: give "
            "stages and micro-batches too, without a search, or leave out schedule"
        )
        return
    if given.sharded is Sharded.OPTIMIZER and not holds_blocks_once(given.schedule):
        yield refusal(Feature.SHARDED, Feature.TWO_DIRECTIONS, schedule=given.schedule)
    if given.sharded is Sharded.ALL and not can_shard(given.schedule):
        yield (
            f"the schedule {given.schedule!r} has no order for sharded copies, each of which holds the whole model; "
            "set schedule to 1f1b or gpipe, or leave out schedule or sharded"
        )


def _problems(given: Given, batch: int, num_ranks: int) -> Iterator[str]:
    groups = [copies for copies in range(1, num_ranks + 1) if num_ranks % copies == 0]
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    allowed = [c for c in groups if given.allows(units=num_ranks // c, data_parallel=c)]
    if not allowed:
        wanted = [f"{given.stages} stages"] if given.stages else []
        wanted += [f"{given.data_parallel} data-parallel copies"] if given.data_parallel else []
        least = (given.stages or 1) * (given.data_parallel or 1)
        yield (
            f"{ranks} cannot form pipelines of {' and '.join(wanted)}; start "
            f"{least if given.stages and given.data_parallel else f'a multiple of {least}'} ranks, or leave a size out"
        )
        return
    if given.sharded is Sharded.ALL and not given.allows(units=1, data_parallel=num_ranks):
        yield refusal(Feature.SHARDED, Feature.GIVEN_PIPELINES)
        return
    if given.is_sharded and num_ranks == 1:
        yield refusal(Feature.SHARDED, Feature.ONE_RANK)
        return
    if given.sharded is Sharded.OPTIMIZER and allowed == [1]:
        yield refusal(Feature.SHARDED, Feature.ONE_COPY)
        return
    parts = [copies * (given.microbatches or 1) for copies in allowed]
    if all(batch % part for part in parts):
        least = min(parts)
        cut = f" into {given.microbatches} micro-batches" if given.microbatches else ""
        yield (
            f"a batch of {batch} samples cannot be cut{cut} over {ranks}; use a multiple of {least}, "
            f"e.g. {-(-batch // least) * least}"
        )
        return
    if given.schedule in REGISTRY and (why := _undefined_sizes(given, allowed, batch=batch, num_ranks=num_ranks)):
        yield f"the schedule {given.schedule!r} cannot be planned for {ranks} and a batch of {batch}: {why}"


def _undefined_sizes(given: Given, groups: Sequence[int], *, batch: int, num_ranks: int) -> str | None:
    """Words why the given schedule family can do none of the sizes that ranks and batch allow; None if it can do some.

    `groups`: the allowed numbers of copies.
    """
    why = None
    assert given.schedule is not None
    for copies in groups:
        rows = batch // copies
        for microbatches in [given.microbatches] if given.microbatches else range(1, rows + 1):
            if batch % copies or rows % microbatches:
                continue
            try:
                REGISTRY[given.schedule](num_ranks // copies, microbatches)
            except ConfigError as error:
                why = str(error)
            else:
                return None
    return why
