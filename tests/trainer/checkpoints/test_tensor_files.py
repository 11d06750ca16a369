"""A tensor of any type and form comes back bit for bit, and programs that know safetensors alone find it too."""

import json
import random

import pytest
import torch
from safetensors import safe_open

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.comm.exchange import rows_of
from diffusionpipe.trainer.checkpoints import tensor_files
from diffusionpipe.trainer.checkpoints.checkpoint import read, save, verify
from diffusionpipe.trainer.checkpoints.manifest import FileRecord
from diffusionpipe.trainer.checkpoints.tensor_files import TensorWriting, read_tensors, stored_tensors
from diffusionpipe.trainer.checkpoints.tensor_plans import DTYPES, StoredTensor

FILE, INDEX = "rank-0.safetensors", "tensors.json"
IN_BOTH = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip
AS_BYTES = ["complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def of_type(dtype, *shape, seed=0):
    """A tensor with random bytes, 0 and 1 for bool."""
    kind = DTYPES[dtype]
    chance = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if kind is torch.bool else 256, (*shape, kind.itemsize), generator=chance).to(torch.uint8)
    return data.view(kind).reshape(shape)


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def returned(folder, tensors):
    path = save(folder, 1, tensors, {"step": 1}, keep=1)
    verify(path)
    found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in stored_tensors(path).items()}
    read(path, found)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert bits(found[name]).equal(bits(tensor)), name
    return path


def test_every_type_comes_back_and_safetensors_reads_what_it_can_name(tmp_path):
    given = {f"model.{dtype}": of_type(dtype, 3, 2) for dtype in IN_BOTH + AS_BYTES}
    path = returned(tmp_path, given)
    with safe_open(path / FILE, framework="pt") as file:
        assert set(file.keys()) == set(given)
        assert all(bits(file.get_tensor(name)).equal(bits(tensor)) for name, tensor in given.items())
        kinds = {dtype: file.get_tensor(f"model.{dtype}") for dtype in IN_BOTH}
    assert all((kind.dtype, kind.shape) == (DTYPES[dtype], (3, 2)) for dtype, kind in kinds.items())


def test_every_form_comes_back(tmp_path):
    whole = torch.randn(6, 8)
    returned(
        tmp_path,
        {
            "model.number": torch.tensor(2**40 + 1),
            "model.empty": torch.zeros(0, 5),
            "model.parameter": torch.nn.Parameter(torch.randn(3)),
            "model.transposed": whole.t(),
            "model.every_second": whole[:, ::2],
            "model.part": whole[1:2],
            "model.same_memory": whole,
            "model.expanded": torch.randn(1, 3).expand(4, 3),
            "model.channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "model.conjugate": torch.randn(3, dtype=torch.complex64).conj(),
            "model.negative": torch.randn(3, dtype=torch.complex64).conj().imag,
            'model."quoted"\u00e4\u6c34\n': torch.ones(2),
        },
    )


def test_only_empty_tensors_make_a_file_too(tmp_path):
    returned(tmp_path, {"model.empty": torch.zeros(3, 0)})


@pytest.mark.parametrize("seed", range(10))
def test_random_tensors_are_read_into_memory_in_any_order(tmp_path, seed):
    chance = random.Random(seed)
    given = {
        f"model.{number}": of_type(chance.choice(IN_BOTH), *(chance.randint(0, 4) for _ in range(4)), seed=number)
        for number in range(30)
    }
    path = save(tmp_path, 1, given, {}, keep=1)
    names = chance.sample(sorted(given), 12)
    found = {}
    for name in names:
        tensor = torch.zeros_like(given[name])
        found[name] = tensor.to(memory_format=torch.channels_last) if chance.random() < 0.5 else tensor
    read(path, found)
    assert all(bits(found[name]).equal(bits(given[name])) for name in names)


def test_the_index_says_of_each_tensor_the_same_as_the_headers(tmp_path):
    path = save(tmp_path, 1, {f"model.{dtype}": of_type(dtype, 2, 3) for dtype in IN_BOTH}, {}, keep=1)
    table = rows_of(StoredTensor).read(json.loads((path / INDEX).read_text()))
    content = (path / FILE).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert {one.name: [one.offset - start, one.offset - start + one.length] for one in table} == {
        name: kind["data_offsets"] for name, kind in header.items() if name != "__metadata__"
    }


