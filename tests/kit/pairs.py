"""Which features go together: each pair works, as a test shows, or is refused for a reason, or was not tried.

docs/combinations.md is generated from this table and `diffusionpipe.combinations.refused`; tests run the pairs that
work. A new feature is a member of `Feature` and a few lines of `WORKS`.

    >>> verdict(Feature.FILL, Feature.REPLICAS)
    Works(test='tests/runtime/test_combinations.py::test_two_features_learn_what_one_process_learns')
    >>> verdict(Feature.REPLICAS, Feature.SHARDED)
    Refused(reason='replicas of stages cannot be sharded; use data_parallel instead of replicas')
    >>> verdict(Feature.EMA, Feature.ORDERS) is None
    True
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import REFUSED


@dataclass(frozen=True, slots=True)
class Works:
    """The pair trains."""

    test: str
    """The test that runs it: file::function."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The pair cannot be asked for."""

    reason: str
    """The problem and its remedy, as users see it; values of the case are {named}."""


Pair = frozenset[Feature]
_PAIRWISE = (
    Feature.FILL,
    Feature.REPLICAS,
    Feature.DATA_PARALLEL,
    Feature.SHARDED,
    Feature.BUCKETS,
    Feature.OFFLOAD,
    Feature.LORA,
    Feature.SPLIT,
    Feature.RECOMPUTE,
    Feature.SEVERAL_STAGES,
    Feature.TWO_DIRECTIONS,
    Feature.ORDERS,
    Feature.BFLOAT16,
    Feature.CONTROLNET,
    Feature.TEXT_ENCODER,
)
"""Features of one iteration: a test runs every pair of them."""
_LAYOUTS = tuple(one for one in _PAIRWISE[:11] if one not in (Feature.BUCKETS, Feature.LORA))
"""Those of them that whole runs have."""
RUNS = "tests/trainer/test_run.py::"
WINDOWS = "tests/runtime/test_windows.py::test_copies_of_the_pipeline_recomputation_and_flushes_between"
ESTIMATES = "tests/runtime/test_self_conditioning.py::"
ESTIMATED_RUNS = "tests/trainer/test_self_conditioned_runs.py::"
BACKBONES = "tests/runtime/test_backbones.py::"
CASCADES = "tests/trainer/test_cascades.py::"


def _with_estimates(*features: Feature) -> list[tuple[Feature, Feature]]:
    return [(Feature.SELF_CONDITIONING, other) for other in features]


def _with_models(*features: Feature) -> list[tuple[Feature, Feature]]:
    return [(Feature.SEVERAL_MODELS, other) for other in features]


