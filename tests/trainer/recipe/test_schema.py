import pytest
from pydantic import ValidationError

from diffusionpipe.errors import RecipeError
from diffusionpipe.models.parameters.lora import LoraSettings
from diffusionpipe.trainer.model.lora import lora_identity, lora_of
from diffusionpipe.trainer.recipe.objective_section import ObjectiveKind
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table
from diffusionpipe.trainer.recipe.schema import Recipe, RunSection, problems_between

SMALL = {
    "model": {"path": "model"},
    "data": {"train": "pictures", "resolution": 32},
    "training": {"steps": 10, "batch": 8},
    "run": {"folder": "runs/small"},
}


def recipe(**sections):
    return Recipe.model_validate(SMALL | {name: SMALL.get(name, {}) | keys for name, keys in sections.items()})


def test_a_recipe_of_the_required_keys_alone_is_complete():
    small = Recipe.model_validate(SMALL)
    assert small.pipeline == PipelineSection()
    assert small.objective.kind is ObjectiveKind.AUTO
    assert small.training.clip_norm == 1.0


@pytest.mark.parametrize(
    ("given", "patterns"), [(True, ("*",)), (False, ()), (["unet.mid*"], ("unet.mid*",)), ([], ())]
)
def test_activation_checkpointing_is_a_switch_or_patterns(given, patterns):
    assert recipe(training={"activation_checkpointing": given}).training.activation_checkpointing == patterns


