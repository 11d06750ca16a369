"""Copies of weights on a GPU's stream of their own race neither with updates nor with the host that reads them."""

from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from kit.streams import BACKEND, Stream, Streams, devices_with_streams

from diffusionpipe.trainer.checkpoints import host_copy
from diffusionpipe.trainer.checkpoints.host_copy import HostCopy


class TorchWithStreams(ModuleType):
    """torch, on whose GPU there are streams that are watched."""

    cuda = SimpleNamespace(
        Stream=lambda _: Stream("copies"),
        stream=BACKEND.stream,
        current_stream=lambda _: BACKEND.current_stream(),
        set_device=lambda _: None,
    )

    def __getattr__(self, name):
        return getattr(torch, name)


def races_of(steps=6):
    """The reports of a training that copies its weights and its optimizer's state every second step."""
    weights = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    host, copies = HostCopy(torch.device("cuda")), {}
    with Streams() as streams:
        for step in range(steps):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            host.protect()
            optimizer.step()
            if step % 2 == 0:
                state = {f"{i}.{k}": v for i, w in enumerate(weights) for k, v in optimizer.state[w].items()}
                copies = host.start({"0": weights[0].detach(), "1": weights[1].detach(), **state})
                for copy in copies.values():
                    streams.keep_on_host(copy)
            else:
                host.complete()
                assert all(float(copy.flatten()[0]) >= 0 for copy in copies.values())
    return streams.races


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, None),
        ("protect", "_foreach_mul_.Scalar on compute races with read by aten.copy_.default on copies"),
        ("complete", "_local_scalar_dense.default on host races with written by aten.copy_.default on copies"),
    ],
)
def test_updates_wait_for_copies_and_readers_too(missing, words):
    with (
        devices_with_streams(),
        mock.patch.object(host_copy, "torch", TorchWithStreams("torch")),
        mock.patch.object(host_copy, "lock_pages", return_value=0),
        mock.patch.object(host_copy, "unlock_pages"),
        mock.patch.object(HostCopy, missing or "_", create=True),
    ):
        races = races_of()
    assert [race for race in races if words in race] if words else races == []
