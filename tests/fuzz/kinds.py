"""Mutated inputs of every kind."""

import json
from hashlib import blake2b
from pathlib import Path
from random import Random

from fuzz import folders, words
from fuzz.mutation import WORDS, changed_table, encoded, mutated_bytes, mutated_json, mutated_text
from fuzz.originals import FILES, INSTANCE, KEYS, Case, Kind, Originals, rewrite
from fuzz.readers import command, load_checkpoint, load_run_recipe, materialize_unet, open_model, scan_clips, scan_data
from kit.tiny_clips import CODECS

from diffusionpipe.trainer.checkpoints.checkpoint import resolve


def recipe(originals: Originals, random: Random, place: Path) -> Case:
    return Case(
        load_run_recipe(rewrite(place / "recipe.toml", encoded(mutated_text(originals.recipe, random), random))),
        ("recipe.toml",),
    )


def overrides(originals: Originals, random: Random, place: Path) -> Case:
    words = tuple(f"{random.choice(KEYS)}={random.choice(WORDS)}" for _ in range(random.randint(1, 2)))
    words = tuple(mutated_text(word, random) if random.random() < 0.2 else word for word in words)
    return Case(load_run_recipe(rewrite(place / "recipe.toml", originals.recipe), words), ("recipe.toml",))


def plan(originals: Originals, random: Random, place: Path) -> Case:
    path = rewrite(place / "plan.json", encoded(mutated_json((FILES / "plan.json").read_text(), random), random))
    rewrite(place / "profile.json", (FILES / "profile.json").read_text())
    if random.random() < 0.5:
        words = ("--profile", FILES / "profile.json", "--cluster", FILES / "cluster.json")
        return Case(command("plan", "show", path, *words), ("plan.json", "profile.json"))
    return Case(command("plan", "show", path), ("plan.json",))


def profile(originals: Originals, random: Random, place: Path) -> Case:
    path = rewrite(place / "profile.json", encoded(mutated_json((FILES / "profile.json").read_text(), random), random))
    words = ("--profile", path, "--cluster", FILES / "cluster.json")
    if random.random() < 0.3:
        out = ("--batch", 8, "--microbatches", 4, "--out", place / "instance.json")
        return Case(command("schedule", "instance", *words, *out), ("profile.json",))
    return Case(command("plan", "show", FILES / "plan.json", *words), ("profile.json",))


def cluster(originals: Originals, random: Random, place: Path) -> Case:
    path = rewrite(place / "cluster.json", encoded(mutated_json((FILES / "cluster.json").read_text(), random), random))
    if random.random() < 0.5:
        return Case(command("cluster", path), ("cluster.json",))
    words = ("--profile", FILES / "profile.json", "--cluster", path)
    return Case(command("plan", "show", FILES / "plan.json", *words), ("cluster.json",))


def schedule_csv(originals: Originals, random: Random, place: Path) -> Case:
    from diffusionpipe.ir.torch_csv import schedule_to_csv
    from diffusionpipe.schedules import REGISTRY

    text = schedule_to_csv(REGISTRY[random.choice(("gpipe", "1f1b", "interleaved", "zb-h1"))](2, 4))
    path = rewrite(place / "schedule.csv", encoded(mutated_text(text, random), random))
    return Case(command("schedule", path), ("schedule.csv",))


def schedule_json(originals: Originals, random: Random, place: Path) -> Case:
    from diffusionpipe.ir.files import schedule_to_text
    from diffusionpipe.schedules import REGISTRY

    text = schedule_to_text(REGISTRY[random.choice(("gpipe", "dapple-a", "zb-v", "chimera"))](2, 4))
    path = rewrite(place / "schedule.json", encoded(mutated_json(text, random), random))
    return Case(command("schedule", path), ("schedule.json",))


def instance(originals: Originals, random: Random, place: Path) -> Case:
    path = rewrite(place / "instance.json", encoded(mutated_json(json.dumps(INSTANCE), random), random))
    return Case(command("schedule", "search", path), ("instance.json", "memory_limit:"))


