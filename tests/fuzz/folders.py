"""Mutated folders of runs, files that are none or in another encoding, kept pictures, and messages between ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzz.mutation import encoded, mutated_bytes, mutated_json, mutated_text
from fuzz.originals import RUN_FILES, Case, Originals, rewrite
from fuzz.readers import command, load_checkpoint, load_run_recipe, materialize_unet, open_model, scan_data, use_run


def run_folder(originals: Originals, random: Random, place: Path) -> Case:
    """A run's recipe, metrics, list of skipped pictures or lock, changed by a person or cut off by a crash."""
    run = originals.copy("run", place)
    name = random.choice((*RUN_FILES, "recipe.toml"))
    lines = (run / name).read_text(encoding="utf-8").split("\n")
    at = random.randrange(len(lines))
    is_json = lines[at].startswith("{")
    lines[at] = mutated_json(lines[at], random) if is_json else mutated_text(lines[at], random)
    rewrite(run / name, encoded("\n".join(lines), random))
    return Case(lambda: use_run(run), (name, "/run"))


def odd_file(originals: Originals, random: Random, place: Path) -> Case:
    """A file of some input becomes something else: a folder, a FIFO, a link, a device, empty, or is gone."""
    name, choose, read = random.choice(_INPUTS)
    folder = originals.copy(name, place)
    path = random.choice([path for path in sorted(folder.rglob("*")) if choose(path)])
    path.unlink()
    random.choice(_ODD)(path)
    return Case(lambda: read(folder), (path.name, path.parent.name, str(folder)))


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


_INPUTS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path], object]], ...] = (
    ("model", lambda path: path.suffix == ".json", open_model),
    ("model", lambda path: path.suffix == ".safetensors" and path.parent.name == "unet", materialize_unet),
    ("data", _is_file, scan_data),
    ("run", lambda path: _is_file(path) and path.parent.name.startswith("step-"), load_checkpoint),
    ("run", lambda path: _is_file(path) and path.parent.name == "run", use_run),
    ("files", lambda path: path.name == "plan.json", lambda folder: command("plan", "show", folder / "plan.json")()),
    ("files", lambda path: path.name == "cluster.json", lambda folder: command("cluster", folder / "cluster.json")()),
    ("files", lambda path: path.name == "recipe.toml", lambda folder: load_run_recipe(folder / "recipe.toml")()),
)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    """A FIFO that a user names is read, as `<(command)` of a shell is one: then a writer must be there."""
    if path.parent.name == "files":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)


def _closed(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


_ODD: tuple[Callable[[Path], object], ...] = (
    Path.mkdir, _fifo, _circle, _link("/dev/zero"), _link("/dev/full"), _link("/dev/null"), _link("nowhere"),
    _link("/proc/self/mem"), _link(".."), _closed, lambda path: path.write_bytes(b""), lambda path: None,
    lambda path: path.write_bytes(bytes(2**20)), lambda path: path.write_text("x" * 2**20),
    lambda path: path.write_text("{}", encoding="utf-16"),
)  # fmt: skip


def kept_picture(originals: Originals, random: Random, place: Path) -> Case:
    """A picture that says of itself how it was drawn, in other words than we would write."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.inference.sample_file import SampleOrigin, _texts, read_origin
    from diffusionpipe.trainer.recipe import RecipePrecision

    settings = SamplingSettings(steps=3, guidance=2.5, seed=4, scheduler={"_class_name": "DDIMScheduler", "eta": [1]})
    origin = SampleOrigin(
        settings=settings, prompt="a", resolution=8, precision=RecipePrecision.FLOAT32, model="m", weights="average"
    )
    texts = _texts(origin)
    key = random.choice(tuple(texts))
    is_json = texts[key].startswith("{")
    texts[key] = mutated_json(texts[key], random) if is_json else mutated_text(texts[key], random)
    chunks = PngInfo()
    for name, text in texts.items():
        chunks.add_itxt(name, text.encode("utf-8", "replace").decode())
    place.mkdir(parents=True, exist_ok=True)
    path = place / "kept.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=chunks)
    if random.random() < 0.4:
        rewrite(path, mutated_bytes(path.read_bytes(), random))
    return Case(lambda: read_origin(path), ("kept.png",))


def message(originals: Originals, random: Random, place: Path) -> Case:
    """A message of another rank."""
    from diffusionpipe.runtime.comm.exchange import PLAIN, _message, _read, form_of, optional, rows_of
    from diffusionpipe.trainer.checkpoints.manifest import FileRecord
    from diffusionpipe.trainer.checkpoints.tensor_plans import Offer, StoredTensor

    records = (FileRecord(name="a", size=1, blake2b="00"),) * 2
    form, value = random.choice((
        (form_of(tuple[FileRecord, ...]), records),
        (rows_of(FileRecord), records),
        (optional(form_of(str)), "x"),
        (form_of(tuple[tuple[int, ...], ...]), ((1, 2), (3,))),
        (PLAIN, {"a": [1, None, "x"]}),
        (rows_of(Offer), ()),
        (rows_of(StoredTensor), ()),
    ))  # fmt: skip
    text = _message(value, form).text
    data = mutated_bytes(text, random) if random.random() < 0.3 else b""
    data = data or mutated_json(text.decode(), random).encode("utf-8", "surrogatepass")
    return Case(lambda: _read(data, form, 1), ("rank 1 has sent",))
