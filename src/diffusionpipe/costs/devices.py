"""Devices that a profile can be computed for without having one: their rates and how much of them layers reach.

Peak rates and bandwidths come from the makers' data sheets (dense, not sparse; accumulation in float32). The shares of
them that kernels reach on an A100 are fitted to 8 published speeds of U-Nets in training, for all models and sizes
together; 5 more speeds, of other models, devices and work, were held out. The speeds and the errors of both are in
`benchmarks/anchors`. No training of an Ada or a Hopper was fitted: their shares are the A100's times ratios that were
assumed before the fit (Hopper reaches less of its higher peak, Ada more of its lower one). The CPU's rates and shares
were measured on one core of an AMD EPYC of the Zen 4 generation, on layers of the size of the digits example (large
ones come nearer to the peak).

A device is calibrated where speeds or layers of its own were fitted or measured; all others are from a data sheet, with
shares that were assumed. An RTX 3060 or 3090 has as little peak for its bandwidth as an Ada, so it takes Ada's shares;
A10 and RTX A6000 take the A100's shares, a B200 takes Hopper's. T4 and V100 have no bfloat16 and train in float32,
whose kernels come nearer to their low peak and need no other layout.
"""

from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Bytes, Seconds

GIB = 2**30
TERA = 1e12


class Basis(StrEnum):
    """The source of a device's rates: fitted to measured speeds, or taken from a data sheet."""

    CALIBRATED = "calibrated"
    DATA_SHEET = "data sheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of a device's peak rates, above 0 and at most 1, that its kernels reach, by kind of kernel.

    Raises:
        ValueError: a share is not above 0 and at most 1.
    """

    matmul: float
    """Share of the peak that matrix products reach."""
    convolution: float
    """Share of the peak that convolutions reach on tensors in torch's default layout."""
    convolution_channels_last: float
    """Share of the peak that convolutions reach whose tensors have the layout in which tensor cores compute."""
    attention: float
    """Share of the peak that a forward of attention reaches."""
    attention_backward: float
    """Share of the peak that a backward of attention reaches."""
    memory: float
    """Share of the bandwidth that kernels reach which only move data."""
    norm: float
    """Share of the bandwidth that norms and softmax reach: they read their input twice."""
    convolution_memory: float
    """Share of the bandwidth that convolutions reach."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.__dataclass_fields__ if not 0 < getattr(self, name) <= 1]
        if wrong:
            raise ValueError(f"efficiencies lie between 0 and 1: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The peak rates, memory and overheads of one device, from which the times of layers are computed."""

    name: str
    """The name of the device on the command line."""
    title: str
    """The name of the device in torch and in profiles."""
    device_type: str
    """The type of the device in torch: "cpu" or "cuda"."""
    memory: Bytes
    """The whole memory of the device."""
    usable: Bytes
    """The part of the memory that training may use: the rest after the driver's and torch's own use."""
    basis: Basis
    link: str
    """The usual link between such devices of one machine, a name of `clusters.links.LINKS`; "" for a CPU."""
    has_bfloat16: bool
    """Whether it computes in bfloat16; else training in bfloat16 is planned in float32."""
    float32: float
    """Peak of float32 matrix products in floating-point operations a second."""
    float32_convolution: float
    """Peak of float32 convolutions (TF32 on NVIDIA, which torch switches on for them by default) in operations a
    second."""
    bfloat16: float
    """Peak for layers in bfloat16 or float16, in operations a second; the peak of float32 on cards that lack them."""
    float64: float
    """Peak of matrix products and convolutions in float64 in operations a second."""
    bandwidth: float
    """Bytes a second to and from memory."""
    efficiency: Efficiency
    kernel: Seconds
    """Time that each kernel takes beyond its work: ramp up, ramp down, the gap to the next kernel."""
    ramp: Seconds
    """Extra time of a matrix product or convolution because its last tiles occupy only a part of the device; a shorter
    one takes twice its time."""
    relayouts: int
    """How often a convolution's tensors are read and written again to change their layout, unless they are stored
    channels last."""
    dispatch: Seconds
    """Time that torch takes on the host for each operation; a layer takes at least the sum over its operations."""
    is_asynchronous: bool
    """Whether the host runs ahead of the device, so that dispatching and computing overlap."""

    def peak(self, dtype: str, *, is_convolution: bool) -> float:
        """The peak rate, in floating-point operations a second, of kernels on tensors of `dtype`.

        Types other than float16, bfloat16 and float64 count as float32, which has a rate of its own for convolutions.
        """
        match dtype:
            case "bfloat16" | "float16":
                return self.bfloat16
            case "float64":
                return self.float64
            case _:
                return self.float32_convolution if is_convolution else self.float32


