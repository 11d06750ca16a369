"""[pipeline] of a recipe: the sizes, where they come from, and their defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs.graph import as_fraction
from diffusionpipe.holding import DEVICE, HOST
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.recipe.section import (
    Choice,
    Count,
    Maybe,
    Named,
    Place,
    Positive,
    Section,
    Several,
    raise_problems,
)

AUTO = "auto"
PLANNED = (
    "stages",
    "microbatches",
    "schedule",
    "orders",
    "replicas",
    "data_parallel",
    "sharded",
    "splits",
    "encode_chunk",
    "fill",
    "offload_frozen",
    "cluster",
    "memory",
)
"""The keys of [pipeline] that a plan file replaces."""


class Encoders(StrEnum):
    """When results of frozen layers are made: in bubbles for each step, or once for a cache."""

    FILL = "fill"
    CACHE = "cache"
    AUTO = "auto"


class Replan(StrEnum):
    """Whether a run that has checked its prediction looks for a faster layout."""

    NEVER = "never"
    SUGGEST = "suggest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a pipeline that is not searched, with defaults in place of open ones."""

    microbatches: int
    """The number of micro-batches of each pipeline."""
    schedule: str
    """The name of the schedule."""
    data_parallel: int
    """The number of copies of the whole pipeline."""
    encode_chunk: int
    """The most samples that frozen layers process at a time."""
    fill: bool
    """Whether frozen layers run for the next batch in bubbles."""
    sharded: Sharded
    """The things that the copies hold in parts."""
    encoders: str
    """The name of the storage in which the frozen part's weights are kept, "device" or "host"."""


