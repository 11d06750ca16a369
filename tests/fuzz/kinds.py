"""What is mutated and by what it is read: for each kind of input an honest original and the code that users reach."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

import torch
from fuzz.mutation import WORDS, mutated_bytes, mutated_json, mutated_text
from tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe import cli
from diffusionpipe.trainer.checkpoint import load, resolve, save

FILES = Path(__file__).parents[1] / "files"
HALF = {"forward": 2, "input_grad": 1.5, "weight_grad": 1, "activation": 2, "kept_after_input_grad": 1}
INSTANCE = {
    "ranks": 2, "microbatches": 4, "placement": "any", "stages": [HALF] * 4, "comm": 0.5, "memory_limit": [9, 9],
    "objective": "makespan", "seconds": 0.05,
}  # fmt: skip
RECIPE = """[model]
path = "{model}"
train = ["unet"]

[objective]
kind = "auto"
snr_gamma = 5.0

[data]
train = "{data}"
validation = "{data}"
resolution = 16
caption_dropout = 0.1
random_crop = true
flip = false
workers = 0

[training]
steps = 6
batch = 4
seed = 0
clip_norm = 1.0
ema_decay = 0.9
precision = "float32"
activation_checkpointing = ["unet.down*"]

[optimizer]
name = "AdamW"
learning_rate = 2e-3
arguments = {{ weight_decay = 0.01, betas = [0.9, 0.99] }}

[learning_rate]
schedule = "cosine"
warmup_steps = 2

[lora]
rank = 4
alpha = 2.0

[pipeline]
stages = 2
replicas = [1, 1]
data_parallel = 1
schedule = "1f1b"
microbatches = 2
encode_chunk = 2
fill = false
sharded = false
offload_frozen = false

[validation]
every = 3
samples = 4
timesteps = [0.25, 0.5]

[sampling]
every = 3
prompts = ["abc", "d"]
negative_prompt = "x"
steps = 2
guidance = 1.5
scheduler = "DDIMScheduler"
seed = 3

[checkpoint]
every = 2
keep = 2

[run]
folder = "{run}"
trackers = []
"""
KEYS = tuple(
    f"{section.split(']')[0]}.{line.split(' =')[0]}"
    for section in RECIPE.split("[")[1:]
    for line in section.split("\n")[1:]
    if " = " in line and not line.startswith(" ")
)


@dataclass(frozen=True)
class Case:
    """One mutated input."""

    act: Callable[[], object]
    names: tuple[str, ...] = ()
    """A refusal has one of them in its text: the file, or the option."""


@dataclass(frozen=True)
class Originals:
    """What is mutated; `folder` holds it."""

    folder: Path
    model: Path
    data: Path
    run: Path
    """A run's folder with one checkpoint."""
    recipe: str

    def copy(self, name: str, to: Path) -> Path:
        """A copy of the file or folder; large files are shared."""
        source = self.folder / name
        return Path(shutil.copytree(source, to / name, copy_function=os.link))


Kind = Callable[[Originals, Random, Path], Case]


def make_originals(folder: Path) -> Originals:
    """Honest inputs."""
    model = save_stable_diffusion(folder / "model")
    data = save_pictures(folder / "data", count=4)
    _save_further_pictures(data)
    save(folder / "run", 1, {"model.a": torch.zeros(50), "ema.b": torch.ones(3, 4)}, {"step": 1, "seed": 0}, keep=1)
    recipe = RECIPE.format(model=model, data=data, run=folder / "new")
    return Originals(folder=folder, model=model, data=data, run=folder / "run", recipe=recipe)


def _save_further_pictures(data: Path) -> None:
    from PIL import Image

    with Image.open(data / "000.png") as picture:
        for name in ("p.jpg", "p.webp", "p.bmp"):
            picture.save(data / name)
            (data / name).with_suffix(".txt").write_text("abc", encoding="utf-8")
        picture.convert("P").save(data / "p.png", transparency=0)


