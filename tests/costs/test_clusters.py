import json
from dataclasses import replace
from importlib.resources import files
from itertools import combinations

import pytest

from diffusionpipe.costs import AllReduce, Cluster, Device, Link, PairLink
from diffusionpipe.costs.cluster import of_ranks, repeated, slow_links, slow_pairs
from diffusionpipe.costs.clusters import load_cluster, shipped_clusters
from diffusionpipe.costs.devices import DEVICES, Efficiency, device_rates
from diffusionpipe.costs.files import ANY_CPU, CLUSTER, cluster_from_text, write_cluster
from diffusionpipe.errors import ConfigError, FileFormatError
from diffusionpipe.ir.files import to_text


@pytest.mark.parametrize("name", shipped_clusters())
def test_a_shipped_cluster_is_one_node_of_known_devices_in_canonical_text(name):
    cluster = load_cluster(name)
    text = (files("diffusionpipe.costs.clusters") / f"{name}.json").read_text(encoding="utf-8")
    assert to_text(cluster, CLUSTER) == text
    assert cluster.name == name
    assert set(cluster.nodes) == {0}
    assert {device.name for device in cluster.devices} <= {ANY_CPU, *(rates.title for rates in DEVICES.values())}


@pytest.mark.parametrize("name", [n for n in shipped_clusters() if n != "cpux2"])
def test_a_shipped_cluster_gives_training_less_memory_than_the_device_has(name):
    memory = {rates.title: rates.memory for rates in DEVICES.values()}
    assert all(0.8 < device.memory / memory[device.name] < 1 for device in load_cluster(name).devices)


def test_the_promised_machines_are_there():
    promised = {"a100-40x8", "a100-80x8", "h100x8", "h200x8", "l40sx8", "rtx4090x2", "rtx4090x4", "rtx4090-rtx4080"}
    assert promised <= set(shipped_clusters())
    unequal = load_cluster("rtx4090-rtx4080").devices
    assert unequal[0].memory > unequal[1].memory
    assert unequal[0].speed > unequal[1].speed


def test_several_nodes_are_the_same_node_again():
    cluster = load_cluster("a100-80x8:4")
    assert cluster.num_ranks == 32
    assert cluster.nodes == tuple(node for node in range(4) for _ in range(8))
    assert cluster.link(7, 8) == cluster.inter
    assert cluster.link(0, 7) == load_cluster("a100-80x8").intra


def with_slow_link(first=1, second=2, *, of="rtx4090x4"):
    cluster = load_cluster(of)
    usual = cluster.intra.bandwidth
    pairs = tuple(
        PairLink(first=a, second=b, latency=1e-5, bandwidth=usual / 50 if (a, b) == (first, second) else usual)
        for a, b in combinations(range(cluster.num_ranks), 2)
    )
    return replace(cluster, pairs=pairs)


def test_a_slow_link_is_the_one_that_is_found_and_comes_back_from_a_file():
    cluster = cluster_from_text(to_text(with_slow_link(), CLUSTER))
    usual = cluster.intra.bandwidth
    assert slow_links(cluster) == {(1, 2): (usual / 50, usual)}
    assert cluster.link(1, 2) == cluster.link(2, 1) == replace(cluster.intra, latency=1e-5, bandwidth=usual / 50)
    assert cluster.slowest_link([(0, 1), (2, 1)]).bandwidth == usual / 50
    assert not slow_links(load_cluster("rtx4090x4"))


def test_pairs_follow_their_ranks():
    cluster = with_slow_link()
    assert of_ranks(cluster, range(2)).pairs == cluster.pairs[:1]
    twice = repeated(cluster, 2)
    assert list(slow_links(twice)) == [(1, 2), (5, 6)]
    assert twice.link(3, 4) == cluster.inter


@pytest.mark.parametrize("name", ["a100x8", "a100-80x8:0", "a100-80x8:", "a100-80x8:x", "a100-80x8:9999", ""])
def test_an_unknown_cluster_is_refused_with_what_there_is(name):
    with pytest.raises(ConfigError, match=r"there is no cluster|number of nodes"):
        load_cluster(name)


