"""Devices that a profile can be computed for without having one: their rates and how much of them layers reach.

Peak rates and bandwidths are those of the makers' data sheets (dense, not sparse; accumulation in float32). The shares
of them that real kernels reach are assumptions of this table, for eager torch 2.x with its default settings and the
shapes of diffusion models: cuBLAS reaches 70 to 85 % of the peak at sizes of 1k and above, cuDNN's convolutions in
NCHW half of it (they transpose first), fused attention 40 to 60 % forward and less backward, kernels bound by memory
80 to 85 %. Beside 13 published speeds of training and sampling, computed ones are 1.04 to 2.6 times too high, 1.4 in
the median (`costs.anchors`, `benchmarks/anchors`); measure where it matters.
The CPU's rates and shares were measured on one core of an AMD EPYC of the Zen 4 generation, on layers of the size of
the digits example (large ones come nearer to the peak).
"""

from dataclasses import dataclass

from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Bytes, Seconds

GIB = 2**30
TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peak rates that kernels reach."""

    matmul: float
    convolution: float
    attention: float
    attention_backward: float
    memory: float
    convolution_memory: float
    """Of the bandwidth, by convolutions: they change the layout of what they read and write."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.__dataclass_fields__ if not 0 < getattr(self, name) <= 1]
        if wrong:
            raise ValueError(f"efficiencies lie between 0 and 1: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """One device's rates."""

    name: str
    """As the command line calls it."""
    title: str
    """As torch and profiles call it."""
    device_type: str
    """"cpu" or "cuda"."""
    memory: Bytes
    float32: float
    """Peak of float32 matrix products in floating-point operations a second,"""
    float32_convolution: float
    """of float32 convolutions (TF32 on NVIDIA, which torch switches on for them by default),"""
    bfloat16: float
    float64: float
    bandwidth: float
    """Bytes a second to and from memory."""
    efficiency: Efficiency
    kernel: Seconds
    """What each kernel takes beyond its work: ramp up, ramp down, the gap to the next."""
    dispatch: Seconds
    """What torch takes on the host for each operation; a layer is never faster than that for all of its own."""
    is_asynchronous: bool
    """Whether the host runs ahead of the device, so that dispatching and computing overlap."""

    def peak(self, dtype: str, *, is_convolution: bool) -> float:
        """Floating-point operations a second of a kernel on tensors of this dtype."""
        match dtype:
            case "bfloat16" | "float16":
                return self.bfloat16
            case "float64":
                return self.float64
            case _:
                return self.float32_convolution if is_convolution else self.float32


_AMPERE = Efficiency(
    matmul=0.75, convolution=0.5, attention=0.55, attention_backward=0.45, memory=0.85, convolution_memory=0.5
)
_HOPPER = Efficiency(
    matmul=0.7, convolution=0.4, attention=0.45, attention_backward=0.35, memory=0.85, convolution_memory=0.5
)
_ADA = Efficiency(
    matmul=0.8, convolution=0.6, attention=0.6, attention_backward=0.5, memory=0.85, convolution_memory=0.5
)
_ZEN = Efficiency(
    matmul=0.4, convolution=0.58, attention=0.28, attention_backward=0.28, memory=0.5, convolution_memory=0.05
)


def _gpu(
    name: str,
    title: str,
    *,
    memory: int,
    rates: tuple[float, float, float, float],
    bandwidth: float,
    efficiency: Efficiency,
    kernel: Seconds = 3e-6,
) -> DeviceRates:
    """A device from the figures of its data sheet.

    Memory in GB as sold, `rates` in TFLOP/s of float32, TF32, bfloat16 and float64, bandwidth in GB/s.
    """
    float32, tf32, bfloat16, float64 = (rate * TERA for rate in rates)
    return DeviceRates(
        name=name,
        title=title,
        device_type="cuda",
        memory=memory * GIB,
        float32=float32,
        float32_convolution=tf32,
        bfloat16=bfloat16,
        float64=float64,
        bandwidth=bandwidth * 1e9,
        efficiency=efficiency,
        kernel=kernel,
        dispatch=5e-6,
        is_asynchronous=True,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", memory=40, rates=(19.5, 156, 312, 19.5), bandwidth=1555,
             efficiency=_AMPERE),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", memory=80, rates=(19.5, 156, 312, 19.5), bandwidth=2039,
             efficiency=_AMPERE),
        _gpu("h100", "NVIDIA H100 80GB HBM3", memory=80, rates=(66.9, 494.7, 989.4, 66.9), bandwidth=3352,
             efficiency=_HOPPER),
        _gpu("h200", "NVIDIA H200", memory=141, rates=(66.9, 494.7, 989.4, 66.9), bandwidth=4800,
             efficiency=_HOPPER),
        _gpu("l40s", "NVIDIA L40S", memory=48, rates=(91.6, 183, 362, 1.43), bandwidth=864, efficiency=_ADA),
        _gpu("rtx4080", "NVIDIA GeForce RTX 4080", memory=16, rates=(48.7, 48.7, 97.5, 0.76), bandwidth=717,
             efficiency=_ADA),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", memory=24, rates=(82.6, 82.6, 165.2, 1.29), bandwidth=1008,
             efficiency=_ADA),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", memory=32, rates=(104.8, 104.8, 209.5, 1.64), bandwidth=1792,
             efficiency=_ADA),
        DeviceRates(
            name="cpu-1-thread",
            title="AMD EPYC (Zen 4), 1 thread",
            device_type="cpu",
            memory=8 * GIB,
            float32=125e9,
            float32_convolution=130e9,
            bfloat16=250e9,
            float64=45e9,
            bandwidth=20e9,
            efficiency=_ZEN,
            kernel=8e-6,
            dispatch=5e-6,
            is_asynchronous=False,
        ),
    )
}  # fmt: skip
"""Known devices by name."""


def device_rates(name: str) -> DeviceRates:
    """The device of that name.

    Raises:
        ConfigError: it is not known.
    """
    if name not in DEVICES:
        raise ConfigError(f"the device {name!r} is not known; known are {', '.join(DEVICES)}")
    return DEVICES[name]