WORKS: Mapping[str, Sequence[tuple[Feature, Feature]]] = {
    "tests/trainer/test_encoder_cache.py::test_layouts_read_one_cache_and_a_run_resumes_on_another": [
        (Feature.CACHE, other) for other in (Feature.FILL, Feature.REPLICAS, Feature.DATA_PARALLEL, Feature.OFFLOAD)
    ],
    "tests/trainer/test_encoder_cache.py::test_pictures_with_holes_keep_the_whole_picture_alone": [
        (Feature.CACHE, Feature.MASKS)
    ],
    "tests/runtime/test_combinations.py::test_two_features_learn_what_one_process_learns": tuple(
        combinations(_PAIRWISE, 2)
    ),
    f"{RUNS}test_other_layouts_change_nothing": [
        *((one, other) for one in (Feature.EMA, Feature.PICTURES) for other in (*_LAYOUTS, Feature.POST_VALIDATION)),
        (Feature.EMA, Feature.PICTURES),
        (Feature.POST_VALIDATION, Feature.SPLIT),
        (Feature.POST_VALIDATION, Feature.SHARDED),
        (Feature.POST_VALIDATION, Feature.RECOMPUTE),
        (Feature.POST_VALIDATION, Feature.DATA_PARALLEL),
    ],
    f"{RUNS}test_a_post_validated_run_is_bit_for_bit_the_blocking_one": [(Feature.POST_VALIDATION, Feature.FILL)],
    f"{RUNS}test_a_trained_text_encoder_and_random_weights_are_the_same_over_two_stages": [
        (Feature.TEXT_ENCODER, Feature.FROM_SCRATCH)
    ],
    f"{RUNS}test_the_pipeline_draws_what_one_process_draws": [(Feature.PICTURES, Feature.DIT)],
    "tests/trainer/test_larger_models.py::test_a_controlnet_draws_from_the_conditioning_pictures_of_validation": [
        (Feature.PICTURES, Feature.CONTROLNET)
    ],
    "tests/runtime/test_adapters.py::test_gradients_of_norms_are_those_of_one_process": [
        (Feature.DORA, other)
        for other in (
            Feature.LORA,
            Feature.TEXT_ENCODER,
            Feature.REPLICAS,
            Feature.DATA_PARALLEL,
            Feature.SPLIT,
            Feature.RECOMPUTE,
            Feature.SEVERAL_STAGES,
        )
    ],
    "tests/trainer/test_lora_runs.py::test_two_stages_learn_what_one_process_learns": [(Feature.LORA, Feature.EMA)],
    "tests/runtime/test_stored.py::test_gradients_of_adapters_on_stored_weights_are_those_of_one_process": [
        (Feature.QUANTISED, other)
        for other in (
            Feature.LORA,
            Feature.SPLIT,
            Feature.RECOMPUTE,
            Feature.SEVERAL_STAGES,
            Feature.DATA_PARALLEL,
            Feature.SHARDED,
            Feature.OFFLOAD,
            Feature.REPLICAS,
            Feature.TWO_DIRECTIONS,
            Feature.BUCKETS,
            Feature.ORDERS,
        )
    ],
    "tests/runtime/test_stored.py::test_those_of_adapters_of_text_encoders_on_stored_weights_are_too": [
        (Feature.QUANTISED, Feature.TEXT_ENCODER)
    ],
    "tests/runtime/test_stored.py::test_filled_with_stored_encoders_they_are_too": [(Feature.QUANTISED, Feature.FILL)],
    "tests/trainer/test_stored_runs.py::test_two_stages_learn_and_draw_what_one_process_does_and_hold_adapters_alone": [
        (Feature.QUANTISED, Feature.PICTURES),
        (Feature.QUANTISED, Feature.EMA),
        (Feature.QUANTISED, Feature.BFLOAT16),
    ],
    "tests/trainer/test_lora_runs.py::test_base_weights_kept_in_bfloat16_give_the_same_run_bit_for_bit": [
        (Feature.LORA, Feature.NARROW_STORE),
        (Feature.BFLOAT16, Feature.NARROW_STORE),
    ],
    f"{ESTIMATES}test_loss_and_gradients_are_those_of_the_two_passes": _with_estimates(
        Feature.REPLICAS, Feature.DATA_PARALLEL, Feature.DIT
    ),
    f"{ESTIMATES}test_other_families_take_probes_too": _with_estimates(
        Feature.SPLIT, Feature.SEVERAL_STAGES, Feature.TWO_DIRECTIONS
    ),
    f"{ESTIMATES}test_sharded_blocks_are_probed": _with_estimates(Feature.SHARDED),
    f"{ESTIMATES}test_buckets_and_recomputation": _with_estimates(Feature.BUCKETS, Feature.RECOMPUTE),
    f"{ESTIMATES}test_filled_steps_are_those_of_the_two_passes": _with_estimates(Feature.FILL),
    f"{ESTIMATED_RUNS}test_two_stages_learn_and_draw_what_one_process_does": _with_estimates(
        Feature.EMA, Feature.PICTURES
    ),
    f"{ESTIMATED_RUNS}test_other_layouts_change_nothing": _with_estimates(Feature.OFFLOAD, Feature.POST_VALIDATION),
    f"{ESTIMATED_RUNS}test_a_trained_text_encoder_and_random_weights": _with_estimates(
        Feature.TEXT_ENCODER, Feature.FROM_SCRATCH
    ),
    f"{ESTIMATED_RUNS}test_bfloat16_stays_near_float32": _with_estimates(Feature.BFLOAT16),
    "tests/runtime/test_masks.py::test_gradients_of_models_that_fill_holes_are_those_of_one_process": [
        (Feature.MASKS, other)
        for other in (
            Feature.FILL,
            Feature.DATA_PARALLEL,
            Feature.OFFLOAD,
            Feature.LORA,
            Feature.SPLIT,
            Feature.SEVERAL_STAGES,
        )
    ],
    "tests/runtime/test_sizes.py::test_mixed_steps_have_the_gradients_of_one_process": [
        (Feature.PATCHES, other)
        for other in (
            Feature.FILL,
            Feature.REPLICAS,
            Feature.DATA_PARALLEL,
            Feature.SHARDED,
            Feature.OFFLOAD,
            Feature.SPLIT,
            Feature.RECOMPUTE,
            Feature.TWO_DIRECTIONS,
        )
    ],
    "tests/trainer/test_patch_runs.py::test_an_export_draws_whole_pictures_and_trains_on": [
        (Feature.PATCHES, Feature.EMA),
        (Feature.PATCHES, Feature.PICTURES),
    ],
    f"{ESTIMATES}test_two_models_read_their_own_estimates": _with_models(Feature.SELF_CONDITIONING),
    f"{BACKBONES}test_loss_and_gradients_of_each_backbone_are_those_of_the_model_alone": _with_models(
        Feature.REPLICAS,
        Feature.DATA_PARALLEL,
        Feature.SHARDED,
        Feature.BUCKETS,
        Feature.SPLIT,
        Feature.RECOMPUTE,
        Feature.SEVERAL_STAGES,
        Feature.TWO_DIRECTIONS,
        Feature.DIT,
    ),
    f"{BACKBONES}test_filled_with_the_frozen_work_of_both_they_are_too": _with_models(Feature.FILL),
    f"{CASCADES}test_what_changes_for_one_model_changes_no_bit_of_the_other": _with_models(
        Feature.EMA, Feature.TEXT_ENCODER
    ),
    f"{CASCADES}test_post_validation_and_encoders_in_host_memory_change_no_bit": _with_models(
        Feature.POST_VALIDATION, Feature.OFFLOAD
    ),
    f"{CASCADES}test_bfloat16_stays_near_float32": _with_models(Feature.BFLOAT16),
    "tests/trainer/test_deepfloyd_runs.py::test_both_models_start_from_scratch": _with_models(Feature.FROM_SCRATCH),
    "tests/trainer/test_deepfloyd_runs.py::test_two_ranks_learn_and_draw_what_one_does": _with_models(Feature.PICTURES),
    "tests/trainer/test_first_steps.py::test_a_filled_run_writes_a_corrected_profile_and_learns_the_same": [
        (Feature.REPLAN, Feature.FILL)
    ],
    "tests/trainer/test_orders.py::test_an_answer_of_the_search_trains_with_recomputation": [
        (Feature.ORDERS_FILE, Feature.RECOMPUTE)
    ],
    "tests/trainer/test_orders.py::test_a_file_of_orders_is_filled": [(Feature.ORDERS_FILE, Feature.FILL)],
    "tests/trainer/test_orders.py::test_adapters_train_by_a_file_of_orders_as_by_a_family": [
        (Feature.ORDERS_FILE, Feature.LORA)
    ],
    "tests/runtime/test_windows.py::test_a_window_is_the_recurrence": [(Feature.VERSIONS, Feature.PREDICTION)],
    WINDOWS: [(Feature.VERSIONS, Feature.DATA_PARALLEL), (Feature.VERSIONS, Feature.RECOMPUTE)],
    "tests/runtime/test_windows.py::test_replicas_of_a_stage_make_the_step_of_all_their_shares": [
        (one, Feature.REPLICAS) for one in (Feature.VERSIONS, Feature.PREDICTION)
    ],
    "tests/runtime/test_windows.py::test_fills_encode_later_batches_and_the_training_is_the_recurrence": [
        (one, Feature.FILL) for one in (Feature.VERSIONS, Feature.PREDICTION)
    ],
    "tests/runtime/test_tied.py::test_its_gradient_is_that_of_one_process": [
        (Feature.TIED, other)
        for other in (
            Feature.DATA_PARALLEL,
            Feature.REPLICAS,
            Feature.BUCKETS,
            Feature.SPLIT,
            Feature.SEVERAL_STAGES,
            Feature.TWO_DIRECTIONS,
        )
    ],
    "tests/runtime/test_windows.py::test_every_kind_of_trained_part_is_the_recurrence": [
        (Feature.VERSIONS, other)
        for other in (Feature.LORA, Feature.TEXT_ENCODER, Feature.CONTROLNET, Feature.QUANTISED)
    ],
    "tests/runtime/test_windows.py::test_in_bfloat16_every_forward_reads_narrow_weights_of_its_version": [
        (Feature.VERSIONS, Feature.BFLOAT16)
    ],
    "tests/trainer/test_windows.py::test_a_run_goes_on_bit_for_bit_from_its_checkpoint": [
        (Feature.VERSIONS, Feature.EMA),
        (Feature.VERSIONS, Feature.DIT),
    ],
}
NOT_TRIED = {
    frozenset({Feature.ORDERS, Feature.TWO_DIRECTIONS}),
    frozenset({Feature.CONTROLNET, Feature.TEXT_ENCODER}),
}
"""Pairs of one iteration that no test can build."""
_KNOWN: dict[Pair, Works | Refused] = {frozenset(pair): Works(test) for test, pairs in WORKS.items() for pair in pairs}
_KNOWN.update((frozenset(pair), Refused(reason)) for pair, reason in REFUSED.items())
TABLE: Mapping[Pair, Works | Refused] = {pair: entry for pair, entry in _KNOWN.items() if pair not in NOT_TRIED}


def verdict(one: Feature, other: Feature) -> Works | Refused | None:
    """What is known of two features together; None: not tried."""
    return TABLE.get(frozenset({one, other}))


def pairs_that_work(test: str) -> Iterator[tuple[Feature, Feature]]:
    """The pairs that a test runs, in the order of the table."""
    for pair, entry in TABLE.items():
        if entry == Works(test):
            one, other = sorted(pair, key=list(Feature).index)
            yield one, other
