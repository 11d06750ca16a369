import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner import synthetic

from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.errors import FileFormatError
from diffusionpipe.workflows.planning.profile_cache import ProfileKey, cache_folder, cached_profile

PROFILE = synthetic.chain([0.01] * 2)
KEY = ProfileKey(
    model=PROFILE.graph,
    precision="float32",
    batch_sizes=(1, 2),
    device="one",
    rates=None,
    versions=(("torch", "2.9"),),
)
RATES = DEVICES["a100-80"]
OTHERS = {
    "model": replace(KEY, model=synthetic.chain([0.01] * 3).graph),
    "precision": replace(KEY, precision="bfloat16"),
    "batch sizes": replace(KEY, batch_sizes=(1, 2, 4)),
    "device": replace(KEY, device="another"),
    "rates": replace(KEY, rates=RATES),
    "other rates": replace(KEY, rates=replace(RATES, bandwidth=RATES.bandwidth * 2)),
    "ranks": replace(KEY, ranks=("node 0: one", "node 0: one")),
    "nodes": replace(KEY, ranks=("node 0: one", "node 1: one")),
    "update": replace(KEY, update="AdamW"),
    "versions": replace(KEY, versions=(("torch", "2.10"),)),
}


class Maker:
    """Makes the profile and counts how often."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return PROFILE


def test_a_profile_is_made_once(tmp_path):
    make = Maker()
    found = [cached_profile(KEY, make, tmp_path / "deep" / "folder") for _ in range(3)]
    assert make.count == 1
    assert {profile == PROFILE for profile, _ in found} == {True}
    assert len({path for _, path in found}) == 1


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_whatever_a_profile_depends_on_changes_its_file(tmp_path, other):
    make = Maker()
    cached_profile(KEY, make, tmp_path)
    cached_profile(other, make, tmp_path)
    assert make.count == 2
    assert len(list(tmp_path.iterdir())) == 2
    assert replace(other).digest == other.digest


def test_without_a_folder_it_is_always_made():
    make = Maker()
    assert [cached_profile(KEY, make, None)[1] for _ in range(2)] == [None, None]
    assert make.count == 2


def test_an_altered_file_is_refused_by_name(tmp_path):
    _, path = cached_profile(KEY, Maker(), tmp_path)
    path.write_text(json.dumps({"format": "diffusionpipe-profile"}))
    with pytest.raises(FileFormatError, match=path.name):
        cached_profile(KEY, Maker(), tmp_path)


def test_the_folder_follows_the_environment():
    assert cache_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/diffusionpipe/profiles")
    assert cache_folder({}) == Path.home() / ".cache/diffusionpipe/profiles"
    assert cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({})
