"""From what the ranks of a job see of their machines to the device of each, or to one error."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job import devices
from diffusionpipe.runtime.job.devices import VisibleDevice, agreed_device, device_indices, sight


def node(host, num_devices, ranks, *, asked="auto", has_uuids=True):
    """Ranks that torchrun starts on a machine: each sees all devices."""
    uuids = {rank: f"GPU-{host}-{rank if num_devices > 1 else 0}" for rank in range(ranks)}
    return [
        VisibleDevice(
            host=host,
            local_rank=rank,
            asked=asked,
            num_devices=num_devices,
            uuid=uuids[rank] if has_uuids and rank < max(num_devices, num_devices == 1 and ranks) else "",
        )
        for rank in range(ranks)
    ]


def tasks(host, uuids, *, asked="auto"):
    """Tasks of Slurm with --gpus-per-task=1: each sees its own device alone."""
    return [
        VisibleDevice(host=host, local_rank=rank, asked=asked, num_devices=1, uuid=uuid)
        for rank, uuid in enumerate(uuids)
    ]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (node("a", 0, 1), (None,)),
        (node("a", 0, 4), (None,) * 4),
        (node("a", 8, 4, asked="cpu"), (None,) * 4),
        (node("a", 1, 1), (0,)),
        (node("a", 4, 4), (0, 1, 2, 3)),
        (node("a", 8, 4, asked="cuda"), (0, 1, 2, 3)),
        (node("a", 2, 2) + node("b", 2, 2), (0, 1, 0, 1)),
        (node("a", 2, 2, has_uuids=False), (0, 1)),
        (tasks("a", "pqrs"), (0, 0, 0, 0)),
        (tasks("a", "pq", asked="cuda") + tasks("b", "rs", asked="cuda"), (0, 0, 0, 0)),
        ([replace(one, host_id=str(rank)) for rank, one in enumerate(tasks("a", "pp"))], (0, 0)),
    ],
    ids=[
        "a machine without GPUs",
        "four ranks on it",
        "CPUs beside GPUs",
        "one rank",
        "one node",
        "half of a node",
        "two nodes",
        "torch that knows no UUIDs",
        "one device for each task",
        "tasks on two nodes",
        "ranks that are to share a device",
    ],
)
def test_the_devices_of_ranks(seen, expected):
    assert device_indices(seen) == expected


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (node("a", 2, 4), ["ranks 2, 3 found no CUDA device: start at most one rank per device"]),
        (node("a", 4, 4) + node("b", 0, 4), ["ranks 4, 5, 6, 7 found no CUDA device"]),
        (tasks("a", "p") + node("a", 0, 3)[1:], ["ranks 1, 2 found no CUDA device", "a device of its own"]),
        (node("a", 0, 2, asked="cuda"), ["no rank finds a CUDA device: check the driver"]),
        (node("a", 1, 2), ["ranks 0, 1 would share one CUDA device: start at most one rank per device"]),
        (tasks("a", "pqp"), ["ranks 0, 2 would share one CUDA device"]),
        (node("a", 2, 1) + node("b", 2, 1, asked="cpu"), ["rank 1 asked for the CPU and the others did not"]),
        (node("a", 4, 32), ["ranks 4, 5, 6, 7, 8, 9, 10, 11 and 20 more found", "and 16 more ranks"]),
    ],
    ids=[
        "more ranks than devices",
        "a node without",
        "a device for the first task only",
        "asked for and not there",
        "two ranks, one device",
        "one device for two tasks",
        "different --device",
        "many ranks",
    ],
)
def test_devices_that_do_not_suit_each_other_are_one_error_with_the_table_of_ranks(seen, says):
    with pytest.raises(ConfigError) as caught:
        device_indices(seen)
    text = str(caught.value)
    assert all(words in text for words in says), text
    assert "  rank  host  local rank  asked for  CUDA devices  device" in text
    assert caught.value.is_common


def test_the_table_shows_what_each_rank_sees():
    with pytest.raises(ConfigError) as caught:
        device_indices(node("a", 1, 1, asked="cuda") + node("second", 0, 2, asked="auto")[1:])
    assert str(caught.value).splitlines()[1:] == [
        "  rank  host    local rank  asked for  CUDA devices  device",
        "  0     a       0           cuda       1             cuda:0 GPU-a-0",
        "  1     second  1           auto       0             missing",
    ]


def agree_in_threads(seen):
    store = HashStore()

    def agree(rank):
        try:
            return agreed_device(store, rank, len(seen), seen[rank])
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(len(seen)) as pool:
        return list(pool.map(agree, range(len(seen))))


def test_all_ranks_come_to_the_same_answer():
    assert agree_in_threads(node("a", 2, 2)) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert agree_in_threads(node("a", 0, 3)) == [torch.device("cpu")] * 3
    one, other = agree_in_threads(node("a", 1, 2))
    assert isinstance(one, ConfigError)
    assert str(one) == str(other)


class Cuda:
    """What torch says of CUDA on a machine with so many devices."""

    def __init__(self, count):
        self.count, self.current = count, None

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index

    def get_device_properties(self, index):
        return type("Properties", (), {"uuid": f"number-{index}"})


@pytest.mark.parametrize(
    ("count", "local_rank", "index"), [(0, 0, None), (1, 0, 0), (1, 3, 0), (4, 2, 2), (4, 5, None)]
)
def test_a_rank_looks_at_the_device_that_it_would_take_and_at_no_other(monkeypatch, count, local_rank, index):
    monkeypatch.setattr(torch, "cuda", cuda := Cuda(count))
    monkeypatch.setenv("NCCL_HOSTID", "one")
    found = sight(devices.AUTO, local_rank)
    assert (found.index, cuda.current) == (index, index)
    assert found.uuid == ("" if index is None else f"number-{index}")
    assert found.host_id == "one"
    assert sight("cpu", local_rank).num_devices == 0


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r"there is no device 'tpu'; choose auto, cpu or cuda"):
        sight("tpu", 0)
