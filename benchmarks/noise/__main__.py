"""Trains the digits of `benchmarks.asynchronous` with three batches and several rates: `python -m benchmarks.noise`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.asynchronous.digits import Digits, Tensors, prepare
from diffusionpipe.costs.noise import noise_scale
from diffusionpipe.models.graphs.run import needed_layers, run_layers

PART = 16
"""Samples of a micro-batch."""
REFERENCE, STEPS = 64, 100
"""The batch whose loss after these steps, at a rate of 2e-3, is the loss to reach."""
RATES = {16: (1e-3, 2e-3, 4e-3, 8e-3), 64: (2e-3, 4e-3, 8e-3), 256: (4e-3, 8e-3)}
EVERY = {16: 5, 64: 2, 256: 1}
"""Steps between two looks at the held-out loss."""
WARM_UP = 640
"""Samples in which the rate rises."""


class Trainer:
    """One run. Mutable: its weights change."""

    def __init__(self, digits: Digits, parts: list[Tensors], batch: int, rate: float) -> None:
        self.graph, _ = digits.model()
        self.layers = needed_layers(self.graph.layers, ["loss"], given=tuple(parts[0]))
        self.parameters = [p for p in self.graph.components["unet"].parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.01)
        self.batch, self.rate, self.held_out = batch, rate, digits.validation[0]
        self.measured: list[tuple[float, float]] = []
        self._parts = self._batches(parts)
        self._steps = 0

    def _batches(self, parts: list[Tensors]) -> Iterator[list[Tensors]]:
        count, place = self.batch // PART, 0
        while True:
            yield [parts[(place + i) % len(parts)] for i in range(count)]
            place += count

    def step(self) -> None:
        """One step, with a measurement of the noise scale where there are several micro-batches."""
        self._steps += 1
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1, self._steps * self.batch / WARM_UP)
        self.optimizer.zero_grad()
        parts, small = next(self._parts), 0.0
        for part in parts:
            (self.loss(part) / len(parts)).backward()  # type: ignore[no-untyped-call]
            small = small or self._squares() * len(parts) ** 2
        if len(parts) > 1:
            whole, b, batch = self._squares(), PART, self.batch
            pair = (batch * whole - b * small) / (batch - b), (small - whole) / (1 / b - 1 / batch)
            self.measured.append(pair)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def _squares(self) -> float:
        return sum(float(p.grad.double().square().sum()) for p in self.parameters if p.grad is not None)

    def loss(self, samples: Tensors) -> torch.Tensor:
        """The mean loss of these samples."""
        found = run_layers(self.layers, self.graph.components, samples, targets=["loss"])["loss"]
        return found.sum() / len(found)

    def judged(self) -> float:
        """The loss of held-out digits."""
        with torch.no_grad():
            return float(self.loss(self.held_out))


def main() -> None:
    """Print the noise scale and the table; the argument is a folder for pictures and model."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/noise")
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    digits = Digits(folder, 0)
    parts = [{k: v[i : i + PART] for k, v in one.items()} for one in digits.batches(400) for i in (0, PART)]
    first = Trainer(digits, parts, REFERENCE, 2e-3)
    for _ in range(STEPS):
        first.step()
    target, scale = first.judged(), noise_scale(first.measured[STEPS // 5 :])
    print(f"loss {target:.4f} after {STEPS} steps of {REFERENCE}; noise scale {scale or 0:.0f}", flush=True)
    for batch, rates in RATES.items():
        for rate in rates:
            steps = _steps_to(target, Trainer(digits, parts, batch, rate))
            print(f"batch {batch:3}  rate {rate:g}  steps {steps}  samples {steps and steps * batch}", flush=True)


def _steps_to(target: float, run: Trainer) -> int | None:
    """The steps until a run's held-out loss is as low; None: not within the samples of the first run twice over."""
    for step in range(1, 2 * STEPS * REFERENCE // run.batch + 1):
        run.step()
        if step % EVERY[run.batch] == 0 and run.judged() <= target:
            return step
    return None


if __name__ == "__main__":
    main()