def test_the_word_none_switches_off_what_is_on():
    off = recipe(training={"clip_norm": "none"}, checkpoint={"every": "none"})
    assert off.training.clip_norm is None
    assert off.checkpoint.every is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"batch": 6}}, "6 samples cannot be cut into 4 micro-batches"),
        ({"training": {"batch": 2}}, "use a multiple of 4, e.g. 4"),
        ({"pipeline": {"data_parallel": 4}}, "8 samples cannot be cut into 4 micro-batches for each of 4 pipelines"),
        ({"pipeline": {"replicas": [3, 1]}}, "a micro-batch of 2 samples cannot be shared by 3 replicas"),
        ({"pipeline": {"replicas": [2, 1], "stages": 3}}, "2 numbers for 3 stages"),
        ({"pipeline": {"plan": "auto", "replicas": [2, 1]}}, "replicas: the search chooses it; remove it"),
        ({"pipeline": {"plan": "auto", "splits": ["a"]}}, "splits: the search chooses it"),
        ({"pipeline": {"plan": "p.json", "stages": 2}}, 'stages: the plan file p.json sets it; .* plan = "auto"'),
        ({"pipeline": {"plan": "p.json", "fill": False}}, "fill: the plan file p.json sets it"),
        ({"pipeline": {"plan": "p.json", "cluster": "x"}}, "cluster: the plan file p.json sets it"),
        ({"pipeline": {"plan": "p.json", "sharded": True}}, "sharded: the plan file p.json sets it"),
        ({"pipeline": {"plan": "p.json", "offload_frozen": True}}, "offload_frozen: the plan file p.json sets it"),
        ({"pipeline": {"sharded": True}}, "sharded: there is one copy of the pipeline, .* set data_parallel to 2"),
        (
            {"pipeline": {"sharded": "optimizer"}},
            "sharded: there is one copy of the pipeline, .* set data_parallel to 2",
        ),
        ({"pipeline": {"sharded": "states"}}, '(?s)sharded.*: input should be true, "optimizer", false or "none"'),
        (
            {"pipeline": {"sharded": True, "data_parallel": 2, "microbatches": 1, "replicas": [2]}},
            "sharded: replicas of stages cannot be sharded",
        ),
        ({"pipeline": {"cluster": "x"}}, 'cluster: only plans by measured layers use it; set plan = "auto" or fill'),
        ({"pipeline": {"plan": ""}}, "at least 1 character"),
        ({"pipeline": {"plan": "auto", "microbatches": 3}}, "8 samples cannot be cut into 3 micro-batches"),
        ({"pipeline": {"plan": "auto", "data_parallel": 3}}, "into 1 micro-batches for each of 3 pipelines"),
        ({"learning_rate": {"warmup_steps": 10}}, "10 is not less than the 10 steps"),
        ({"learning_rate": {"final": 0.5}}, "final: it has no effect on a constant schedule"),
        ({"validation": {"every": 5}}, "validation.every: there is no data"),
        ({"data": {"validation": "held-out"}}, "data.validation: this folder is never used"),
        ({"validation": {"timesteps": [1.0]}}, "less than 1"),
        ({"validation": {"timesteps": []}}, "at least 1 item"),
        ({"sampling": {"every": 5}}, "neither prompts nor labels"),
        ({"sampling": {"prompts": ["a seven"], "labels": [7]}}, "labels are given too"),
        ({"objective": {"kind": "flow_matching", "snr_gamma": 5.0}}, "no effect for flow_matching"),
        ({"objective": {"kind": "epsilon", "shift": 3.0}}, "no effect for epsilon"),
        ({"objective": {"kind": "v_prediction", "time_sampling": "logit_normal"}}, "needs flow_matching"),
        ({"objective": {"kind": "epsilon", "time_sampling": "beta"}}, "time_sampling: beta needs flow_matching"),
        (
            {"objective": {"kind": "flow_matching", "time_sampling": "speed"}},
            "time_sampling: speed needs epsilon or v_prediction, not flow_matching",
        ),
        (
            {"objective": {"time_sampling": "speed", "snr_gamma": 5.0}},
            "snr_gamma: time_sampling = speed and snr_gamma both weigh the times; remove one of them",
        ),
        ({"objective": {"speed_pairs": True}}, 'no effect for uniform times; set time_sampling = "speed" or remove it'),
        ({"data": {"masks": "file"}}, "mask_file: masks = .file. needs the path of each picture's mask, e.g. .masks/"),
        ({"data": {"masks": "edges", "mask_file": "m/{name}.png"}}, "mask_file: only masks = .file. reads it"),
        (
            {"data": {"masks": "file", "mask_file": "m/{name}.png", "frames": 5}},
            'masks: holes of clips are not read from files; set masks to "edges", "boxes" or "first"',
        ),
        ({"data": {"masks": "first"}}, 'masks: "first" is the first frame of a clip; set frames, or masks to "edges"'),
        (
            {"sampling": {"every": 5, "prompts": ["a", "b", "c"], "images": ["a.png", "b.png"], "masks": ["a.png"]}},
            "masks: 2 images and 1 masks do not match 3 prompts",
        ),
        ({"sampling": {"images": "a.png", "masks": "b.png"}}, "images: nothing is drawn; set every, or remove"),
        ({"objective": {"logit_mean": 0.5}}, 'logit_mean: it has no effect for uniform times; set time_sampling = "lo'),
        ({"objective": {"time_sampling": "mode", "beta_beta": 3.0}}, "beta_beta: it has no effect for mode times"),
        ({"objective": {"time_sampling": "mode", "mode_scale": 1.8}}, "1.8 is not a number from -1 to 1.752"),
        ({"objective": {"time_sampling": "beta", "beta_alpha": 0.01}}, "0.01 is not a number from 0.1 to 100"),
        ({"objective": {"time_range": [0.8, 0.2]}}, "time_range: .0.8, 0.2. is not .from, to. with 0 <= from < to"),
        ({"objective": {"kind": "v_prediction", "weighting": "cosmap"}}, "weighting: cosmap needs flow_matching"),
        ({"objective": {"kind": "flow_matching", "weighting": "debiased"}}, "debiased needs epsilon or v_prediction"),
        ({"objective": {"weighting": "debiased", "snr_gamma": 5.0}}, "debiased and snr_gamma are two weights"),
        ({"objective": {"huber_delta": 0.5}}, "huber_delta: it has no effect for the l2 loss; set loss = .huber"),
        ({"objective": {"offset_noise": -0.1}}, "offset_noise\n  Input should be greater than or equal to 0"),
        ({"optimizer": {"name": "Adamw"}}, "did you mean AdamW"),
        ({"optimizer": {"arguments": {"weigth_decay": 0.1}}}, "did you mean weight_decay"),
        ({"optimizer": {"arguments": {"lr": 0.1}}}, "lr is the recipe's learning rate"),
        ({"training": {"ema_decay": 1.0}}, "less than 1"),
        ({"training": {"steps": True}}, "valid integer"),
        ({"training": {"steps": "10"}}, "valid integer"),
        ({"sampling": {"prompts": [7]}}, "valid string"),
        ({"optimizer": {"learning_rate": float("nan")}}, "finite number"),
        ({"data": {"resolution": 0}}, "greater than or equal to 1"),
        ({"model": {"pth": "x"}}, "Extra inputs are not permitted"),
        ({"lora": {"alpha": 8.0}}, "rank\n  Field required"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
        ({"lora": {"rank": 8, "alpha": 0.0}}, "greater than 0"),
        ({"lora": {"rank": "none", "merge": True}}, "merge: it has no effect without adapters; set rank"),
        ({"lora": {"rank": "none", "trigger": "sks"}}, "trigger: it has no effect without adapters; set rank"),
        ({"lora": {"rank": 8, "formats": "comfy"}}, 'formats: the run and `sample` draw from "diffusers"'),
        (
            {"lora": {"rank": 8, "formats": ["diffusers", "comfy"], "dora": True}},
            "formats: ComfyUI divides by the norm of other weights than DoRA",
        ),
        (
            {"lora": {"rank": 8, "formats": ["diffusers", "comfy"], "merge": True}},
            "lora.formats: it has no effect on a whole model; remove it, or remove lora.merge",
        ),
        ({"checkpoint": {"adapters": True}}, "checkpoint.adapters: it has no effect without adapters; set lora.rank"),
        ({"lora": {"rank": "none", "target_modules": ["to_q"]}}, "target_modules: it has no effect without adapters"),
        (
            {"lora": {"rank": 8}, "model": {"from_scratch": True}},
            "model.from_scratch: adapters need pretrained weights",
        ),
        ({"lora": {"rank": 8, "target_modules": "everything"}}, 'words "attention", "linear", "all"; got .everything'),
        ({"lora": {"rank": 8, "rank_pattern": {"to_q": 0}}}, "greater than or equal to 1"),
        ({"lora": {"rank": "none", "dora": True}}, "dora: it has no effect without adapters"),
        (
            {
                "lora": {"rank": 8, "dora": True},
                "model": {"frozen_dtype": "bfloat16"},
                "training": {"precision": "bfloat16"},
            },
            "model.frozen_dtype: DoRA reads the norms of frozen weights outside autocast.*remove frozen_dtype",
        ),
        (
            {"model": {"frozen_dtype": "bfloat16"}, "training": {"precision": "float32"}},
            'compute in float32 .*training.precision = "bfloat16"',
        ),
    ],
)
def test_wrong_values_and_combinations_are_refused(sections, message):
    with pytest.raises(ValidationError, match=message):
        recipe(**sections)


