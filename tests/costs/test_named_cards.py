import re
from pathlib import Path

import pytest

from diffusionpipe.costs.clusters import (
    cluster_of_cards,
    computes_in_bfloat16,
    known_cards,
    load_cluster,
    shipped_clusters,
)
from diffusionpipe.costs.clusters.links import LINKS
from diffusionpipe.costs.devices import DEVICES, Basis, device_rates
from diffusionpipe.costs.files import cluster_from_text
from diffusionpipe.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
OF_ONE_CARD = [name for name in shipped_clusters() if name not in ("cpux2", "rtx4090-rtx4080")]


@pytest.mark.parametrize("name", OF_ONE_CARD)
def test_a_name_gives_the_figures_of_the_shipped_file(name):
    shipped, named = load_cluster(name), cluster_of_cards(name)
    assert (named.devices, named.nodes) == (shipped.devices, shipped.nodes)
    for line in ("intra", "inter", "intra_reduce", "inter_reduce"):
        mine, theirs = getattr(named, line), getattr(shipped, line)
        assert mine.latency == pytest.approx(theirs.latency, rel=0.2)
        assert mine.bandwidth == pytest.approx(theirs.bandwidth, rel=0.02)


@pytest.mark.parametrize("card", known_cards())
def test_every_card_can_be_named_from_one_to_eight_times(card):
    rates = DEVICES[card]
    for count in (1, 8):
        cluster = load_cluster(f"{card}x{count}")
        assert [device.name for device in cluster.devices] == [rates.title] * count
        assert 0.8 < cluster.devices[0].memory / rates.memory < 1
    assert rates.link in LINKS
    assert load_cluster(f"{card}x8:2").num_ranks == 16


def test_several_kinds_of_cards_have_the_speeds_of_the_measured_pair():
    one, other = load_cluster("rtx4090x1+rtx4080x1").devices, load_cluster("rtx4090-rtx4080").devices
    assert one == other
    three = load_cluster("2 x rtx4090 + 1 x rtx3090@pcie3")
    assert [device.speed for device in three.devices] == [1.0, 1.0, 0.5]
    assert three.intra.bandwidth < load_cluster("2 x rtx4090 + 1 x rtx3090").intra.bandwidth
    assert three.name == "rtx4090x2+rtx3090x1@pcie3"
    assert load_cluster(three.name) == three


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("3090x2", "Did you mean rtx3090x2?"),
        ("RTX-4090x1", "Did you mean rtx4090x1"),
        ("a100x8", "Did you mean a100-40x8 or a100-80x8"),
        ("rtx3060", "give 1 to 8 cards of a machine after the name, e.g. rtx3060x2"),
        ("rtx3090x9", "give 1 to 8 cards"),
        ("t4x5+v100x5", "one machine has at most 8 cards"),
        ("rtx3090x2@pcie9", "the link 'pcie9' is not known; use pcie3"),
        ("rtx3090x2+", "neither a file nor a known name"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_cluster(name)
    assert len(str(caught.value).splitlines()) <= 3


def test_only_cards_that_were_fitted_are_calibrated():
    assert {name for name in known_cards() if DEVICES[name].basis is Basis.CALIBRATED} == {"a100-40", "a100-80"}


def test_cards_without_bfloat16_are_refused_in_it():
    without = [name for name in known_cards() if not computes_in_bfloat16(load_cluster(f"{name}x1"))]
    assert without == ["t4", "v100", "v100-32"]
    assert not computes_in_bfloat16(load_cluster("rtx3090x1+t4x1"))
    assert device_rates("t4", precision="float32").peak("bfloat16", is_convolution=False) == 8.1e12
    with pytest.raises(ConfigError, match="Tesla T4 has no bfloat16"):
        device_rates("t4", precision="bfloat16")


def test_the_documented_file_is_a_cluster_and_names_every_key():
    text = (DOCS / "clusters.md").read_text(encoding="utf-8")
    cluster = cluster_from_text(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    assert (cluster.num_ranks, cluster.devices[1].speed) == (2, 0.5)
    for thing in (cluster, cluster.devices[0], cluster.intra):
        assert all(f"`{key}`" in text or f".{key}`" in text for key in thing.__dataclass_fields__ if key != "name")
