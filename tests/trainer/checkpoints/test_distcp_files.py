"""Checkpoints of before, in files of torch.distributed.checkpoint, are read as torch itself reads them."""

import json
import os
import pickle

import pytest
import torch
from kit.forked import completed
from kit.old_checkpoints import save_by_torch

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints.checkpoint import load, read, verify
from diffusionpipe.trainer.checkpoints.tensor_files import stored_tensors

TABLE, DATA = ".metadata", "__0_0.distcp"
TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def tensors():
    chance = torch.Generator().manual_seed(0)
    found = {
        f"model.{dtype}".replace("torch.", ""): torch.randint(0, 2, (3, 4), generator=chance).to(dtype)
        for dtype in TYPES
    }
    last = torch.randn(2, 3, 4, 5, generator=chance).to(memory_format=torch.channels_last)
    return found | {
        "model.e4": torch.randn(7, generator=chance).to(torch.float8_e4m3fn),
        "model.last": last,
        "model.parameter": torch.nn.Parameter(torch.randn(4, generator=chance)),
        "optimizer.empty": torch.zeros(0, 5),
        "optimizer.step": torch.tensor(3.0),
        "ema.view": torch.randn(10, generator=chance)[3:6],
    }


@pytest.fixture
def old(tmp_path):
    return save_by_torch(tmp_path, 1, tensors(), {"step": 1})


def empty(given):
    return {name: torch.empty_like(tensor, requires_grad=False).zero_() for name, tensor in given.items()}


def rewrite_table(folder, change):
    table = pickle.loads((folder / TABLE).read_bytes())
    change(table)
    (folder / TABLE).write_bytes(pickle.dumps(table))


def test_every_type_has_its_values_and_the_state_is_read(old):
    verify(old)
    given = tensors()
    found = empty(given)
    assert load(old, found) == {"step": 1}
    assert all(torch.equal(found[name].view(torch.uint8), tensor.detach().view(torch.uint8)) if tensor.dtype is
               torch.float8_e4m3fn else torch.equal(found[name], tensor) for name, tensor in given.items())  # fmt: skip
    assert {name: (t.shape, t.dtype) for name, t in stored_tensors(old).items()} == {
        name: (t.shape, t.dtype) for name, t in given.items()
    }


def test_torch_finds_the_same_in_it(old, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(old, tmp_path / "torch.pt")
    wanted = torch.load(tmp_path / "torch.pt")
    found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in stored_tensors(old).items()}
    read(old, found)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name].double(), wanted[name].double()) for name in found if "complex" not in name)


def test_it_is_read_without_torchs_own_reader(old):
    """Its private classes may change, and then old checkpoints must open as before."""
    script = (
        "import sys, torch; from pathlib import Path; sys.modules['torch.distributed.checkpoint'] = None\n"
        "from diffusionpipe.trainer.checkpoints.checkpoint import read\n"
        f"found = {{'optimizer.step': torch.tensor(0.0)}}; read(Path({str(old)!r}), found); print(found)"
    )
    done = completed(["-c", script])
    assert (done.returncode, done.stdout) == (0, "{'optimizer.step': tensor(3.)}\n")


def test_a_table_that_would_run_code_is_refused(old, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    (old / TABLE).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="has no place in a checkpoint's metadata"):
        stored_tensors(old)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("place", ["../../secret.distcp", "/etc/passwd", "state.json"])
def test_a_table_that_leads_out_of_the_folder_is_refused(old, place):
    def mislead(table):
        for info in table.storage_data.values():
            info.relative_path = place

    rewrite_table(old, mislead)
    with pytest.raises(CheckpointError, match="is not one of the checkpoint's files"):
        read(old, {})


@pytest.mark.parametrize(
    ("field", "value"), [("size", 5), ("size", None), ("size", torch.Size([-1])), ("properties", None)]
)
def test_a_table_that_does_not_describe_its_tensors_is_refused(old, field, value):
    rewrite_table(old, lambda table: setattr(table.state_dict_metadata["model.last"], field, value))
    with pytest.raises(CheckpointError, match=r"does not describe 'model\.last' as a tensor"):
        read(old, {})


@pytest.mark.parametrize("value", [None, 3, {"state_dict_metadata": {}}, [torch.float32], torch.Size([2])])
def test_a_pickle_of_something_else_is_no_table(old, value):
    (old / TABLE).write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match=r"\.metadata of step-00000001 cannot be used: it is incomplete"):
        stored_tensors(old)


def test_a_place_that_holds_another_tensor_is_refused(old):
    def exchange(table):
        places = {index.fqn: info for index, info in table.storage_data.items()}
        for name, other in (("model.float32", "model.float64"), ("model.float64", "model.float32")):
            index = next(index for index in table.storage_data if index.fqn == name)
            table.storage_data[index] = places[other]

    rewrite_table(old, exchange)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp does not hold model.float32"):
        read(old, {"model.float32": torch.zeros(3, 4)})


def test_compressed_files_are_refused(old):
    def compress(table):
        for info in table.storage_data.values():
            object.__setattr__(info, "transform_descriptors", ["zstd"])

    rewrite_table(old, compress)
    with pytest.raises(CheckpointError, match="is compressed or encrypted, which DiffusionPipe does not do"):
        read(old, {})


@pytest.mark.parametrize("name", [TABLE, DATA])
def test_a_damaged_file_is_named(old, name):
    data = bytearray((old / name).read_bytes())
    data[len(data) // 2] ^= 1
    (old / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} was altered"):
        verify(old)


def test_a_later_form_is_refused_with_the_forms_that_can_be_read(old):
    content = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(content | {"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3; this version of DiffusionPipe reads formats 1 and 2"):
        verify(old)
