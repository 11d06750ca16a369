"""What is recorded of a training, the machine that it ran on, and how losses are compared."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import diffusers
import torch
import transformers

SIMD = re.compile(r"(sse|ssse|avx|fma|f16c|amx|sve|asimd|neon)\w*")
TOLERANCE = 1e-12
"""Relative, in float64, where the machines differ."""


def machine() -> dict[str, object]:
    """All that the last bits of a loss depend on here."""
    vendor, flags = "unknown", list[str]()
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            vendor = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = sorted(flag for flag in value.split() if SIMD.fullmatch(flag))
    return {
        "vendor": vendor,
        "features": flags,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def differences(recorded: Sequence[str], found: Sequence[float], precision: str, *, is_same_machine: bool) -> list[str]:
    """Where losses differ from the recorded ones, which are `float.hex` texts; [] where they are equal.

    On the same kind of machine every bit counts. Elsewhere float64 must agree to `TOLERANCE`, and float32 says nothing.
    """
    if len(recorded) != len(found):
        return [f"{len(recorded)} losses were recorded, there are {len(found)}"]
    lines = []
    for step, (text, loss) in enumerate(zip(recorded, found, strict=True), start=1):
        expected = float.fromhex(text)
        if is_same_machine:
            is_equal = loss.hex() == text
        else:
            is_equal = precision == "float32" or abs(loss - expected) <= TOLERANCE * abs(expected)
        if not is_equal:
            off = abs(loss / expected - 1)
            lines.append(f"step {step}, {precision}: {expected!r} was recorded, {loss!r} found, {off:.1e} off")
    return lines


def is_same(recorded: Mapping[str, object], here: Mapping[str, object]) -> bool:
    """Whether losses must be equal bit for bit."""
    return dict(recorded) == dict(here)