def test_a_file_of_several_nodes_is_not_repeated(tmp_path):
    path = tmp_path / "mine.json"
    write_cluster(load_cluster("h100x8:2"), path)
    assert load_cluster(str(path)).num_ranks == 16
    with pytest.raises(ConfigError, match="2 nodes already"):
        load_cluster(f"{path}:2")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("intra", {"latency": -1.0, "bandwidth": 1.0}, "intra"),
        ("inter_reduce", {"latency": 1.0, "bandwidth": 0.0}, "inter_reduce"),
        ("nodes", [0, 1], "nodes"),
        ("nodes", [0, 0, 0, 2], "nodes must ascend from 0 without gaps"),
        ("devices", [], "devices"),
        ("pairs", [{"first": 1, "second": 0, "latency": 1.0, "bandwidth": 1.0}], "the smaller first"),
        ("pairs", [{"first": 0, "second": 9, "latency": 1.0, "bandwidth": 1.0}], "two ranks once"),
        ("pairs", [{"first": 0, "second": 1, "latency": 1.0, "bandwidth": 0.0}], "the link of ranks 0 and 1"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(field, value, word):
    data = json.loads(to_text(load_cluster("cpux2:2"), CLUSTER)) | {field: value}
    with pytest.raises(FileFormatError, match=word):
        cluster_from_text(json.dumps(data))


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"a100-80.*cpu-1-thread"):
        device_rates("a100")


def test_tensor_cores_make_narrow_numbers_faster_on_every_device():
    assert all(
        rates.peak("float64", is_convolution=False)
        <= rates.peak("float32", is_convolution=False)
        <= rates.peak("bfloat16", is_convolution=False)
        for rates in DEVICES.values()
    )


def test_an_efficiency_above_one_is_refused():
    good = DEVICES["h200"].efficiency
    values = {name: getattr(good, name) for name in good.__dataclass_fields__}
    with pytest.raises(ValueError, match="matmul"):
        Efficiency(**values | {"matmul": 1.2})


def test_negative_latency_is_refused_where_a_cluster_is_made():
    line, total = Link(0.0, 1.0), AllReduce(latency=-1.0, bandwidth=1.0)
    with pytest.raises(ValueError, match="intra_reduce"):
        Cluster(
            name="c",
            devices=(Device(name="d", memory=1),),
            nodes=(0,),
            intra=line,
            inter=line,
            intra_reduce=total,
            inter_reduce=total,
        )


def test_a_number_of_nodes_with_thousands_of_digits_is_refused():
    with pytest.raises(ConfigError, match="give the number of nodes as 1 to 1024"):
        load_cluster("l40sx8:" + "9" * 5000)


@pytest.mark.parametrize("bandwidth", [5e-324, 1e-300, 0, -1])
@pytest.mark.parametrize("line", ["intra", "inter", "intra_reduce", "inter_reduce"])
def test_a_link_with_which_no_time_is_a_number_is_refused(line, bandwidth):
    content = json.loads(to_text(load_cluster("rtx4090x2"), CLUSTER))
    content[line]["bandwidth"] = bandwidth
    with pytest.raises(FileFormatError, match=r"bandwidth"):
        cluster_from_text(json.dumps(content))


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed", 1e-300), ("speed", 1e300), ("host_bandwidth", 1e-300), ("memory", 10**400)],
)
def test_a_device_of_numbers_that_none_has_is_refused(field, value):
    content = json.loads(to_text(load_cluster("rtx4090x2"), CLUSTER))
    content["devices"][0][field] = value
    with pytest.raises(FileFormatError, match=field):
        cluster_from_text(json.dumps(content))


@pytest.mark.parametrize("field", ["latency", "overhead", "overhead_per_byte"])
def test_a_wait_of_more_than_thirty_years_is_refused(field):
    content = json.loads(to_text(load_cluster("rtx4090x2"), CLUSTER))
    content["intra"][field] = 1e300
    with pytest.raises(FileFormatError, match=field):
        cluster_from_text(json.dumps(content))


def test_a_slow_link_is_slow_beside_those_of_its_own_kind():
    inside = {(0, 1): 100.0, (0, 2): 100.0, (1, 2): 10.0, (3, 4): 100.0}
    between = {(0, 3): 8.0, (1, 3): 8.0, (2, 3): 1.0}
    assert slow_pairs(inside | between, (0, 0, 0, 1, 1)) == {(1, 2): (10.0, 100.0), (2, 3): (1.0, 8.0)}
