"""Words of other trainers in a recipe, and the hints that they get."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe import default_of, load_recipe
from diffusionpipe.trainer.recipe.other_words import _IN_SECTION, ABSENT, REMARKS, SAME, answer

SMALL = """
[model]
path = "m"
[data]
train = "d"
resolution = 32
[training]
steps = 10
batch = 4
"""

MISTAKES = {
    "lr=1e-4": "did you mean optimizer.learning_rate?",
    "optimizer.lr=1e-4": "did you mean optimizer.learning_rate?",
    "optimizer.type='AdamW'": "did you mean optimizer.name?",
    "optimizer.betas=[0.9, 0.99]": "put arguments of the class into [optimizer.arguments]",
    "training.weight_decay=0.01": "put arguments of the class into [optimizer.arguments]",
    "model.components.text_encoder.lr=1e-6": "did you mean model.components.text_encoder.learning_rate, with",
    "training.text_encoder_lr=1e-6": 'text_encoder.learning_rate, with model.train = ["unet", "text_encoder"]?',
    "learning_rate.scheduler='cosine'": "did you mean learning_rate.schedule?",
    "training.lr_scheduler='cosine'": "did you mean learning_rate.schedule?",
    "training.lr_warmup_steps=10": "did you mean learning_rate.warmup_steps?",
    "data.path='x'": "did you mean data.train?",
    "data.train_data_dir='x'": "did you mean data.train?",
    "data.caption_dropout_rate=0.1": "did you mean data.caption_dropout?",
    "data.flip_aug=true": "did you mean data.flip?",
    "data.num_repeats=10": "did you mean data.sources.NAME.repeats?",
    "data.enable_bucket=true": "set data.aspects = [0.5, 2.0], so that pictures keep about their shape",
    "data.caption_extension='.txt'": "captions are in metadata.jsonl",
    "data.batch=4": "did you mean training.batch",
    "training.batch_size=4": "did you mean training.batch, the samples of a step over all devices together?",
    "training.train_batch_size=4": "did you mean training.batch",
    "training.max_train_steps=9": "did you mean training.steps?",
    "training.num_train_epochs=9": "did you mean training.epochs?",
    "training.gradient_accumulation_steps=4": "did you mean pipeline.microbatches",
    "training.mixed_precision='bf16'": "did you mean training.precision?",
    "training.max_grad_norm=1.0": "did you mean training.clip_norm?",
    "training.gradient_checkpointing=true": "did you mean training.activation_checkpointing?",
    "training.use_ema=true": "did you mean training.ema_decay, a number, e.g. 0.9999?",
    "training.output_dir='x'": "did you mean run.folder?",
    "training.resume_from_checkpoint='x'": "give it on the command line: train --resume latest",
    "pipeline.num_gpus=4": "give it on the command line: train --ranks N",
    "pipeline.pipeline_stages=4": "did you mean pipeline.stages?",
    "lora.dim=16": "did you mean lora.rank?",
    "lora.network_alpha=16": "did you mean lora.alpha?",
    "lora.network_weights='x'": "did you mean lora.start?",
    "lora.use_rslora=true": "did you mean lora.rank_stabilized?",
    "model.pretrained_model_name_or_path='x'": "did you mean model.path?",
    "model.cache_latents=true": 'set pipeline.encoders = "cache"',
    "model.blocks_to_swap=10": "blocks are not swapped",
    "objective.min_snr_gamma=5": "did you mean objective.snr_gamma?",
    "objective.noise_offset=0.1": "did you mean objective.offset_noise?",
    "objective.discrete_flow_shift=3": "did you mean objective.shift?",
    "objective.weighting_scheme='none'": "did you mean objective.time_sampling?",
    "sampling.cfg=7": "did you mean sampling.guidance?",
    "sampling.num_inference_steps=7": "did you mean sampling.steps?",
    "sampling.sampler='x'": "did you mean sampling.scheduler?",
    "sampling.validation_prompt='x'": "did you mean sampling.prompts?",
    "checkpoint.checkpoints_total_limit=2": "did you mean checkpoint.keep?",
    "run.report_to='wandb'": "did you mean run.trackers?",
}


@pytest.mark.parametrize(("override", "hint"), MISTAKES.items())
def test_a_word_of_another_trainer_gets_the_key_that_does_the_same(tmp_path, override, hint):
    (tmp_path / "a.toml").write_text(SMALL)
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "a.toml", [override])
    key = override.partition("=")[0]
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"  {key}: ")]
    assert len(lines) == 1
    assert hint in lines[0]
    assert "(set on the command line)" in lines[0]


def test_every_key_that_a_hint_names_exists():
    for key in {*SAME, *_IN_SECTION.values(), *REMARKS} - {"model.components.text_encoder.learning_rate"}:
        default_of(key)  # KeyError: no such key


def test_no_word_has_two_meanings():
    words = " ".join([*SAME.values(), *ABSENT]).split()
    assert sorted(words) == sorted(set(words))


def test_words_are_known_as_flags_of_a_command_too():
    assert answer(["training"], "--train-batch-size") == answer(["training"], "train_batch_size") != ""


def test_the_page_of_words_is_what_its_script_writes():
    docs = Path(__file__).parents[3] / "docs"
    spec = spec_from_file_location("make_other_words", docs / "make_other_words.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    assert (docs / "other-words.md").read_text() == module.document(), "run make docs"
