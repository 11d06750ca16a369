"""One rank of the tests of checkpoints: python checkpoint_ranks.py SCENARIO FOLDER RANK SIZE.

Each scenario returns what the rank saw; it is left as FOLDER/<scenario>-<rank>.json for the test to judge.
"""

import errno
import json
import os
import resource
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.job.shared_file_system import check_shared_file_system
from diffusionpipe.trainer.checkpoints import checkpoint, tensor_files
from diffusionpipe.trainer.checkpoints.checkpoint import load, save


def whole(step: int) -> dict[str, torch.Tensor]:
    """All tensors of the pretended model after `step` steps, of several types; "shared" has a replica on each rank."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a.weight": torch.randn(5, 3, generator=generator),
        "model.b.weight": torch.randn(4, 2, 3, generator=generator, dtype=torch.float64).transpose(0, 1),
        "model.c.weight": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.a.weight.step": torch.tensor(float(step)),
        "optimizer.b.weight.count": torch.tensor([step, 2**40 + 1]),
        "shared.weight": torch.randn(2, 2, generator=generator),
    }


def part(tensors: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """What one of `size` ranks holds."""
    names = list(tensors)
    return {name: tensors[name] for i, name in enumerate(names) if i % size == rank or name.startswith("shared")}


def error_of(action) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def save_on_two(run: Path, rank: int, size: int) -> dict[str, object]:
    def save_step(step: int, tensors=None) -> None:
        save(run, step, part(whole(step), rank, size) if tensors is None else tensors, {"step": step}, keep=2)

    seen: dict[str, object] = {}
    for step in (1, 2, 3):
        save_step(step)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failing = mock.patch.object(tensor_files.TensorWriting, "write", side_effect=full)
    with failing if rank == 1 else mock.MagicMock():
        seen["no space on rank 1"] = error_of(lambda: save_step(4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000 if rank == 1 else limits[0], limits[1]))
    seen["real limit on rank 1"] = error_of(lambda: save_step(5, {f"model.{rank}": torch.zeros(100_000)}))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with mock.patch.object(checkpoint, "write_manifest", side_effect=full):
        seen["no space for the manifest"] = error_of(lambda: save_step(6))
    seen["unequal replicas"] = error_of(lambda: save_step(7, {"shared": torch.zeros(1 + rank)}))
    seen["folders after failures"] = sorted(os.listdir(run / "checkpoints"))
    save_step(3)
    seen["shared folder"] = error_of(lambda: check_shared_file_system(run))
    seen["folder of each rank"] = error_of(lambda: check_shared_file_system(run / f"node-{rank}", patience=0.1))
    lone = run.with_name("lone")  # a rank may hold nothing, e.g. a stage without adapters
    save(lone, 1, whole(1) if rank == 0 else {}, {"step": 1}, keep=2)
    dist.barrier()
    seen["left in the folder"] = sorted(path.name for path in run.iterdir() if path.name.startswith("."))
    return seen


def load_on_three(run: Path, rank: int, size: int) -> dict[str, object]:
    path = checkpoint.resolve(run, "latest")
    wanted = part(whole(3), rank, size)
    found = {name: torch.full_like(tensor, -1) for name, tensor in wanted.items()}
    state = load(path, found)
    extra = {"model.new.weight": torch.zeros(1)} if rank == 2 else {}
    seen: dict[str, object] = {
        "step": state["step"],
        "equal": all(torch.equal(found[name], wanted[name]) for name in wanted),
        "missing": error_of(lambda: load(path, {**found, **extra})),
    }
    dist.barrier()
    if rank == 0:
        data = next(path.glob("rank-1*"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    dist.barrier()
    before = {name: tensor.clone() for name, tensor in found.items()}
    seen["flipped"] = error_of(lambda: load(path, found))
    seen["untouched"] = all(torch.equal(found[name], before[name]) for name in before)
    return seen


def die_while_saving(run: Path, rank: int, size: int) -> dict[str, object]:
    tensors = part(whole(9), rank, size)
    if rank == 1:
        with mock.patch.object(tensor_files.TensorWriting, "write", side_effect=lambda *_: os._exit(9)):
            save(run, 9, tensors, {}, keep=2)
    try:
        save(run, 9, tensors, {}, keep=2)
    except Exception as error:
        return {"error": type(error).__name__}
    return {"error": None}


def main() -> None:
    scenario, folder, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    store = dist.FileStore(str(folder / f"{scenario}.store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    seen = globals()[scenario](folder / "run", rank, size)
    (folder / f"{scenario}-{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # a peer may be dead: no orderly farewell


if __name__ == "__main__":
    main()
