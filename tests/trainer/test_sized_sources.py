"""Sources that have their own sizes: folders, shards and tables, their shares, and runs on several layouts."""

import io
import json
import random
import tarfile
from collections import Counter

import pytest
from kit.crew import crew_of
from kit.sized_pictures import save_sized
from kit.tiny_runs import losses_of, recipe_of, save_stable_diffusion, train, train_here
from pydantic import ValidationError

from diffusionpipe.errors import CheckpointError, ConfigError, DataError
from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.scan.dataset import Condition
from diffusionpipe.trainer.data.scan.scanning import examine_place
from diffusionpipe.trainer.data.scan.sources import joined_of
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, areas_of, assign
from diffusionpipe.trainer.recipe import DataSection, load_recipe
from diffusionpipe.trainer.recipe.size_rules import rules_of, sizes_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_source_has_the_sizes_that_it_would_have_alone():
    """On random pictures and sources, epoch by epoch of a common cycle."""
    draw = random.Random(0)
    for _ in range(40):
        stated = [draw.sample([64, 96, 128, "96x64", "64x96", "128x64"], draw.randint(1, 4)) for _ in range(3)]
        rules = SizeRules(areas=(), of_sources=tuple(areas_of(own, None) for own in stated))
        pictures = [(draw.randint(64, 300), draw.randint(64, 300)) for _ in range(30)]
        sources = [draw.randrange(3) for _ in pictures]
        found = assign(pictures, rules, 1, sources)
        expected = Counter()
        groups = {areas: [n for n, own in enumerate(rules.of_sources) if own == areas] for areas in rules.of_sources}
        for areas, numbers in groups.items():
            places = [place for place, source in enumerate(sources) if source in numbers]
            alone = SizeRules(areas=areas)
            if places:
                own = assign([pictures[place] for place in places], alone, 1)
                for share in own.shares:
                    for epoch in range(found.cycle):
                        members = share.members[epoch % own.cycle]
                        expected.update((share.size, epoch, places[member]) for member in members)
        assert expected == Counter(
            (share.size, epoch, member)
            for share in found.shares
            for epoch, members in enumerate(share.members)
            for member in members
        )


def test_sources_without_sizes_of_their_own_change_nothing():
    rules = SizeRules(areas=areas_of([64, 96], None))
    pictures = [(80 + 7 * number, 100) for number in range(20)]
    assert assign(pictures, rules, 2, [number % 3 for number in range(20)]) == assign(pictures, rules, 2)


SMALL, LARGE, WIDE, BROAD = Clip.square(64), Clip.square(128), Clip(width=96, height=64), Clip(width=192, height=128)


