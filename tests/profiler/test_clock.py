"""Times of a device and of the host that issues its kernels, on a device that computes beside its host."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from kit.asynchronous_device import PlantedQueue

from diffusionpipe.profiler.clock import Clock
from diffusionpipe.profiler.passes import time_passes

LAYERS = {  # the device's time of the forward, its times of I and W, and the host's times of the three
    "launch bound": (1e-4, 3e-4, 1e-4, 4e-3, 6e-3, 2e-3),
    "host of a long layer": (0.03, 0.04, 0.02, 0.025, 0.03, 0.01),
    "device bound": (0.05, 0.06, 0.04, 1e-4, 2e-4, 1e-4),
    "as long": (1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3),
}
KERNELS = 20


@dataclass(frozen=True)
class PlantedRun:
    """A `LayerRun` whose kernels take known times."""

    name: str
    queue: PlantedQueue
    reads: dict = field(default_factory=dict)
    weights: tuple = ()
    trained: tuple = (0,)
    differentiable: tuple = (0,)

    @property
    def layer(self):
        return SimpleNamespace(name=self.name, writes=("x",))

    def _compute(self, device, host):
        self.queue.compute([device / KERNELS] * KERNELS, host)

    def forward(self):
        self._compute(LAYERS[self.name][0], LAYERS[self.name][3])
        return (torch.zeros(()),)

    def gradients_like(self, outputs):
        return [0], [0]

    def input_grad(self, outputs, gradients):
        self._compute(LAYERS[self.name][1], LAYERS[self.name][4])

    def backward(self, outputs, gradients):
        _, input_grad, weight_grad, _, host_input_grad, host_weight_grad = LAYERS[self.name]
        self._compute(input_grad + weight_grad, host_input_grad + host_weight_grad)


def planted_times(clock):
    return time_passes([PlantedRun(name, clock.queue) for name in LAYERS], clock, repeats=3)


def test_planted_times_of_device_and_host_are_found_though_the_host_is_slower():
    clock = Clock(torch.device("cpu"), PlantedQueue())
    for name, found in planted_times(clock).items():
        forward, input_grad, weight_grad, *hosts = LAYERS[name]
        assert (found.forward, found.input_grad, found.weight_grad) == pytest.approx(
            (forward, input_grad, weight_grad), rel=0.01
        ), name
        assert (found.host.forward, found.host.input_grad, found.host.weight_grad) == pytest.approx(hosts, rel=0.01)


def test_a_device_that_does_not_sleep_long_enough_shows_its_hosts_time():
    queue = PlantedQueue()
    clock = Clock(torch.device("cpu"), queue)
    run = PlantedRun("launch bound", queue)
    _, took = clock.apart(run.forward)
    assert clock.was_late
    assert took.device > 10 * LAYERS[run.name][0]
    clock.was_late = False
    _, took = clock.apart(run.forward)
    assert not clock.was_late
    assert took.device == pytest.approx(LAYERS[run.name][0], rel=0.01)


def test_a_processor_that_is_host_and_device_has_no_time_of_its_own_as_host():
    clock = Clock(torch.device("cpu"))
    _, took = clock.apart(lambda: sum(range(1000)))
    assert took.device > 0
    assert took.host == 0
