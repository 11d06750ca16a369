"""Keys of other trainers, and the keys here that do the same.

Recipes are often written by people who know diffusers' scripts, sd-scripts, musubi-tuner, SimpleTuner, ai-toolkit,
OneTrainer or diffusion-pipe. An unknown key that is a word of theirs is answered with ours.
"""

from collections.abc import Container, Mapping, Sequence

ARGUMENTS = "optimizer.arguments"
"""The key for all words that are arguments of the optimizer's class."""

SAME: Mapping[str, str] = {
    "model.path": "pretrained_model_name_or_path base_model base_model_name model_name model_name_or_path "
    "checkpoint_path ckpt_path ckpt diffusers_path transformer_path unet_path dit",
    "model.from_scratch": "random_init init_from_config",
    "model.train": "train_text_encoder train_unet stop_text_encoder_training",
    "model.frozen_dtype": "fp8_base fp8_base_unet fp8_scaled quantize base_model_precision weight_dtype "
    "transformer_dtype diffusion_model_dtype",
    "model.components.text_encoder.learning_rate": "text_encoder_lr text_encoder_learning_rate te_lr",
    "lora.rank": "network_dim dim lora_rank r linear network_rank",
    "lora.alpha": "network_alpha lora_alpha linear_alpha",
    "lora.target_modules": "lora_layers target network_args train_blocks",
    "lora.exclude": "exclude_modules exclude_patterns exclude_layers",
    "lora.rank_pattern": "network_reg_dims",
    "lora.dora": "use_dora dora_wd weight_decompose",
    "lora.rank_stabilized": "use_rslora rs_lora rslora",
    "lora.start": "network_weights init_from_existing lora_path pretrained_lora_path lora_weights init_lora",
    "lora.save_dtype": "save_precision",
    "lora.trigger": "instance_prompt class_tokens",
    "data.train": "train_data_dir instance_data_dir image_dir image_directory video_directory dataset_path folder_path "
    "dataset dataset_name data_dir train_dir",
    "data.sources.NAME.path": "datasets concepts data_backend_config dataset_config concept_file_name",
    "data.sources.NAME.repeats": "num_repeats repeats balancing",
    "data.sources.NAME.regularisation": "is_reg is_regularisation_data with_prior_preservation reg_data_dir "
    "class_data_dir",
    "data.sources.NAME.loss_weight": "prior_loss_weight reg_weight",
    "data.columns.image": "image_column filename_column",
    "data.columns.text": "caption_column csv_caption_column",
    "data.loss_mask": "masked_loss mask_path conditioning_data_dir masked_training alpha_mask",
    "data.validation": "eval_datasets validation_data_dir validation_split eval_data_dir",
    "data.resolution": "width size image_size",
    "data.frames": "num_frames target_frames frame_buckets",
    "data.frame_rate": "fps target_fps source_fps",
    "data.caption_dropout": "caption_dropout_rate uncond_fraction cond_dropout proportion_empty_prompts "
    "caption_dropout_probability",
    "data.captions.lines": "disable_multiline_split multiline_captions",
    "data.captions.alternatives": "enable_wildcard",
    "data.captions.shuffle": "shuffle_caption shuffle_captions shuffle_tags shuffle_tokens caption_shuffle tag_shuffle "
    "enable_tag_shuffling cache_shuffle_num",
    "data.captions.tag_dropout": "caption_tag_dropout_rate tag_dropout_probability token_dropout_rate",
    "data.captions.keep_first": "keep_tokens keep_tags_count position_start",
    "data.captions.keep_mark": "keep_tokens_separator",
    "data.captions.separator": "caption_separator tag_delimiter cache_shuffle_delimiter split_on",
    "data.captions.prefix": "caption_prefix prepend_instance_prompt",
    "data.captions.suffix": "caption_suffix",
    "data.captions.trigger": "trigger_word",
    "data.captions.dropout": "clip_l_dropout_rate clip_g_dropout_rate t5_dropout_rate",
    "data.caption_chunks": "max_token_length",
    "data.flip": "flip_aug flip_x random_flip",
    "data.random_crop": "crop_style",
    "data.workers": "dataloader_num_workers max_data_loader_n_workers num_workers",
    "training.steps": "max_train_steps max_steps num_train_steps max_num_steps total_steps iterations",
    "training.epochs": "max_train_epochs num_train_epochs num_epochs max_epochs epoch",
    "training.batch": "batch_size train_batch_size global_batch_size total_batch_size micro_batch_size_per_gpu",
    "training.seed": "random_seed training_seed",
    "training.precision": "mixed_precision dtype train_dtype full_bf16 bf16 fp16 full_fp16 dit_dtype",
    "training.clip_norm": "max_grad_norm gradient_clipping grad_clip clip_grad_norm",
    "training.ema_decay": "use_ema ema ema_max_decay",
    "training.activation_checkpointing": "gradient_checkpointing grad_checkpointing activation_checkpoint",
    "optimizer.name": "optimizer_type optim",
    "optimizer.in_backward": "fused_backward_pass optimizer_in_bwd optimizer_in_backward",
    "optimizer.learning_rate": "lr unet_lr base_lr peak_lr learningrate",
    ARGUMENTS: "optimizer_args optimizer_params weight_decay adam_weight_decay betas adam_beta1 adam_beta2 "
    "eps adam_epsilon momentum",
    "learning_rate.schedule": "lr_scheduler lr_schedule lr_scheduler_type",
    "learning_rate.warmup_steps": "lr_warmup_steps warmup lr_warmup num_warmup_steps",
    "learning_rate.arguments": "lr_scheduler_kwargs lr_scheduler_args lr_scheduler_num_cycles lr_scheduler_power "
    "num_cycles lr_num_cycles lr_power",
    "learning_rate.final": "lr_end lr_scheduler_min_lr_ratio min_lr_ratio",
    "objective.kind": "prediction_type v_parameterization v_prediction",
    "objective.snr_gamma": "min_snr_gamma snr loss_weight_strength",
    "objective.offset_noise": "noise_offset offset_noise_weight",
    "objective.time_sampling": "timestep_sampling weighting_scheme timestep_sample_method timestep_type",
    "objective.shift": "flow_shift discrete_flow_shift training_shift flux_shift flow_schedule_shift",
    "objective.loss": "loss_type loss_fn",
    "objective.huber_delta": "huber_c pseudo_huber_c",
    "objective.guidance": "train_guidance flux_guidance_value",
    "pipeline.stages": "pipeline_stages pp_size pipeline_parallel_size num_stages",
    "pipeline.microbatches": "gradient_accumulation_steps gas num_microbatches accumulate_grad_batches",
    "pipeline.data_parallel": "dp_size data_parallel_size",
    "pipeline.sharded": "fsdp zero_stage deepspeed",
    "pipeline.offload_frozen": "cpu_offload offload_text_encoder",
    "validation.every": "eval_every_n_steps eval_steps eval_every validate_every_n_steps",
    "sampling.every": "sample_every_n_steps validation_steps sample_every sample_every_n_epochs validation_epochs "
    "eval_sample_every",
    "sampling.prompts": "sample_prompts validation_prompt validation_prompts prompt samples",
    "sampling.negative_prompt": "negative neg validation_negative_prompt",
    "sampling.guidance": "cfg cfg_scale guidance_scale validation_guidance",
    "sampling.steps": "num_inference_steps sample_steps diffusion_steps validation_num_inference_steps",
    "sampling.scheduler": "sampler sample_sampler noise_scheduler",
    "sampling.at_start": "sample_at_first first_sample eval_before_first_step",
    "checkpoint.every": "save_every_n_steps save_every checkpointing_steps save_steps checkpoint_every_n_steps "
    "save_every_n_epochs",
    "checkpoint.keep": "save_last_n_steps checkpoints_total_limit save_total_limit max_step_saves_to_keep",
    "run.folder": "output_dir output_name logging_dir output_path save_path",
    "run.trackers": "report_to log_with enable_wandb wandb tracker",
    "run.project": "wandb_project tracker_project_name wandb_tracker_name log_tracker_name",
    "run.name": "wandb_run_name run_name",
}
"""Our dotted key -> the words of other trainers for it, with spaces between."""