def test_too_few_pictures_of_a_size_go_to_sizes_of_their_own_source_alone():
    wide, square = (300, 200), (200, 200)
    rules = SizeRules(areas=(), of_sources=(((BROAD, LARGE),), ((WIDE, SMALL),)), most_cut=0.2)
    sources = [0] * 4 + [1] * 7
    found = assign([wide] * 4 + [wide] * 3 + [square] * 4, rules, 4, sources)
    assert [share.size for share in found.shares if share.repeats] == [WIDE], (
        "not given to 192 x 128, which cuts nothing"
    )
    with pytest.raises(
        DataError, match=r"96 x 64 pixels has 2 pictures where 4 .* the nearest size would cut 33 % away"
    ):
        assign([wide] * 4 + [wide] * 2 + [square] * 5, rules, 4, sources)
    shared = SizeRules(areas=(), of_sources=(((WIDE, LARGE),), ((WIDE, SMALL),)), most_cut=0.4)
    found = assign([square] * 4 + [wide] + [wide] + [square] * 4, shared, 4, [0] * 5 + [1] * 5)
    assert found.joined == ((WIDE, LARGE, 1), (WIDE, SMALL, 1))
    assert {share.size: share.members for share in found.shares} == {
        LARGE: ((0, 1, 2, 3, 4),),
        SMALL: ((5, 6, 7, 8, 9),),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same twenty pictures in a folder, in a shard, and in a table."""
    path = tmp_path_factory.mktemp("sized sources")
    folder = save_sized(path / "folder")
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    with tarfile.open(path / "birds.tar", "w") as tar:
        for row in rows:
            picture = (folder / row["file_name"]).read_bytes()
            stem = row["file_name"].removesuffix(".png")
            for name, data in ((f"{stem}.png", picture), (f"{stem}.txt", row["text"].encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    lines = [f"folder/{row['file_name']},{row['text']}" for row in rows]
    (path / "rows.csv").write_text("\n".join(["file,said", *lines]) + "\n")
    save_stable_diffusion(path / "sd")
    return path


def keys(place, **data):
    """[data] of the three kinds of sources, two of which have sizes of their own."""
    sources = {
        "folder": {"path": str(place / "folder"), "resolution": ["16x8", "8x16"], "repeats": 2},
        "shard": {"path": str(place / "birds.tar"), "resolution": 16},
        "table": {"path": str(place / "rows.csv"), "columns": {"image": "file", "text": "said"}},
    }
    return {"sources": sources, "resolution": 8, "workers": 0, "same_size": 2, **data}


OWN = (
    {Clip(width=16, height=8), Clip(width=8, height=16)},
    {Clip.square(16)},
    {Clip.square(8)},
)


def scanned(data):
    def found(name, path):
        return examine_place(path, Condition.TEXT, columns=data.columns_of(name))

    return joined_of({name: found(name, path) for name, path in data.folders.items()}, data.sources)


def order_of(data, seed=3):
    dataset, findings = scanned(data)
    sources = [sample.source for sample in dataset.samples]
    return dataset, SizeOrder(assignment=assign(findings.sizes, rules_of(data), 2, sources), seed=seed, run=2)


def test_samples_of_a_folder_a_shard_and_a_table_have_sizes_of_their_source_and_their_shares_hold(place):
    pytest.importorskip("datasets")
    data = DataSection.model_validate(keys(place))
    assert set(sizes_of(data)) == set.union(*OWN)
    dataset, order = order_of(data)
    assert len(dataset.samples) == 20 * 2 + 20 + 20
    epochs, seen, by_source = 3, Counter(), Counter()
    places = [order.at(position) for position in range(epochs * len(dataset.samples))]
    for one in places:
        source = dataset.samples[one.sample].source
        assert order.sizes[one.size] in OWN[source]
        seen[one.sample] += 1
        by_source[source] += 1
    assert len(seen) == len(dataset.samples)
    assert all(abs(count - epochs) <= 1 for count in seen.values())
    assert all(abs(by_source[source] - epochs * count) <= 4 for source, count in enumerate((40, 20, 20)))
    assert [order_of(data)[1].at(position) for position in range(100, 120)] == places[100:120], "from the middle"


def recipe(place, name, steps=6, *, data=None, **sections):
    made = recipe_of(
        place / "sd", place / "folder", place / name, training={"steps": steps, "precision": "float64"}, **sections
    )
    own = DataSection.model_validate(keys(place, validation=str(place / "folder"), **(data or {})))
    validation = {"every": 3, "timesteps": (0.3,)}
    changed = {"data": own.model_dump(), "validation": {**made.validation.model_dump(), **validation}, "models": {}}
    return type(made).model_validate({**made.model_dump(), **changed})


def test_a_run_of_three_kinds_of_sources_says_their_sizes_and_its_own_recipe_means_the_same(place):
    pytest.importorskip("datasets")
    settings, told = recipe(place, "short", 2), []
    train_here(settings, tell_data=told.extend, saves=False)
    said = {line.name: line.text for line in told}
    assert said["folder"].endswith("each 2 times: 50 % of an epoch, resolution 16x8 and 8x16")
    assert said["shard"].endswith("25 % of an epoch, resolution 16")
    assert said["table"].endswith("25 % of an epoch")
    assert sorted(losses_of(place / "short")) == [1, 2]
    assert load_recipe(place / "short" / "recipe.toml").data == settings.data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("filled", {"stages": 2, "microbatches": 2, "fill": True}),
        ("copies", {"stages": 1, "microbatches": 1, "data_parallel": 2}),
        ("replicas", {"stages": 1, "microbatches": 2, "replicas": [2]}),
    ],
)
def test_a_run_resumed_in_an_epoch_on_two_ranks_has_the_losses_of_one_process(place, name, pipeline):
    pytest.importorskip("datasets")
    if not (place / "whole").exists():
        train_here(recipe(place, "whole"))
    train_here(recipe(place, name, 3))
    with crew_of(2) as crew:
        assert crew.run(train, recipe(place, name, pipeline=pipeline), "latest") == [6, 6]
    for key in ("loss", "validation_loss"):
        whole, parts = losses_of(place / "whole", key), losses_of(place / name, key)
        assert whole.keys() == parts.keys()
        assert [parts[step] for step in whole] == pytest.approx([whole[step] for step in whole], rel=1e-12)


@pytest.mark.slow
def test_a_source_keeps_its_sizes_in_a_resumed_run(place):
    pytest.importorskip("datasets")
    train_here(recipe(place, "kept", 1))
    sources = keys(place)["sources"]
    other = {**sources, "folder": {**sources["folder"], "resolution": 16}}
    with pytest.raises(CheckpointError, match=r"sources was .*resolution 16x8 and 8x16.* and is .*resolution 16"):
        train_here(recipe(place, "kept", 2, data={"sources": other}), "latest")


def test_where_every_source_has_its_own_sizes_those_of_all_need_not_be_stated():
    sources = {"a": {"path": "a", "resolution": 64}, "b": {"path": "b", "resolution": [96, "128x64"]}}
    data = DataSection.model_validate({"sources": sources})
    assert (data.resolution, data.sizes) == (128, (64, 96, "128x64"))
    assert data.areas_of_sources[0] == ((SMALL,),)
    assert DataSection.model_validate(data.model_dump()) == data
    del sources["b"]["resolution"]
    with pytest.raises(ValidationError, match=r"resolution\n.*required"):
        DataSection.model_validate({"sources": sources})


@pytest.mark.parametrize(
    ("source", "data", "problem"),
    [
        ({"resolution": "7by9"}, {}, r"'7by9' is not a width and a height such as \"768x512\""),
        ({"resolution": []}, {}, r"give sides in pixels, or sizes such as \"768x512\""),
        ({"resolution": [64, 0]}, {}, r"0 is not from 1 to 65,536; give sides in pixels, or sizes such as \"768x512\""),
        ({"resolution": ["64x0"]}, {}, r"'64x0' is not from 1 to 65,536; give sides"),
        ({"resolution": "64x32"}, {"aspects": [0.5, 2.0]}, "aspects: every size states its width"),
        ({"resolution": 64}, {"frames": 5}, "frames: it does not go with several sizes"),
        ({"resolution": 64}, {"allow_growth": True}, "allow_growth: new pictures would change the sizes"),
    ],
)
def test_sizes_of_a_source_that_make_no_sense_are_refused(source, data, problem):
    with pytest.raises(ValidationError, match=problem):
        DataSection.model_validate({"resolution": 8, "sources": {"a": {"path": "b", **source}}, **data})


def test_sizes_of_a_source_that_the_model_cannot_take_are_refused_with_the_nearest(place):
    bad = keys(place)["sources"] | {"shard": {"path": str(place / "birds.tar"), "resolution": "7x16"}}
    with pytest.raises(ConfigError, match=r"7 x 16 pixels: .* the nearest size that it takes is \d+ x \d+ pixels"):
        train_here(recipe(place, "bad", 1, data={"sources": bad}))