def _rewrite(path: Path, content: str | bytes) -> Path:
    """Replaces a file, which may be a hard link to an original."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def _load(recipe: Path, overrides: tuple[str, ...] = ()) -> Callable[[], object]:
    from diffusionpipe.cli.recipe_checks import checks_of_run
    from diffusionpipe.trainer.recipe_file import load_recipe, recipe_to_toml

    return lambda: recipe_to_toml(load_recipe(recipe, overrides, checks_of_run(2, None)))


def _command(*words: object) -> Callable[[], object]:
    return lambda: cli.main([str(word) for word in words])


def recipe(originals: Originals, random: Random, place: Path) -> Case:
    return Case(_load(_rewrite(place / "recipe.toml", mutated_text(originals.recipe, random))), ("recipe.toml",))


def overrides(originals: Originals, random: Random, place: Path) -> Case:
    words = tuple(f"{random.choice(KEYS)}={random.choice(WORDS)}" for _ in range(random.randint(1, 2)))
    words = tuple(mutated_text(word, random) if random.random() < 0.2 else word for word in words)
    return Case(_load(_rewrite(place / "recipe.toml", originals.recipe), words), ("recipe.toml",))


def plan(originals: Originals, random: Random, place: Path) -> Case:
    path = _rewrite(place / "plan.json", mutated_json((FILES / "plan.json").read_text(), random))
    _rewrite(place / "profile.json", (FILES / "profile.json").read_text())
    if random.random() < 0.5:
        words = ("--profile", FILES / "profile.json", "--cluster", FILES / "cluster.json")
        return Case(_command("plan", "show", path, *words), ("plan.json", "profile.json"))
    return Case(_command("plan", "show", path), ("plan.json",))


def profile(originals: Originals, random: Random, place: Path) -> Case:
    path = _rewrite(place / "profile.json", mutated_json((FILES / "profile.json").read_text(), random))
    words = ("--profile", path, "--cluster", FILES / "cluster.json")
    if random.random() < 0.3:
        out = ("--batch", 8, "--microbatches", 4, "--out", place / "instance.json")
        return Case(_command("schedule", "instance", *words, *out), ("profile.json",))
    return Case(_command("plan", "show", FILES / "plan.json", *words), ("profile.json",))


def cluster(originals: Originals, random: Random, place: Path) -> Case:
    path = _rewrite(place / "cluster.json", mutated_json((FILES / "cluster.json").read_text(), random))
    if random.random() < 0.5:
        return Case(_command("cluster", path), ("cluster.json",))
    words = ("--profile", FILES / "profile.json", "--cluster", path)
    return Case(_command("plan", "show", FILES / "plan.json", *words), ("cluster.json",))


def schedule_csv(originals: Originals, random: Random, place: Path) -> Case:
    from diffusionpipe.ir.torch_csv import schedule_from_csv, schedule_to_csv
    from diffusionpipe.schedules import REGISTRY

    text = schedule_to_csv(REGISTRY[random.choice(("gpipe", "1f1b", "interleaved", "zb-h1"))](2, 4))
    path = _rewrite(place / "schedule.csv", mutated_text(text, random))
    return Case(lambda: _use(schedule_from_csv(path.read_text(encoding="utf-8"))), ("CSV", "stage", "worker", "F0"))


def schedule_json(originals: Originals, random: Random, place: Path) -> Case:
    from diffusionpipe.ir.files import read_schedule, schedule_to_text
    from diffusionpipe.schedules import REGISTRY

    text = schedule_to_text(REGISTRY[random.choice(("gpipe", "dapple-a", "zb-v", "chimera"))](2, 4))
    path = _rewrite(place / "schedule.json", mutated_json(text, random))
    return Case(lambda: _use(read_schedule(path)), ("schedule.json", "stage", "worker", "pipeline"))


def _use(schedule: object) -> None:
    from diffusionpipe.ir.schedule import Schedule
    from diffusionpipe.simulator.comparison import WorkerCosts, measure
    from diffusionpipe.timing.legal import check
    from diffusionpipe.viz import explained_sketch

    assert isinstance(schedule, Schedule)
    check(schedule)
    costs = WorkerCosts(forward=1, input_grad=1, weight_grad=1, latency=0)
    explained_sketch(measure("it", schedule, costs).timeline, width=80)


def instance(originals: Originals, random: Random, place: Path) -> Case:
    path = _rewrite(place / "instance.json", mutated_json(json.dumps(INSTANCE), random))
    return Case(_command("schedule", "search", path), ("instance.json",))


def metadata(originals: Originals, random: Random, place: Path) -> Case:
    data = originals.copy("data", place)
    name = random.choice(("metadata.jsonl", "metadata.jsonl", "p.txt"))
    text = (data / name).read_text(encoding="utf-8")
    lines = text.split("\n")
    at = random.randrange(len(lines))
    lines[at] = mutated_json(lines[at], random) if lines[at].startswith("{") else mutated_text(lines[at], random)
    _rewrite(data / name, "\n".join(lines))
    return Case(lambda: _scan(data), (name, "metadata", "/data"))


def _scan(data: Path) -> None:
    from diffusionpipe.trainer.dataset import scan
    from diffusionpipe.trainer.images import load_pixels

    found = scan(data, "text")
    for index in range(len(found.samples)):
        load_pixels(found.path(index), resolution=16)


def picture(originals: Originals, random: Random, place: Path) -> Case:
    data = originals.copy("data", place)
    name = random.choice(("000.png", "p.jpg", "p.webp", "p.bmp", "p.png"))
    _rewrite(data / name, mutated_bytes((data / name).read_bytes(), random))
    return Case(lambda: _scan(data), (name,))


def model_folder(originals: Originals, random: Random, place: Path) -> Case:
    model = originals.copy("model", place)
    names = [path for path in sorted(model.rglob("*.json")) if "special" not in path.name]
    path = random.choice(names)
    _rewrite(path, mutated_json(path.read_text(encoding="utf-8"), random))
    return Case(lambda: _open(model), ("model_index.json", "config.json", "/model"))


def _open(model: Path) -> None:
    from diffusionpipe.models.folder import scheduler_config
    from diffusionpipe.trainer.drawing import open_tokenizer
    from diffusionpipe.trainer.sampling import Spacing, build_scheduler, set_times
    from diffusionpipe.trainer.session import build_model

    recipe = recipe_of(model, model, model / "run")
    build_model(recipe, model, "cpu")
    open_tokenizer(model)
    config = scheduler_config(model)
    set_times(build_scheduler(config), config, 4, Spacing())


def safetensors(originals: Originals, random: Random, place: Path) -> Case:
    model = originals.copy("model", place)
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    if random.random() < 0.5:
        header = mutated_json(data[8:size].decode(), random).encode("utf-8", "surrogatepass")
        data = len(header).to_bytes(8, "little") + header + data[size:]
    else:
        data = mutated_bytes(data[:size], random) + data[size:]
    _rewrite(path, data)
    return Case(lambda: _materialize(model), ("safetensors", "unet"))


def _materialize(model: Path) -> None:
    from diffusionpipe.models.folder import build_graph, weight_sources
    from diffusionpipe.models.objective import ObjectiveSettings
    from diffusionpipe.models.weights import materialize

    graph = build_graph(model, objective=ObjectiveSettings(), resolution=16)
    names = [layer.name for layer in graph.layers]
    materialize(graph, names, weight_sources(model, graph), device="cpu", dtype=torch.float32, seed=0)


def checkpoint(originals: Originals, random: Random, place: Path) -> Case:
    """In half of the cases the manifest is mended, as someone would who wants a changed file to be read."""
    run = originals.copy("run", place)
    path = resolve(run, "latest")
    name = random.choice(("manifest.json", "state.json", ".metadata", "__0_0.distcp"))
    data = (path / name).read_bytes()
    if name.endswith(".json"):
        data = mutated_json(data.decode(), random).encode("utf-8", "surrogatepass")
    else:
        data = mutated_bytes(data, random)
    _rewrite(path / name, data)
    if name != "manifest.json" and random.random() < 0.5:
        manifest = json.loads((path / "manifest.json").read_text())
        record = next(record for record in manifest["files"] if record["name"] == name)
        record.update(size=len(data), blake2b=blake2b(data, digest_size=32).hexdigest())
        _rewrite(path / "manifest.json", json.dumps(manifest))

    def read() -> None:
        load(resolve(run, "latest"), {"model.a": torch.zeros(50), "ema.b": torch.zeros(3, 4)})

    return Case(read, ("step-00000001", "manifest.json", name))


def arguments(originals: Originals, random: Random, place: Path) -> Case:
    from diffusionpipe.schedules import REGISTRY

    def number() -> str:
        return random.choice((*WORDS, *map(str, range(-2, 40))))

    def small() -> str:
        return random.choice((*map(str, range(-1, 9)), "64", "10000000000"))

    name = random.choice((*REGISTRY, "", "x"))
    words = ["schedule", name, "--ranks", small(), "--microbatches", small()]
    for option in random.sample(("--forward", "--input-grad", "--weight-grad", "--comm"), random.randint(0, 3)):
        words += [option, number()]
    if random.random() < 0.3:
        words += [
            "--out",
            random.choice((str(place), str(place / "x.json"), str(place / "no" / "x.json"), "/dev/full")),
        ]
    return Case(_command(*words))


KINDS: dict[str, tuple[Kind, int]] = {
    "recipes": (recipe, 430),
    "overrides": (overrides, 200),
    "plans": (plan, 270),
    "profiles": (profile, 180),
    "clusters": (cluster, 150),
    "schedules, CSV": (schedule_csv, 150),
    "schedules, JSON": (schedule_json, 150),
    "instances": (instance, 150),
    "metadata": (metadata, 150),
    "model folders": (model_folder, 220),
    "safetensors": (safetensors, 100),
    "pictures": (picture, 120),
    "checkpoints": (checkpoint, 120),
    "arguments": (arguments, 110),
}
"""Each with its number of cases, together 2,500."""