_IN_SECTION: Mapping[str, str] = {
    "data.path": "data.train",
    "data.folder": "data.train",
    "data.batch": "training.batch",
    "learning_rate.scheduler": "learning_rate.schedule",
    "learning_rate.type": "learning_rate.schedule",
    "learning_rate.value": "optimizer.learning_rate",
    "optimizer.type": "optimizer.name",
    "training.optimizer": "optimizer.name",
    "training.lr": "optimizer.learning_rate",
    "training.output": "run.folder",
    "sampling.seeds": "sampling.seed",
}
"""Dotted word of another trainer, with the section in which it is found -> our dotted key for it there."""

REMARKS: Mapping[str, str] = {
    "training.batch": "the samples of a step over all devices together",
    "pipeline.microbatches": "the parts of a batch that pass the pipeline one after the other",
    "model.components.text_encoder.learning_rate": 'with model.train = ["unet", "text_encoder"]',
    "model.train": "a list of the components that are trained",
    "data.captions.lines": "sd-scripts draws a line where enable_wildcard is set, SimpleTuner unless it is disabled",
    "data.captions.shuffle": "drawn each time, so no variants are kept",
    "data.captions.keep_first": "they are neither moved nor left out; ai-toolkit only does not leave them out",
    "data.captions.prefix": "joined without a space, and never moved",
    "data.captions.trigger": 'in place of "[trigger]", or in front',
    "data.captions.dropout": "a table by text encoder, e.g. { text_encoder_3 = 0.3 }",
    "pipeline.sharded": "or leave it out: the search tries it",
    "training.ema_decay": "a number, e.g. 0.9999",
}
"""Our dotted key -> a remark about it for the hint that names the key."""