class PipelineSection(Section):
    """[pipeline]: how the model and the batch are spread over the ranks.

    The sizes are None where the file leaves them out: then `sizes` has their defaults, or the search chooses them.
    """

    plan: Maybe[Named] = None
    """Source of the layout. `"none"`: the keys of this section; `"auto"`: the search for the fastest, at the start;
    else the path of a plan file. It is `"auto"` in a recipe without a key of this section, or with no others than
    `cluster`, `memory`, `encoders`, `cache` and `use`, of which one of the first three is set."""
    stages: Maybe[Count] = None
    """Parts that the trained model is cut into; `"none"`: one per rank and, with `replicas`, one per entry."""
    microbatches: Maybe[Count] = None
    """Micro-batches of each pipeline (gradient accumulation steps); `"none"`: 4."""
    schedule: Maybe[str] = None
    """Name of the pipeline schedule, e.g. `gpipe`; `diffusionpipe schedule list` prints all. `graphpipe` has stages
    beside each other. `"none"`: `"1f1b"`."""
    orders: Maybe[Named] = None
    """File with the order of every rank's actions (`.csv`, `.json`, `.rules`), in place of `schedule`."""
    replicas: Several[Count] = ()
    """Copies of each stage, e.g. `[2, 1]`; they share the samples of every micro-batch. Empty: one of each."""
    data_parallel: Maybe[Count] = None
    """Data-parallel copies of the whole pipeline; they share the batch. `"none"`: 1."""
    sharded: Maybe[bool | Literal["optimizer"]] = None
    """Whether the copies hold parameters, gradients and optimizer state in parts (ZeRO-3, FSDP), or with `"optimizer"`
    the optimizer state alone (ZeRO-1); `"none"`: false, or with `plan = "auto"` the faster choice that fits."""
    splits: Several[str] = ()
    """Names of the first layers of stages 1, 2, ...; empty: stages of equal counted work."""
    encode_chunk: Maybe[Count] = None
    """Most samples that the frozen layers (text encoder, VAE) process at a time; `"none"`: 16."""
    fill: Maybe[bool] = None
    """Run the frozen layers for the next batch in the pipeline bubbles; `"none"`: false, or with `plan = "auto"` the
    faster choice."""
    offload_frozen: Maybe[bool] = None
    """Whether the weights of the frozen layers (text encoder, VAE) are kept in host memory and copied to the device
    layer by layer; `"none"`: false, or with `plan = "auto"` the faster choice that fits."""
    encoders: Maybe[Choice[Encoders]] = None
    """`"fill"`: the frozen layers run for each step, in bubbles; `"cache"`: their results are kept on disk as they are
    computed first, and read afterwards; `"auto"`: `"cache"` where it can be and pays before the run ends, else
    `"fill"`; `"none"`: for each step, as `fill` says."""
    cache: Maybe[Place] = None
    """With `encoders = "cache"` or `"auto"`: folder of the results that are kept; several runs may share it. `"none"`:
    the folder `cache` in `run.folder`."""
    versions: Choice[Versions] = Versions.FLUSHED
    """Which weights the batches in flight read; all but `"flushed"` train without a flush after each step."""
    delay: Maybe[Count] = None
    """With `versions = "delayed"`: the steps by which all weights are old; `"none"`: 1."""
    flush_every: Maybe[Count] = None
    """Without a flush after each step: the steps after which there is one all the same; `"none"`: only for what reads
    the weights, such as validation and checkpoints."""
    flushed_from: Maybe[Annotated[float, Field(gt=0, lt=1)]] = None
    """Without a flush after each step: the share of all steps after which each one ends with a flush all the same;
    `"none"`: no steps do."""
    cluster: Maybe[Named] = None
    """Cluster, by its file or name. With `plan = "auto"` the search uses its links and its memory, with `fill = true`
    the plan uses its links; `"none"`: the links and the memory of this job, measured."""
    use: Several[Annotated[int, Field(ge=0, lt=2**31)]] = ()
    """The ranks that train, e.g. `[0, 1, 3]`; the others end at once. Empty: all of them."""
    memory: Maybe[Positive] = None
    """With `plan = "auto"`: GiB of each device that the layout may take at most; `"none"`: all that training may use of
    it."""
    replan: Maybe[Choice[Replan]] = None
    """Whether the run searches for a faster layout with the profile that its first steps have corrected, and names one
    that would be more than 5 % faster; `"none"`: it does where it can."""

    @field_validator("sharded", mode="before")
    @classmethod
    def _parts_are_known(cls, value: object) -> object:
        if value is not None and not isinstance(value, bool) and value not in ("optimizer", "none"):
            raise ValueError(': input should be true, "optimizer", false or "none"')
        return value

    @property
    def is_searched(self) -> bool:
        """Whether the search chooses the sizes that are left out: `plan` is "auto"."""
        return self.plan == AUTO

    @property
    def is_profiled(self) -> bool:
        """Whether the layers are measured before planning, because the sizes are searched or bubbles filled."""
        return self.is_searched or (self.plan is None and bool(self.fill))

    @property
    def may_cache(self) -> bool:
        """Whether results of frozen layers may be kept: `encoders` is "cache" or "auto"."""
        return self.encoders in (Encoders.CACHE, Encoders.AUTO)

    @property
    def is_replanned(self) -> bool:
        """Whether the run searches for a faster layout after its first steps, as far as this section decides it."""
        return self.replan is not Replan.NEVER and self.is_profiled and self.versions is Versions.FLUSHED

    def given(self, keys: Sequence[str]) -> list[str]:
        """The keys among these, in their order, to which the recipe gives a value."""
        return [key for key in keys if getattr(self, key) not in (None, ())]

    @property
    def plan_file(self) -> Path | None:
        """The plan file to train by, None without one."""
        return None if self.plan in (None, AUTO) else Path(str(self.plan))

    def num_unflushed(self, num_steps: int) -> int:
        """The number of first steps of the run that train without a flush; 0 if each step ends with one.

        A flush follows the last of these steps and each later step. `num_steps`: all steps of the run.
        """
        if self.versions is Versions.FLUSHED:
            return 0
        return num_steps if self.flushed_from is None else ceil(as_fraction(self.flushed_from) * num_steps)

    @property
    def place_of_encoders(self) -> str | None:
        """The storage in which the frozen part's weights are kept, "device" or "host".

        None where the file leaves it out.
        """
        return None if self.offload_frozen is None else (HOST if self.offload_frozen else DEVICE).name

    @property
    def parts(self) -> Sharded | None:
        """The things that copies of the pipeline hold in parts: nothing, the optimizer state, or all.

        None if the file does not say it.
        """
        match self.sharded:
            case None:
                return None
            case "optimizer":
                return Sharded.OPTIMIZER
        return Sharded.ALL if self.sharded else Sharded.NONE

    @property
    def sizes(self) -> Sizes:
        """The sizes of the pipeline, with defaults for the keys that the file leaves out."""
        return Sizes(
            microbatches=self.microbatches or 4,
            schedule=self.schedule or "1f1b",
            data_parallel=self.data_parallel or 1,
            encode_chunk=self.encode_chunk or 16,
            fill=bool(self.fill),
            sharded=self.parts or Sharded.NONE,
            encoders=self.place_of_encoders or DEVICE.name,
        )

    @model_validator(mode="after")
    def _other_keys_leave_the_plan_its_say(self) -> Self:
        given = self.given(PLANNED)
        match self.plan:
            case None:
                wrong = {"schedule": "pipeline.orders sets it; remove one of the two"} if self.orders else {}
                if not self.fill:
                    text = 'only plans by measured layers use it; set plan = "auto" or fill = true, or remove it'
                    wrong |= {"cluster": text}
                wrong |= {"memory": 'only the search uses it; set plan = "auto", or remove it'}
            case "auto":
                text = "the search chooses it; remove it, or remove plan and give the sizes yourself"
                wrong = dict.fromkeys(("orders", "replicas", "splits"), text)
            case path:
                text = f'the plan file {path} sets it; remove it, or set plan = "auto"'
                wrong = dict.fromkeys(PLANNED, text)
        raise_problems(f"{key}: {wrong[key]}" for key in given if key in wrong)
        return self

    @model_validator(mode="before")
    @classmethod
    def _encoders_fill(cls, values: object) -> object:
        """The keys of the section, with `fill = true` added if the recipe has `encoders` and nothing against it.

        So the results of frozen layers that are computed are computed in bubbles.
        """
        if not isinstance(values, Mapping) or values.get("encoders", "none") in ("none", None):
            return values
        stated = [values.get(key, "none") not in ("none", None) for key in ("fill", "plan")]
        fills = values["encoders"] == Encoders.FILL and values.get("plan") == AUTO
        # `fill`, a plan file and versions without flushes have their own say.
        leaves_it = stated[0] or (stated[1] and not fills) or values.get("versions", "flushed") != "flushed"
        return values if leaves_it else {**values, "fill": True}

    @model_validator(mode="after")
    def _encoders_agree(self) -> Self:
        problems = []
        if self.encoders is Encoders.FILL and self.fill is False:
            problems.append('encoders: "fill" is contradicted by fill = false; remove one of the two')
        if self.encoders is Encoders.FILL and self.plan_file is not None:
            problems.append(
                f'encoders: the plan file {self.plan} says whether frozen layers fill; set "cache", or remove it'
            )
        if self.encoders is Encoders.AUTO and not self.is_profiled:
            problems.append(
                'encoders: "auto" needs measured layers, and nothing measures them here; set fill = true or '
                'plan = "auto", or choose "cache"'
            )
        if self.encoders is not None and self.versions is not Versions.FLUSHED:
            problems.append(f"encoders: {refusal(Feature.CACHE, Feature.VERSIONS)}")
        if self.cache is not None and not self.may_cache:
            problems.append('cache: nothing is kept; set encoders = "cache" or "auto", or remove cache')
        raise_problems(problems)
        return self

    @model_validator(mode="after")
    def _ranks_are_named_once(self) -> Self:
        if len(set(self.use)) < len(self.use):
            raise ValueError(f"use: {', '.join(map(str, self.use))} names a rank twice; name each rank once")
        return self

    @model_validator(mode="after")
    def _versions_go_together(self) -> Self:
        if self.versions is Versions.FLUSHED:
            given = [key for key in ("delay", "flush_every", "flushed_from") if getattr(self, key) is not None]
            raise_problems(f"{key}: every step ends with a flush; set versions, or remove {key}" for key in given)
            return self
        if self.delay is not None and self.versions is not Versions.DELAYED:
            raise ValueError('delay: only versions = "delayed" has one; remove it, or change versions')
        if self.plan is not None:
            raise ValueError("versions: neither the search nor a plan file takes it; remove plan and give the sizes")
        sizes = self.sizes
        asked = (
            (sizes.sharded is not Sharded.NONE, refusal(Feature.VERSIONS, Feature.SHARDED)),
            (bool(self.offload_frozen), refusal(Feature.VERSIONS, Feature.OFFLOAD)),
            (self.orders is not None, refusal(Feature.VERSIONS, Feature.ORDERS)),
        )
        raise_problems(f"versions: {why}" for is_asked, why in asked if is_asked)
        return self

    @model_validator(mode="after")
    def _a_new_plan_needs_a_profile(self) -> Self:
        if self.replan is not Replan.SUGGEST:
            return self
        asked = (
            (self.versions is not Versions.FLUSHED, refusal(Feature.REPLAN, Feature.VERSIONS)),
            (self.plan_file is not None, refusal(Feature.REPLAN, Feature.PLAN_FILE)),
            (self.plan is None and not self.is_profiled, refusal(Feature.REPLAN, Feature.NOT_MEASURED)),
        )
        raise_problems(f"replan: {why}" for is_asked, why in asked if is_asked)
        return self

    @model_validator(mode="after")
    def _parts_need_copies(self) -> Self:
        if not self.sharded or self.plan is not None:
            return self
        if self.sizes.data_parallel == 1:
            raise ValueError(f"sharded: {refusal(Feature.SHARDED, Feature.ONE_COPY)}")
        if max(self.replicas, default=1) > 1:
            raise ValueError(f"sharded: {refusal(Feature.SHARDED, Feature.REPLICAS)}")
        return self

    @model_validator(mode="after")
    def _replicas_match_the_stages(self) -> Self:
        if self.replicas and self.stages not in (None, len(self.replicas)):
            raise ValueError(
                f"replicas: there are {len(self.replicas)} numbers for {self.stages} stages; give one number per stage"
            )
        return self