@pytest.mark.parametrize("batch", [1, 6, 7])
def test_a_batch_that_the_defaults_do_not_cut_is_left_to_the_search_or_the_plan_file(batch):
    for plan in ("auto", "plan.json"):
        assert recipe(training={"batch": batch}, pipeline={"plan": plan}).training.batch == batch


def test_sizes_that_are_left_out_have_defaults_where_nothing_is_searched():
    sizes = recipe(pipeline={"data_parallel": 2}).pipeline.sizes
    assert (sizes.microbatches, sizes.schedule, sizes.data_parallel) == (4, "1f1b", 2)
    assert (sizes.encode_chunk, sizes.fill) == (16, False)


@pytest.mark.parametrize(
    ("pipeline", "profiled"),
    [({}, False), ({"fill": True}, True), ({"plan": "auto"}, True), ({"plan": "plan.json"}, False)],
)
def test_layers_are_profiled_for_filling_and_for_searching(pipeline, profiled):
    assert recipe(pipeline=pipeline).pipeline.is_profiled is profiled


def test_without_a_section_no_adapters_are_trained():
    assert recipe().lora.rank is None
    assert lora_of(recipe()) is None
    assert lora_identity(recipe()) is None


def test_adapters_are_as_the_section_says_and_on_attention_unless_it_names_layers():
    plain = lora_of(recipe(lora={"rank": 8}))
    assert plain == LoraSettings(rank=8, alpha=None, target_modules=("to_q", "to_k", "to_v", "to_out.0"))
    chosen = recipe(lora={"rank": 8, "alpha": 4, "target_modules": ["proj_in"]})
    assert lora_of(chosen) == LoraSettings(rank=8, alpha=4.0, target_modules=("proj_in",))
    assert lora_identity(chosen) == "rank 8, alpha 4, on proj_in"
    assert lora_identity(recipe(lora={"rank": 8})) == lora_identity(recipe(lora={"rank": 8, "alpha": 8}))


def test_checks_that_miss_a_section_are_left_out():
    assert list(problems_between({"run": RunSection(folder="x")})) == []


def test_every_key_is_described_in_the_json_schema():
    definitions = Recipe.model_json_schema()["$defs"]
    sections = {name: d for name, d in definitions.items() if name.endswith("Section")}
    assert len(sections) == 19
    missing = [
        f"{name}.{key}" for name, d in sections.items() for key, p in d["properties"].items() if "description" not in p
    ]
    assert missing == []


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Recipe.model_validate(SMALL).training.steps = 3


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        (
            {"resolution": [8, "16x8"], "multiple": 8, "allow_growth": True, "frame_rate": 8.0, "mask_file": "a"},
            ["data.multiple: only sizes", "data.allow_growth:", "data.frame_rate:", "data.mask_file:"],
        ),
        ({"resolution": [], "caption_dropout": 2.0}, ["data.resolution: give sides", "data.caption_dropout:"]),
        ({"resolution": ["16"], "workers": -1}, ["data.resolution: '16' is not a width", "data.workers:"]),
    ],
)
def test_every_fault_of_a_list_of_sizes_is_named_at_once(data, messages):
    with pytest.raises(RecipeError) as found:
        recipe_from_table({**SMALL, "data": {"train": "pictures", **data}}, source="a.toml")
    for message in messages:
        assert message in str(found.value)
