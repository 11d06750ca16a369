"""The times of single layers in training: one mark after each layer's forward, while it is switched on."""

import torch

from diffusionpipe.ir.recorded import LayerTime
from diffusionpipe.runtime.recording.trace import recorder_for


class LayerWatch:
    """Records how long each layer's forward takes, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._recorder = recorder_for(device)
        self._noted: list[tuple[str, int, bool, int]] = []
        """Layer, samples, whether gradients were on, and the number of the mark at its end; the one before it is at its
        start."""

    def start(self) -> None:
        """Forget all recorded times, and record from now on."""
        self._recorder.reset()
        self._noted.clear()
        self.is_on = True

    def begin(self) -> None:
        """Record the time at which the first layer of an action begins."""
        self._recorder.mark()

    def end(self, name: str, samples: int) -> None:
        """Record the end of a layer's forward on `samples` samples; the next layer begins at the same time."""
        self._noted.append((name, samples, torch.is_grad_enabled(), self._recorder.issued()))
        self._recorder.mark()

    def stop(self) -> list[LayerTime]:
        """Stop recording, after a GPU's work; returns layer, samples and seconds of each forward since `start`."""
        self.is_on = False
        times = self._recorder.times() if self._noted else []
        return [
            LayerTime(name=name, samples=samples, seconds=times[mark] - times[mark - 1], keeps=keeps)
            for name, samples, keeps, mark in self._noted
        ]
