"""Pairs of features that are refused, each with the reason that users are told.

Code that refuses a pair takes its message from here, in both halves of the hourglass. A test provokes every
refusal, and docs/combinations.md lists them. A new feature is a member of `Feature`, and a line here where something
excludes it.

    >>> refusal(Feature.REPLICAS, Feature.SHARDED)
    'replicas of stages cannot be sharded; use data_parallel instead of replicas'
"""

from collections.abc import Mapping

from diffusionpipe.combinations.features import Feature

REFUSED: Mapping[tuple[Feature, Feature], str] = {
    (Feature.SHARDED, Feature.REPLICAS): "replicas of stages cannot be sharded; use data_parallel instead of replicas",
    (Feature.SHARDED, Feature.ONE_COPY): (
        "there is one copy of the pipeline, and sharded parameters need copies to share them; set data_parallel to 2 "
        "or more, or leave out sharded"
    ),
    (Feature.SHARDED, Feature.ONE_RANK): "one rank cannot shard its parameters; start more ranks, or leave out sharded",
    (Feature.SHARDED, Feature.GIVEN_PIPELINES): (
        "with sharded, the search puts a copy of the whole model on each rank; leave out stages and data_parallel"
    ),
    (Feature.SHARDED, Feature.TWO_DIRECTIONS): (
        "the schedule {schedule!r} has copies of its blocks on several workers, which cannot be sharded; use another "
        "schedule"
    ),
    (Feature.SHARDED, Feature.TIED): (
        "{parameter} is read by layers of several blocks ({count} such parameters), so it cannot be sharded; leave out "
        "sharded"
    ),
    (Feature.LORA, Feature.FROM_SCRATCH): "adapters need pretrained weights; remove from_scratch, or remove [lora]",
    **dict.fromkeys(
        [(Feature.LORA, Feature.DIT), (Feature.LORA, Feature.CONTROLNET)],
        "{trained} is a {kind}, for which diffusers cannot load adapters; remove [lora] to train all",
    ),
    (Feature.SELF_CONDITIONING, Feature.LORA): (
        "adapters leave the first convolution as it is, which has to learn to read the estimate; remove "
        "objective.self_conditioning, or [lora] to train the whole denoiser"
    ),
    (Feature.SELF_CONDITIONING, Feature.CONTROLNET): (
        "a ControlNet steers a U-Net that reads no estimate; remove objective.self_conditioning"
    ),
    (Feature.SELF_CONDITIONING, Feature.MASKS): (
        "a model that fills holes reads a mask after its noisy samples, where an estimate would be; remove "
        "objective.self_conditioning"
    ),
    (Feature.SEVERAL_MODELS, Feature.MASKS): (
        "several models draw one after the other, and masks belong to one of them; remove data.masks, or train the "
        "models one by one"
    ),
    (Feature.SELF_CONDITIONING, Feature.PATCHES): (
        "estimates are read at one size alone; remove objective.self_conditioning, or data.patches"
    ),
    (Feature.SEVERAL_MODELS, Feature.PATCHES): (
        "several models read pictures of one size each; remove data.patches, or train the models one by one"
    ),
    (Feature.LORA, Feature.PATCHES): (
        "adapters leave the first convolution as it is, which has to learn to read coordinates; remove data.patches, "
        "or [lora] to train the whole denoiser"
    ),
    (Feature.VERSIONS, Feature.PATCHES): (
        'training without a flush has one size; set pipeline.versions = "flushed", or remove data.patches'
    ),
    (Feature.SEVERAL_MODELS, Feature.LORA): (
        "adapters of several models are not supported; remove it, or train the models one by one"
    ),
    (Feature.SEVERAL_MODELS, Feature.ORDERS_FILE): "an orders file has one model; remove it and set pipeline.schedule",
    (Feature.OFFLOAD, Feature.NO_ENCODERS): "the model has no frozen part; leave out offload_frozen",
    (Feature.FILL, Feature.NO_ENCODERS): "there are no frozen layers to fill with; run the schedule as it is",
    (Feature.DORA, Feature.NARROW_STORE): (
        "DoRA reads the norms of frozen weights outside autocast, so weights stored in bfloat16 would change its "
        "results; remove frozen_dtype, or remove lora.dora"
    ),
    (Feature.DORA, Feature.QUANTISED): (
        "DoRA reads the norms of frozen weights, which are not there as numbers when they are stored in one byte or "
        "four bits; remove frozen_dtype, or remove lora.dora"
    ),
    (Feature.QUANTISED, Feature.FROM_SCRATCH): (
        "random weights are trained, and a stored weight never changes; name the frozen components alone, e.g. "
        'frozen_dtype.text_encoder = "{form}"'
    ),
    (Feature.QUANTISED, Feature.WIDE): (
        "weights stored in one byte or four bits are for arithmetic in bfloat16, not {precision}; set "
        'training.precision = "bfloat16", or remove frozen_dtype'
    ),
    (Feature.NARROW_STORE, Feature.WIDE): (
        'layers that compute in {precision} would lose precision; set training.precision = "bfloat16", or '
        "remove frozen_dtype"
    ),
    (Feature.VERSIONS, Feature.SHARDED): (
        'sharded parameters are gathered for one version at a time; leave out sharded, or set versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.TIED): (
        "layers of several stages read {parameter} ({count} such parameters), and each stage steps at another time; "
        'set versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.BUCKETS): 'versions need whole stages; leave out buckets, or set versions = "flushed"',
    (Feature.VERSIONS, Feature.ORDERS): (
        'searched orders and orders of a file end with a flush; set schedule = "1f1b", or versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.SELF_CONDITIONING): (
        "self-conditioning needs a second forward of the same weights, which cannot run without a flush yet; remove "
        'objective.self_conditioning, or set versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.SEVERAL_MODELS): (
        'several models cannot train together without a flush yet; train them one by one, or set versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.OFFLOAD): (
        "weights of encoders cannot come from host memory without a flush yet; leave out offload_frozen, or set "
        'versions = "flushed"'
    ),
    (Feature.PREDICTION, Feature.OTHER_OPTIMIZER): (
        "weights are predicted from the direction of Adam, AdamW or SGD with momentum, and {name} is none of them; "
        'choose one of them, or set versions = "stashed"'
    ),
    (Feature.VERSIONS, Feature.POST_VALIDATION): (
        "post-validation takes a step back before the next one, but without a flush the next one has begun; leave out "
        'post_validation, or set versions = "flushed"'
    ),
    (Feature.VERSIONS, Feature.GLOBAL_CLIPPING): (
        "without a flush the norm over all stages is not known when a stage steps; set clip = "
        '"block", or clip_norm = "none"'
    ),
    (Feature.VERSIONS, Feature.SPIKES): (
        'without a flush a spike is known after the next steps have begun; set on_spike = "none", or versions = '
        '"flushed"'
    ),
    (Feature.CACHE, Feature.VERSIONS): (
        "without a flush, batches overlap and results of encoders are not kept yet; remove it, or set versions = "
        '"flushed"'
    ),
    (Feature.CACHE, Feature.SEVERAL_MODELS): (
        "results of encoders that several models share are not kept yet; remove it, or train the models one by one"
    ),
    (Feature.CACHE, Feature.NO_ENCODERS): (
        'the model has no frozen encoder, so nothing could be kept; remove encoders, or set it to "fill"'
    ),
    (Feature.REPLAN, Feature.VERSIONS): (
        'replan needs a flush after each step; remove replan, or set versions = "flushed"'
    ),
    (Feature.REPLAN, Feature.SEVERAL_MODELS): (
        "a faster layout of several models cannot be searched for yet; remove it, or train the models one by one"
    ),
    (Feature.REPLAN, Feature.PLAN_FILE): (
        'a plan file has no profile that could be corrected; remove replan, or set plan = "auto"'
    ),
    (Feature.REPLAN, Feature.NOT_MEASURED): (
        'there is no profile that could be corrected; remove replan, or set plan = "auto" or fill = true'
    ),
}
"""(one feature, the other) -> the problem and its remedy, with {names} in place of the values of a case."""
_REASONS = {frozenset(pair): reason for pair, reason in REFUSED.items()}


def refusal(one: Feature, other: Feature, **values: object) -> str:
    """The sentence why two features are refused together, with the values of the case in it.

    Raises:
        KeyError: the two are not refused, or a value is missing.
    """
    return _REASONS[frozenset({one, other})].format(**values)
