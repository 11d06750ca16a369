"""Train the frozen parts of the digits example and write its diffusers folder.

    python examples/digits/dataset.py --out runs/digits-data
    python examples/digits/prepare.py --data runs/digits-data/train --out examples/digits/model

This made the folder `examples/digits/model` as it is committed, from the training pictures alone:

    vae/            AutoencoderKL, 3x32x32 pictures to 4x8x8 latents of standard deviation 1 (after scaling_factor)
    tokenizer/      CLIPTokenizer whose vocabulary was learned from the captions
    text_encoder/   CLIPTextModel, trained to agree with a picture tower (thrown away) which captions fit which pictures
    scheduler/      DDIMScheduler with the noise levels and the prediction type that the UNet is trained for
    unet/           config.json only: the UNet is what the example trains
    model_index.json

All random numbers are seeded. It takes about three and a half minutes on one free core.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the customary name
from dataset import WORDINGS, WORDS, DataError, caption, digit_of_caption, read_folder
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from transformers.utils import logging

VAE = {
    "block_out_channels": (8, 16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "mid_block_add_attention": False,
    "norm_num_groups": 8,
    "sample_size": 32,
}
KL_WEIGHT = 3e-3
"""Weight of the mean KL divergence of a latent value beside the mean squared error of a pixel value (from -1 to 1)."""

TEXT_WIDTH = 64
NUM_TOKENS = 16
VOCABULARY_SIZE = 768
TEMPERATURE = 0.1

UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "cross_attention_dim": TEXT_WIDTH,
    "attention_head_dim": 4,
    "norm_num_groups": 16,
}
SCHEDULER = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


@contextmanager
def training_steps(title: str, num_steps: int) -> Iterator[Iterator[int]]:
    """Yield the step numbers, showing a bar with the rate, the time left and what the caller writes into it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn()) as progress:
        yield iter(progress.track(range(num_steps), description=title))


def optimizer_of(*modules: nn.Module, num_steps: int, lr: float) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Return AdamW over the modules' parameters and its learning rate: a short warm-up, then half a cosine to zero."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 50) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / num_steps)))

    return optimizer, LambdaLR(optimizer, scale)


def batches(num_samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches (B,) for ever, each epoch in a new order."""
    while True:
        order = torch.randperm(num_samples, generator=generator)
        yield from torch.split(order, batch_size)[: num_samples // batch_size]


def train_vae(pictures: Tensor, num_steps: int, batch_size: int = 32) -> AutoencoderKL:
    """Return an autoencoder of pictures (N, 3, 32, 32) whose scaled latents have unit standard deviation.

    Loss: mean squared error plus KL_WEIGHT times the KL divergence to N(0, 1) (Kingma and Welling, Auto-Encoding
    Variational Bayes, ICLR 2014, https://arxiv.org/abs/1312.6114). The weight is high beside that of large
    autoencoders: two latent channels come to hold the picture and the others noise, and a decoder that was trained on
    noisy latents forgives a small denoiser its small errors.
    """
    vae = AutoencoderKL(**VAE)
    optimizer, rate = optimizer_of(vae, num_steps=num_steps, lr=2e-3)
    order = batches(len(pictures), batch_size, torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(2)
    with training_steps("Autoencoder", num_steps) as steps:
        for _ in steps:
            batch = pictures[next(order)]
            posterior = vae.encode(batch).latent_dist
            decoded = vae.decode(posterior.sample(noise)).sample
            divergence = posterior.kl().mean() / posterior.mean[0].numel()
            loss = F.mse_loss(decoded, batch) + KL_WEIGHT * divergence
            optimizer.zero_grad()
            torch.autograd.backward([loss])
            nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            rate.step()
    vae.eval().requires_grad_(False)
    posterior = vae.encode(pictures).latent_dist
    error = F.mse_loss(vae.decode(posterior.sample(noise)).sample, pictures).sqrt().item() / 2
    latents = posterior.sample(noise)
    vae.register_to_config(scaling_factor=1.0 / latents.std().item())
    signal = (posterior.mean.var((0, 2, 3)) / latents.var((0, 2, 3))).tolist()
    print(f"autoencoder: root mean square error {error:.3f} of the range, latent std {latents.std().item():.3f}")
    print("share of each latent channel's variance that is signal: " + " ".join(f"{share:.2f}" for share in signal))
    return vae


def train_tokenizer(captions: list[str]) -> CLIPTokenizer:
    """Return a CLIPTokenizer whose byte pairs were merged on the captions; like CLIP's own, it takes any text."""
    splitter = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer, learner.pre_tokenizer = splitter.normalizer, splitter.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, end_of_word_suffix="</w>", show_progress=False)
    learner.train_from_iterator(sorted(set(captions)), trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges)]
    pieces = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=NUM_TOKENS)