_AMPERE = Efficiency(
    matmul=0.6, convolution=0.29, convolution_channels_last=0.42, attention=0.37, attention_backward=0.26, memory=0.75,
    norm=0.44, convolution_memory=0.75,
)  # fmt: skip
_HOPPER = Efficiency(
    matmul=0.56, convolution=0.23, convolution_channels_last=0.34, attention=0.3, attention_backward=0.2, memory=0.75,
    norm=0.44, convolution_memory=0.75,
)  # fmt: skip
_ADA = Efficiency(
    matmul=0.64, convolution=0.35, convolution_channels_last=0.5, attention=0.4, attention_backward=0.29, memory=0.75,
    norm=0.44, convolution_memory=0.75,
)  # fmt: skip
_FLOAT32 = Efficiency(
    matmul=0.7, convolution=0.55, convolution_channels_last=0.55, attention=0.4, attention_backward=0.3, memory=0.75,
    norm=0.44, convolution_memory=0.75,
)  # fmt: skip
_ZEN = Efficiency(
    matmul=0.4, convolution=0.58, convolution_channels_last=0.58, attention=0.28, attention_backward=0.28, memory=0.5,
    norm=0.5, convolution_memory=0.05,
)  # fmt: skip


def _gpu(
    name: str,
    title: str,
    *,
    memory: int,
    usable: float,
    rates: tuple[float, float, float, float],
    bandwidth: float,
    efficiency: Efficiency,
    link: str,
    basis: Basis = Basis.DATA_SHEET,
) -> DeviceRates:
    """The rates of a GPU from the figures of its data sheet.

    Memory in GB as sold and GiB for training, `rates` in TFLOP/s of float32, TF32, bfloat16 (0: it has none) and
    float64, bandwidth in GB/s.
    """
    float32, tf32, bfloat16, float64 = (rate * TERA for rate in rates)
    return DeviceRates(
        name=name,
        title=title,
        device_type="cuda",
        memory=memory * GIB,
        usable=round(usable * GIB),
        basis=basis,
        link=link,
        has_bfloat16=bfloat16 > 0,
        float32=float32,
        float32_convolution=tf32,
        bfloat16=bfloat16 or float32,  # a card without it trains in float32
        float64=float64,
        bandwidth=bandwidth * 1e9,
        efficiency=efficiency,
        kernel=3e-6,
        ramp=35e-6,
        relayouts=2 if bfloat16 else 0,
        dispatch=10e-6,
        is_asynchronous=True,
    )


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", memory=40, usable=37, rates=(19.5, 156, 312, 19.5), bandwidth=1555,
             efficiency=_AMPERE, link="nvlink3", basis=Basis.CALIBRATED),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", memory=80, usable=75, rates=(19.5, 156, 312, 19.5), bandwidth=2039,
             efficiency=_AMPERE, link="nvlink3", basis=Basis.CALIBRATED),
        _gpu("h100", "NVIDIA H100 80GB HBM3", memory=80, usable=74, rates=(66.9, 494.7, 989.4, 66.9), bandwidth=3352,
             efficiency=_HOPPER, link="nvlink4"),
        _gpu("h200", "NVIDIA H200", memory=141, usable=132, rates=(66.9, 494.7, 989.4, 66.9), bandwidth=4800,
             efficiency=_HOPPER, link="nvlink4"),
        _gpu("b200", "NVIDIA B200", memory=180, usable=168, rates=(75, 1100, 2250, 37), bandwidth=8000,
             efficiency=_HOPPER, link="nvlink5"),
        _gpu("l40s", "NVIDIA L40S", memory=48, usable=42, rates=(91.6, 183, 362, 1.43), bandwidth=864, efficiency=_ADA,
             link="pcie4-direct"),
        _gpu("a6000", "NVIDIA RTX A6000", memory=48, usable=44, rates=(38.7, 77.4, 154.8, 0.6), bandwidth=768,
             efficiency=_AMPERE, link="pcie4-direct"),
        _gpu("a10", "NVIDIA A10", memory=24, usable=21, rates=(31.2, 62.5, 125, 0.49), bandwidth=600,
             efficiency=_AMPERE, link="pcie4-direct"),
        _gpu("t4", "Tesla T4", memory=16, usable=14, rates=(8.1, 8.1, 0, 0.25), bandwidth=320, efficiency=_FLOAT32,
             link="pcie3"),
        _gpu("v100", "Tesla V100-SXM2-16GB", memory=16, usable=14.5, rates=(15.7, 15.7, 0, 7.8), bandwidth=900,
             efficiency=_FLOAT32, link="nvlink2"),
        _gpu("v100-32", "Tesla V100-SXM2-32GB", memory=32, usable=30, rates=(15.7, 15.7, 0, 7.8), bandwidth=900,
             efficiency=_FLOAT32, link="nvlink2"),
        _gpu("rtx3060", "NVIDIA GeForce RTX 3060", memory=12, usable=10.75, rates=(12.7, 12.7, 25.5, 0.2),
             bandwidth=360, efficiency=_ADA, link="pcie4"),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", memory=24, usable=22, rates=(35.6, 35.6, 71.2, 0.56),
             bandwidth=936, efficiency=_ADA, link="pcie4"),
        _gpu("rtx4080", "NVIDIA GeForce RTX 4080", memory=16, usable=14.5, rates=(48.7, 48.7, 97.5, 0.76),
             bandwidth=717, efficiency=_ADA, link="pcie4"),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", memory=24, usable=22, rates=(82.6, 82.6, 165.2, 1.29),
             bandwidth=1008, efficiency=_ADA, link="pcie4"),
        _gpu("rtx5080", "NVIDIA GeForce RTX 5080", memory=16, usable=14.5, rates=(56.3, 56.3, 112.6, 0.88),
             bandwidth=960, efficiency=_ADA, link="pcie5"),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", memory=32, usable=30, rates=(104.8, 104.8, 209.5, 1.64),
             bandwidth=1792, efficiency=_ADA, link="pcie5"),
        DeviceRates(
            name="cpu-1-thread",
            title="AMD EPYC (Zen 4), 1 thread",
            device_type="cpu",
            memory=8 * GIB,
            usable=8 * GIB,
            basis=Basis.CALIBRATED,
            link="",
            has_bfloat16=True,
            float32=125e9,
            float32_convolution=130e9,
            bfloat16=250e9,
            float64=45e9,
            bandwidth=20e9,
            efficiency=_ZEN,
            kernel=8e-6,
            ramp=0.0,
            relayouts=0,
            dispatch=5e-6,
            is_asynchronous=False,
        ),
    )
}  # fmt: skip
"""The rates of all known devices, by name."""


def device_rates(name: str, *, precision: str = "float32") -> DeviceRates:
    """The rates of the device with this name, e.g. "a100-80"; `precision` is the one that it must have.

    Raises:
        ConfigError: no device has the name, or it has no bfloat16 and `precision` is "bfloat16".
    """
    if name not in DEVICES:
        raise ConfigError(f"the device {name!r} is not known; known are {', '.join(DEVICES)}")
    rates = DEVICES[name]
    if precision == "bfloat16" and not rates.has_bfloat16:
        raise ConfigError(f'{rates.title} has no bfloat16; set training.precision to "auto" or "float32"')
    return rates