def test_ten_thousand_small_tensors_come_back(tmp_path):
    returned(tmp_path, {f"optimizer.{number}.step": torch.tensor(float(number)) for number in range(10_000)})


def test_a_file_is_written_and_synced_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_PIECE", 1000)
    synced, calls = [], []
    monkeypatch.setattr(tensor_files.os, "fdatasync", synced.append)
    given = {"model.large": torch.arange(5000.0), "model.small": torch.ones(3)}
    writing = TensorWriting(tmp_path)
    writing.plan(given)
    assert writing.write(given, lambda: calls.append(len(synced))) == (FILE,)
    assert len(synced) == 20
    assert calls == sorted(calls)
    assert len(calls) > 20
    with safe_open(tmp_path / FILE, framework="pt") as file:
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in given.items())


def test_an_interruption_between_two_pieces_ends_the_writing(tmp_path):
    def stop():
        raise RuntimeError("stop")

    writing = TensorWriting(tmp_path)
    writing.plan({"model.w": torch.zeros(10)})
    with pytest.raises(RuntimeError, match="stop"):
        writing.write(None, stop)


@pytest.mark.parametrize("change", ["other size", "other name", "no file"])
def test_a_rank_that_reports_other_files_than_planned_is_refused(tmp_path, change):
    writing = TensorWriting(tmp_path)
    writing.plan({"model.w": torch.zeros(2)})
    (name,) = writing.write()
    record = FileRecord(name=name, size=(tmp_path / name).stat().st_size, blake2b="00")
    wrong = {
        "other size": (FileRecord(name=name, size=record.size + 1, blake2b="00"),),
        "other name": (FileRecord(name="rank-1.safetensors", size=record.size, blake2b="00"),),
        "no file": (),
    }
    with pytest.raises(CheckpointError, match="rank 0 has written other files than planned; check that all ranks"):
        writing.finish([wrong[change]])
    writing.finish([(record,)])


def changed_index(folder, **columns):
    path = save(folder, 1, {"model.w": torch.zeros(100)}, {}, keep=1)
    index = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps(index | {name: [value] for name, value in columns.items()}))
    return path


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"file": "../rank-0.safetensors"}, "is not one of the checkpoint's files"),
        ({"file": "/etc/passwd"}, "is not one of the checkpoint's files"),
        ({"file": "state.json"}, "is not one of the checkpoint's files"),
        ({"dtype": "nn"}, "there is no tensor of type nn"),
        ({"shape": [-100]}, "there is no tensor of type float32 and shape"),
        ({"shape": [99]}, "does not take 400 bytes"),
        ({"offset": -1}, "does not take 400 bytes from byte -1 on"),
        ({"shape": [2**70, 0], "length": 0}, "the table of tensors of step-00000001 cannot be used"),
        ({"shape": [2**40, 2**40], "length": 2**82}, "the table of tensors of step-00000001 cannot be used"),
        ({"shape": "100"}, "column shape holds values of another type"),
        ({"more": 1}, "the columns name, file, offset, length, dtype, shape are needed"),
    ],
)
def test_an_index_that_does_not_describe_tensors_of_the_folder_is_refused(tmp_path, columns, problem):
    with pytest.raises(CheckpointError, match=problem):
        stored_tensors(changed_index(tmp_path, **columns))


def test_an_index_that_leads_past_the_end_of_a_file_is_refused(tmp_path):
    path = changed_index(tmp_path, offset=200)
    with pytest.raises(CheckpointError, match=r"rank-0.safetensors ends within model.w"):
        read_tensors(path, {"model.w": torch.zeros(100)})


def test_without_an_index_the_folder_cannot_be_read(tmp_path):
    path = save(tmp_path, 1, {"model.w": torch.zeros(2)}, {}, keep=1)
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"tensors\.json of step-00000001 is missing"):
        read_tensors(path, {"model.w": torch.zeros(2)})