def save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write the tokenizer, also as the two files that CLIPTokenizer of transformers 4 reads."""
    tokenizer.save_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = model["vocab"] | tokenizer.get_vocab()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))


def train_text_encoder(
    tokenizer: CLIPTokenizer, captions: list[str], pictures: Tensor, num_steps: int, batch_size: int = 64
) -> CLIPTextModel:
    """Return a text encoder whose states tell what digit a caption names and hardly how it is worded.

    Loss: the symmetric contrastive loss of CLIP (Radford et al., Learning Transferable Visual Models From Natural
    Language Supervision, ICML 2021, section 2.3, https://arxiv.org/abs/2103.00020). Two differences: every picture of
    the same digit is a right answer (a caption says no more than that), and a caption's vector is the mean of its token
    states, so that each state serves the UNet's cross-attention.
    """
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=NUM_TOKENS,
        projection_dim=TEXT_WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    tower = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, TEXT_WIDTH))
    ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids  # (N, T)
    gray = pictures.mean(1, keepdim=True)
    digits = torch.tensor([digit_of_caption(text) for text in captions])
    optimizer, rate = optimizer_of(encoder, tower, num_steps=num_steps, lr=2e-3)
    order = batches(len(ids), batch_size, torch.Generator().manual_seed(3))
    with training_steps("Text encoder", num_steps) as steps:
        for _ in steps:
            index = next(order)
            texts = F.normalize(encoder(ids[index]).last_hidden_state.mean(1), dim=-1)  # (B, D)
            images = F.normalize(tower(gray[index]), dim=-1)  # (B, D)
            logits = texts @ images.T / TEMPERATURE  # (B, B)
            answers = (digits[index, None] == digits[None, index]).float()
            answers = answers / answers.sum(1, keepdim=True)
            loss = (F.cross_entropy(logits, answers) + F.cross_entropy(logits.T, answers)) / 2
            optimizer.zero_grad()
            torch.autograd.backward([loss])
            optimizer.step()
            rate.step()
    encoder.eval().requires_grad_(False)
    report_text_encoder(tokenizer, encoder)
    return encoder


def report_text_encoder(tokenizer: CLIPTokenizer, encoder: CLIPTextModel) -> None:
    """Print how alike the vectors of all captions are, within a digit and between digits."""
    captions = [caption(digit, wording) for digit in range(len(WORDS)) for wording in range(len(WORDINGS))]
    ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
    vectors = F.normalize(encoder(ids).last_hidden_state.mean(1), dim=-1)
    alike = vectors @ vectors.T
    digits = torch.arange(len(WORDS)).repeat_interleave(len(WORDINGS))
    same = digits[:, None] == digits[None, :]
    print(
        f"text encoder: cosine similarity within a digit at least {alike[same].min().item():.2f}, "
        f"between digits at most {alike[~same].max().item():.2f}"
    )


def write_model(out: Path, vae: AutoencoderKL, tokenizer: CLIPTokenizer, encoder: CLIPTextModel) -> None:
    """Write the diffusers folder, with no weights for the UNet."""
    logging.set_verbosity_error()  # the pipeline's import warns about picture processors that nothing here uses
    logging.disable_progress_bar()
    from diffusers import StableDiffusionPipeline

    unet, scheduler = UNet2DConditionModel(**UNET), DDIMScheduler(**SCHEDULER)
    parts = (vae, encoder, tokenizer, unet, scheduler)
    pipeline = StableDiffusionPipeline(
        *parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.save_config(out)
    vae.save_pretrained(out / "vae")
    encoder.save_pretrained(out / "text_encoder")
    save_tokenizer(tokenizer, out / "tokenizer")
    scheduler.save_pretrained(out / "scheduler")
    unet.save_config(out / "unet")
    weights = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    size = unet.num_parameters() / 1e6
    print(f"{out}: {weights / 1e6:.2f} MB of frozen weights; the UNet to train has {size:.2f} M parameters")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Train the frozen parts of the digits example.")
    parser.add_argument("--data", type=Path, default=Path("runs/digits-data/train"), help="image folder (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("examples/digits/model"), help="folder to write (%(default)s)")
    parser.add_argument("--vae-steps", type=int, default=1500, help="autoencoder steps (%(default)s)")
    parser.add_argument("--text-steps", type=int, default=1000, help="text encoder steps (%(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    try:
        images, captions = read_folder(arguments.data)
        pictures = torch.stack([torch.from_numpy(np.array(image)) for image in images])  # (N, H, W, C)
        pictures = pictures.permute(0, 3, 1, 2) / 127.5 - 1.0  # (N, C, H, W)
        tokenizer = train_tokenizer(captions)
        encoder = train_text_encoder(tokenizer, captions, pictures, arguments.text_steps)
        vae = train_vae(pictures, arguments.vae_steps)
        write_model(arguments.out, vae, tokenizer, encoder)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
