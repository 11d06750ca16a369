"""Mutated command lines: honest ones with some values changed."""

from pathlib import Path
from random import Random

from fuzz.mutation import WORDS
from fuzz.originals import FILES, Case, Originals
from fuzz.readers import command

_PLANNED = ("--profile", str(FILES / "profile.json"), "--cluster", str(FILES / "cluster.json"))


def arguments(originals: Originals, random: Random, place: Path) -> Case:
    """A command with one to three of its options changed or added."""
    place.mkdir(parents=True, exist_ok=True)
    words, options = random.choice((_schedule, _schedule, _compare, _instance, _plan, _cluster, _sample))(
        originals, random, place
    )
    for option in random.sample(options, random.randint(1, min(3, len(options)))):
        words = [*words, option, _path(random, place) if option in _OUTPUTS else _value(random)]
    return Case(command(*words))


_OUTPUTS = ("--out", "--png", "--perfetto", "--keep", "--like", "--prompts", "--profile", "--cluster")


def _value(random: Random) -> str:
    words = [word for word in WORDS if "\0" not in word]  # no command line holds it
    return random.choice((*words, *map(str, range(-2, 40)), "10000000000", "x" * 300))


def _path(random: Random, place: Path) -> str:
    names = (".", "x.json", "x.png", "no/x.json", "x" * 300 + ".png", "\udcff.png")
    return random.choice((*(str(place / name) for name in names), "", "/dev/full", "/dev/null", "/proc/self/mem"))


def _schedule(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    from diffusionpipe.schedules import REGISTRY

    words = ["schedule", random.choice((*REGISTRY, "", "x")), "--ranks", "4", "--microbatches", "8"]
    times = ["--forward", "--input-grad", "--weight-grad", "--comm"]
    return words, ["--ranks", "--microbatches", *times, "--out", "--png", "--perfetto"]


def _compare(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    words = ["schedule", "compare", "--ranks", "2", "--microbatches", "3"]
    return words, ["--forward", "--input-grad", "--weight-grad", "--comm", "--memory"]


def _instance(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    words = ["schedule", "instance", *_PLANNED, "--batch", "8", "--microbatches", "4", "--out", str(place / "x.json")]
    return words, ["--batch", "--microbatches", "--placement", "--seconds", "--out", "--profile", "--cluster"]


def _plan(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    words = ["plan", *_PLANNED, "--batch", "8"]
    return words, ["--batch", "--optimizer", "--out", "--profile", "--cluster"]


def _cluster(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    return ["cluster", random.choice(("l40sx8", "l40sx8:2", f"l40sx8:{_value(random)}", _value(random)))], ["--out"]


def _sample(originals: Originals, random: Random, place: Path) -> tuple[list[str], list[str]]:
    words = ["sample", str(originals.model), "--prompt", "a", "--steps", "1", "--resolution", "8", "--device", "cpu"]
    options = ["--count", "--steps", "--guidance", "--seed", "--resolution", "--scheduler", "--device", "--negative"]
    return [*words, "--out", str(place / "grid.png")], [*options, "--label", "--keep", "--like", "--prompts", "--out"]