ABSENT: Mapping[str, str] = {
    "dropout lora_dropout network_dropout rank_dropout module_dropout": "dropout is not supported, because its random "
    "numbers would depend on the rank; remove it",
    "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_embeddings": (
        'set pipeline.encoders = "cache"; without it frozen parts run while devices wait (pipeline.fill)'
    ),
    "blocks_to_swap offload_fraction musubi_blocks_to_swap": "blocks are not swapped: `diffusionpipe plan` finds a "
    "layout that fits; remove it",
    "enable_bucket enable_ar_bucket buckets bucket_reso_steps min_bucket_reso max_bucket_reso bucket_no_upscale": (
        "set data.aspects = [0.5, 2.0], so that pictures keep about their shape; see multiple, min_side and enlarge"
    ),
    "num_processes num_gpus nproc_per_node gpus world_size": "give it on the command line: train --ranks N",
    "resume resume_from_checkpoint resume_from": "give it on the command line: train --resume latest",
    "xformers sdpa mem_eff_attn enable_xformers_memory_efficient_attention flash_attn attention_mechanism": (
        "the attention of torch, which is fused, is always used; remove it"
    ),
    "allow_tf32 torch_compile compile": "it is not supported; remove it",
    "caption_extension caption_ext": "captions are in metadata.jsonl, or in .txt files beside the pictures; remove it",
}
"""Words of other trainers, with spaces between, for which we have no key -> the reason, and the remedy."""

_OURS = {word: key for key, words in SAME.items() for word in words.split()}
_WHY_NOT = {word: why for words, why in ABSENT.items() for word in words.split()}


def answer(parents: Sequence[str], word: str, here: Container[str] = ()) -> str:
    """A hint for an unknown key that is a word of another trainer: our key, or why there is none; "" for other words.

    `parents` are the sections around the word, `here` the keys of the innermost one.

    >>> answer(["training"], "gradient_accumulation_steps")
    'unknown key; did you mean pipeline.microbatches, the parts of a batch that pass the pipeline one after the other?'
    >>> answer(["models", "base"], "lr", {"learning_rate"})
    'unknown key; did you mean models.base.learning_rate?'
    >>> answer(["data"], "stars")
    ''
    """
    word = word.lower().removeprefix("--").replace("-", "_")
    if why := _WHY_NOT.get(word):
        return why
    key = _IN_SECTION.get(".".join([*parents, word])) or _OURS.get(word)
    if key is None:
        return ""
    if key == ARGUMENTS:
        return f"unknown key; put arguments of the class into [{key}]"
    own = key.rpartition(".")[2]
    if own in here:
        key = ".".join([*parents, own])
    remark = REMARKS.get(key)
    return f"unknown key; did you mean {key}" + (f", {remark}?" if remark else "?")
