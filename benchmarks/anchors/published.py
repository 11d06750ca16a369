"""Published measurements of diffusion models on GPUs: what computed profiles are compared with.

A profile that is computed (`profiler.analytic`) stands on assumptions about how much of a device's rates real kernels
reach (`costs.devices`). An anchor is a speed that others have measured and published, with the settings that they
name, so the error of a computed profile is a number (`python -m benchmarks.anchors`).

Speeds count samples of one device. What a source does not say is None here, not a guess.
"""

from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.costs.mode import EAGER, Mode


class Work(StrEnum):
    """What a measured device did for each sample."""

    TRAIN = "train"
    """Forward and backward of the trained part; what is frozen was encoded before."""
    TRAIN_AND_ENCODE = "train and encode"
    """The same, and the frozen part's forward."""
    SAMPLE = "sample"
    """A picture: text, all denoising steps with guidance (two samples in each), decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One published speed."""

    name: str
    model: str
    """As `models.opening.configured` calls it."""
    resolution: int
    work: Work
    device: str
    """As `costs.devices` calls it."""
    batch: int | None
    """Samples that a device runs at a time; None where the source does not say."""
    mode: Mode
    precision: str = "float16"
    """Of the matrix products: autocast in training, the weights' own when sampling."""
    is_checkpointed: bool = False
    """Whether activations are recomputed in the backward."""
    speed: float
    """Samples a second on one device."""
    source: str
    steps: int = 0
    """Denoising steps of a sample."""
    is_held_out: bool = False
    """Whether no assumption may be fitted to it: it shows what the others are worth."""
    note: str = ""


_MOSAIC = "https://github.com/mosaicml/diffusion, README, throughput of 8 A100s (commit 066e68f)"
_MOSAIC_MODE = Mode(is_channels_last=True, has_fused_norms=True)
_NEMO = (
    "https://docs.nvidia.com/nemo-framework/user-guide/24.12/multimodalmodels/text2image/controlnet/perf.html, "
    "training on one A100"
)
_FAST_DIT = "https://github.com/chuanyangjin/fast-DiT, README, improved training performance (commit 0d14a15)"
_OPEN_DIT = "NUS-HPC-AI-Lab/OpenDiT (VideoSys), speed of training on 8 H800s, local batch 128: 1.3 steps a second"
_FAL = "https://github.com/fal-ai/stable-diffusion-benchmarks, README, A100 80 GB SXM (commit 0490f69)"


def _control_net(name: str, batch: int, mode: Mode, speed: float) -> Anchor:
    return Anchor(
        name=name, model="controlnet-sd-1.5", resolution=512, work=Work.TRAIN_AND_ENCODE, device="a100-80", batch=batch,
        mode=mode, speed=speed, source=_NEMO,
    )  # fmt: skip


def _sampled(name: str, model: str, resolution: int, mode: Mode, seconds: float) -> Anchor:
    return Anchor(
        name=name, model=model, resolution=resolution, work=Work.SAMPLE, device="a100-80", batch=1, mode=mode,
        speed=1 / seconds, steps=50, source=_FAL, is_held_out=True,
    )  # fmt: skip


ANCHORS = (
    Anchor(name="SD 2 U-Net, 256 px", model="sd-2.1", resolution=256, work=Work.TRAIN, device="a100-40", batch=None,
           mode=_MOSAIC_MODE, speed=1100 / 8, source=_MOSAIC, note="optimizer and gradient sums included"),
    Anchor(name="SD 2 U-Net, 512 px", model="sd-2.1", resolution=512, work=Work.TRAIN, device="a100-40", batch=None,
           mode=_MOSAIC_MODE, speed=290 / 8, source=_MOSAIC, note="optimizer and gradient sums included"),
    Anchor(name="SD 2 with encoders, 512 px", model="sd-2.1", resolution=512, work=Work.TRAIN_AND_ENCODE,
           device="a100-40", batch=None, mode=_MOSAIC_MODE, speed=290 / 8 / 1.4, source=_MOSAIC,
           note='"a 1.4x increase in time" with latents computed while training'),
    _control_net("ControlNet, batch 8, plain attention", 8, Mode(has_flash_attention=False), 11.68),
    _control_net("ControlNet, batch 8", 8, EAGER, 16.40),
    _control_net("ControlNet, batch 8, channels last", 8, Mode(is_channels_last=True), 20.24),
    _control_net("ControlNet, batch 8, compiled", 8, Mode(is_channels_last=True, is_compiled=True), 21.52),
    _control_net("ControlNet, batch 32, compiled", 32, Mode(is_channels_last=True, is_compiled=True), 27.20),
    Anchor(name="DiT-XL/2, 256 px", model="dit-xl-2-256", resolution=256, work=Work.TRAIN, device="a100-80", batch=128,
           mode=Mode(has_flash_attention=False), is_checkpointed=True, speed=0.84 * 128, source=_FAST_DIT,
           is_held_out=True, note="the source does not say which A100, nor on how many"),
    Anchor(name="DiT-XL/2 with encoder, 256 px", model="dit-xl-2-256", resolution=256, work=Work.TRAIN_AND_ENCODE,
           device="a100-80", batch=128, mode=Mode(has_flash_attention=False), is_checkpointed=True, speed=0.56 * 128,
           source=_FAST_DIT, is_held_out=True, note="the source does not say which A100, nor on how many"),
    Anchor(name="DiT-XL/2, 256 px, H800", model="dit-xl-2-256", resolution=256, work=Work.TRAIN_AND_ENCODE,
           device="h100", batch=128, precision="bfloat16", mode=Mode(has_fused_norms=True), speed=1.3 * 128,
           source=_OPEN_DIT, is_held_out=True, note="an H800 computes like an H100"),
    _sampled("SDXL sampled, 1024 px", "sdxl", 1024, EAGER, 5.933),
    _sampled("SDXL sampled, 1024 px, compiled", "sdxl", 1024, Mode(is_channels_last=True, is_compiled=True), 5.132),
)  # fmt: skip
"""All anchors; those that are not held out may be fitted to."""
