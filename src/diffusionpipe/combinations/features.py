"""The features that a training may have, with the words that the table of combinations uses for them."""

from collections.abc import Mapping
from enum import StrEnum


class Feature(StrEnum):
    """A feature that a training may have, such as fills or several stages; the value is its name for people."""

    FILL = "fill"
    REPLICAS = "replicas"
    DATA_PARALLEL = "data parallel"
    SHARDED = "sharded"
    BUCKETS = "buckets"
    OFFLOAD = "offload"
    LORA = "LoRA"
    DORA = "DoRA"
    SPLIT = "split backward"
    POST_VALIDATION = "post-validation"
    RECOMPUTE = "recompute"
    SEVERAL_STAGES = "several stages"
    TWO_DIRECTIONS = "two directions"
    ORDERS = "searched orders"
    ORDERS_FILE = "orders file"
    BFLOAT16 = "bfloat16"
    CONTROLNET = "ControlNet"
    TEXT_ENCODER = "text encoder"
    FROM_SCRATCH = "random weights"
    EMA = "average"
    PICTURES = "pictures"
    DIT = "DiT"
    TIED = "tied parameters"
    ONE_COPY = "one copy"
    ONE_RANK = "one rank"
    GIVEN_PIPELINES = "given pipelines"
    NO_ENCODERS = "no encoders"
    NARROW_STORE = "bfloat16 store"
    QUANTISED = "stored weights"
    WIDE = "wide arithmetic"
    SELF_CONDITIONING = "self-conditioning"
    MASKS = "masks"
    PATCHES = "patches"
    VERSIONS = "weight versions"
    PREDICTION = "predicted weights"
    OTHER_OPTIMIZER = "other optimizers"
    GLOBAL_CLIPPING = "clipping by the global norm"
    SPIKES = "spikes"
    SEVERAL_MODELS = "several models"
    REPLAN = "suggested layouts"
    PLAN_FILE = "plan file"
    NOT_MEASURED = "layers not measured"
    CACHE = "cache"


MEANINGS: Mapping[Feature, str] = {
    Feature.FILL: "`pipeline.fill`: encoders run between other work, for a later batch",
    Feature.REPLICAS: "`pipeline.replicas`: several devices share the samples of a stage",
    Feature.DATA_PARALLEL: "`pipeline.data_parallel`: copies of the pipeline share the batch",
    Feature.SHARDED: "`pipeline.sharded`: the copies hold parameters, gradients and optimizer state in parts",
    Feature.BUCKETS: "gradients of a stage are summed in several parts",
    Feature.OFFLOAD: "`pipeline.offload_frozen`: weights of encoders are in host memory",
    Feature.LORA: "`[lora]`: adapters are trained, all other weights are frozen",
    Feature.DORA: "`lora.dora`: adapters whose weights have trained norms",
    Feature.SPLIT: "a schedule with I and W instead of B, such as `zb-h1`",
    Feature.POST_VALIDATION: "`training.post_validation`: the update comes before the gradient norm is known",
    Feature.RECOMPUTE: "`training.activation_checkpointing`: activations are computed again in the backward",
    Feature.SEVERAL_STAGES: "a schedule with several stages on each rank, such as `interleaved`",
    Feature.TWO_DIRECTIONS: "a schedule with pipelines in both directions, such as `chimera`",
    Feature.ORDERS: "orders that a search made for this model, with `search-...` as their name",
    Feature.ORDERS_FILE: "`pipeline.orders`: the order of every rank is read from a file",
    Feature.BFLOAT16: '`training.precision = "bfloat16"`',
    Feature.CONTROLNET: "the model is a ControlNet",
    Feature.TEXT_ENCODER: "`model.train` names a text encoder",
    Feature.FROM_SCRATCH: "`model.from_scratch`",
    Feature.EMA: "`training.ema_decay`: a moving average of the weights",
    Feature.PICTURES: "pictures drawn during training or by `sample`",
    Feature.DIT: "the model is a DiT",
    Feature.TIED: "a parameter that layers of several stages or buckets read",
    Feature.ONE_COPY: "`pipeline.data_parallel` is 1",
    Feature.ONE_RANK: "the job has one rank",
    Feature.GIVEN_PIPELINES: '`pipeline.plan = "auto"` with `stages`, or fewer copies than ranks',
    Feature.NO_ENCODERS: "the model has no frozen part",
    Feature.NARROW_STORE: '`model.frozen_dtype = "bfloat16"`',
    Feature.QUANTISED: '`model.frozen_dtype` is "float8", "int8" or "nf4"',
    Feature.WIDE: '`training.precision` is "float32" or "float64"',
    Feature.SELF_CONDITIONING: "`objective.self_conditioning`: the denoiser reads its own estimate",
    Feature.MASKS: "`data.masks`: the denoiser fills holes of pictures",
    Feature.PATCHES: "`data.patches`: steps on patches of pictures, whose coordinates the denoiser reads",
    Feature.VERSIONS: "`pipeline.versions`: batches follow each other without a flush",
    Feature.PREDICTION: '`pipeline.versions = "predicted"`',
    Feature.OTHER_OPTIMIZER: "`optimizer.name` is neither Adam nor AdamW nor SGD with momentum",
    Feature.GLOBAL_CLIPPING: '`training.clip_norm` with `training.clip = "global"`',
    Feature.SPIKES: "`training.on_spike` skips a step or stops at one",
    Feature.SEVERAL_MODELS: "`[models.NAME]`: models that train together, each a backbone of its own",
    Feature.REPLAN: '`pipeline.replan = "suggest"`: the run searches for a faster layout after its first steps',
    Feature.PLAN_FILE: "`pipeline.plan` is the path of a plan file",
    Feature.NOT_MEASURED: "sizes are given and nothing is filled, so no layer is measured",
    Feature.CACHE: '`pipeline.encoders = "cache"`: results of frozen layers are kept on disk',
}
