"""Devices that a profile can be computed for without having one: their rates and how much of them layers reach.

Peak rates and bandwidths come from the makers' data sheets (dense, not sparse; accumulation in float32). The shares of
them that kernels reach on an A100 are fitted to 8 published speeds of U-Nets in training, for all models and sizes
together; 5 more speeds, of other models, devices and work, were held out. The speeds and the errors of both are in
`benchmarks/anchors`. No training of an Ada or a Hopper was fitted: their shares are the A100's times ratios that were
assumed before the fit (Hopper reaches less of its higher peak, Ada more of its lower one). The CPU's rates and shares
were measured on one core of an AMD EPYC of the Zen 4 generation, on layers of the size of the digits example (large
ones come nearer to the peak).
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
    convolution_channels_last: float
    """Share of the peak that convolutions reach whose tensors have the layout in which tensor cores compute."""
    attention: float
    attention_backward: float
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
    """One device's rates."""

    name: str
    """As the command line calls it."""
    title: str
    """As torch and profiles call it."""
    device_type: str
    """"cpu" or "cuda"."""
    memory: Bytes
    float32: float
    """Peak of float32 matrix products in floating-point operations a second."""
    float32_convolution: float
    """Peak of float32 convolutions (TF32 on NVIDIA, which torch switches on for them by default) in operations a
    second."""
    bfloat16: float
    float64: float
    bandwidth: float
    """Bytes a second to and from memory."""
    efficiency: Efficiency
    kernel: Seconds
    """Time of each kernel beyond its work: ramp up, ramp down, the gap to the next."""
    ramp: Seconds
    """Extra time of a matrix product or convolution because its last tiles occupy only a part of the device; a shorter
    one takes twice its time."""
    relayouts: int
    """How often a convolution's tensors are read and written again to change their layout, unless they are stored
    channels last."""
    dispatch: Seconds
    """Time that torch takes on the host for each operation; a layer is never faster than this for all of its own."""
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
_ZEN = Efficiency(
    matmul=0.4, convolution=0.58, convolution_channels_last=0.58, attention=0.28, attention_backward=0.28, memory=0.5,
    norm=0.5, convolution_memory=0.05,
)  # fmt: skip


def _gpu(
    name: str,
    title: str,
    *,
    memory: int,
    rates: tuple[float, float, float, float],
    bandwidth: float,
    efficiency: Efficiency,
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
        kernel=3e-6,
        ramp=35e-6,
        relayouts=2,
        dispatch=10e-6,
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
            ramp=0.0,
            relayouts=0,
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