def metadata(originals: Originals, random: Random, place: Path) -> Case:
    data = originals.copy("data", place)
    name = random.choice(("metadata.jsonl", "metadata.jsonl", "p.txt"))
    text = (data / name).read_text(encoding="utf-8")
    lines = text.split("\n")
    at = random.randrange(len(lines))
    lines[at] = mutated_json(lines[at], random) if lines[at].startswith("{") else mutated_text(lines[at], random)
    rewrite(data / name, encoded("\n".join(lines), random))
    return Case(lambda: scan_data(data), (name, "metadata", "/data"))


def picture(originals: Originals, random: Random, place: Path) -> Case:
    data = originals.copy("data", place)
    name = random.choice(("000.png", "p.jpg", "p.webp", "p.bmp", "p.png"))
    rewrite(data / name, mutated_bytes((data / name).read_bytes(), random))
    return Case(lambda: scan_data(data), (name,))


def clip(originals: Originals, random: Random, place: Path) -> Case:
    data = originals.copy("clips", place)
    name = f"c.{random.choice(list(CODECS))}"
    rewrite(data / name, mutated_bytes((data / name).read_bytes(), random))
    return Case(lambda: scan_clips(data), (name,))


def model_folder(originals: Originals, random: Random, place: Path) -> Case:
    model = originals.copy("model", place)
    names = [path for path in sorted(model.rglob("*.json")) if "special" not in path.name]
    path = random.choice(names)
    rewrite(path, encoded(mutated_json(path.read_text(encoding="utf-8"), random), random))
    return Case(lambda: open_model(model), ("model_index.json", "config.json", "/model"))


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
    rewrite(path, data)
    return Case(lambda: materialize_unet(model), ("safetensors", "unet"))


def checkpoint(originals: Originals, random: Random, place: Path) -> Case:
    """In half of the cases the manifest is mended, as someone would who wants a changed file to be read."""
    form = random.choice(("run", "old"))
    run = originals.copy(form, place)
    path = resolve(run, "latest")
    own = {"run": ("tensors.json", "rank-0.safetensors"), "old": (".metadata", "__0_0.distcp")}
    name = random.choice(("manifest.json", "state.json", *own[form]))
    data = (path / name).read_bytes()
    if name.endswith(".json"):
        data = mutated_json(data.decode(), random).encode("utf-8", "surrogatepass")
    elif name == ".metadata" and random.random() < 0.6:
        data = changed_table(data, random)
    else:
        data = mutated_bytes(data, random)
    rewrite(path / name, data)
    if name != "manifest.json" and random.random() < 0.5:
        manifest = json.loads((path / "manifest.json").read_text())
        record = next(record for record in manifest["files"] if record["name"] == name)
        record.update(size=len(data), blake2b=blake2b(data, digest_size=32).hexdigest())
        rewrite(path / "manifest.json", json.dumps(manifest))
    return Case(lambda: load_checkpoint(run), ("step-00000001", "manifest.json", name))


KINDS: dict[str, tuple[Kind, int]] = {
    "recipes": (recipe, 300),
    "overrides": (overrides, 180),
    "plans": (plan, 220),
    "profiles": (profile, 160),
    "clusters": (cluster, 130),
    "schedules, CSV": (schedule_csv, 130),
    "schedules, JSON": (schedule_json, 130),
    "instances": (instance, 130),
    "metadata": (metadata, 130),
    "model folders": (model_folder, 200),
    "safetensors": (safetensors, 90),
    "pictures": (picture, 110),
    "clips": (clip, 60),
    "checkpoints": (checkpoint, 130),
    "run folders": (folders.run_folder, 80),
    "odd files": (folders.odd_file, 120),
    "kept pictures": (folders.kept_picture, 40),
    "messages": (folders.message, 50),
    "arguments": (words.arguments, 110),
}
"""Each with its number of cases, together 2,500."""
