"""A storage that tests alone know is searched, priced and simulated by the product; `tests/runtime` runs it."""

from dataclasses import replace

import pytest
from every_second import OWN
from planner import synthetic

from diffusionpipe.holding import DEVICE, HOST, STORAGES, Ledger
from diffusionpipe.planner.choice import choose
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import settings_in_storages, stored

GB = 10**9


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(STORAGES, OWN.name, OWN)


def setting_of(*, memory=14.0, given=None):
    """Encoders of 0.71 GB, of which a text layer has 0.03, beside a U-Net on two devices."""
    cluster = synthetic.cluster(2, memory=memory, bus_gb=100)
    devices = tuple(replace(device, host_bandwidth=10 * GB) for device in cluster.devices)
    return Setting(
        profile=synthetic.unet(),
        cluster=replace(cluster, devices=devices),
        workload=synthetic.workload(8),
        given=given or Given(),
    )


def test_its_bytes_and_times_follow_from_the_layers_that_it_names():
    setting = setting_of()
    layers, ledger = setting.graph.frozen_layers, stored(setting, OWN).ledger
    kept = [name for index, name in enumerate(layers) if index % 2 == 0]
    moved = [name for index, name in enumerate(layers) if index % 2 == 1 and name != "noise"]  # which has no weights
    sizes = sorted(setting.ledger.frozen_of([name]) for name in moved)
    resting = ledger.resting(layers)
    assert resting.device == setting.ledger.frozen_of(kept) + sum(sizes[-2:])
    assert resting.host == setting.ledger.frozen_of(moved) == sum(sizes)
    assert ledger.fetches(layers, 2.0) == {
        name: setting.ledger.frozen_of([name]) / 2.0 for name in moved if name != "noise"
    }


def test_a_search_prices_it_where_encoders_are_heavy():
    """Of three places of encoders that take much the search looks at each, and takes the one that is asked for."""
    heavy = setting_of(memory=10.0)
    assert [one.workload.encoders.name for one in settings_in_storages(heavy)] == ["host", "every second"]
    asked = choose(setting_of(given=Given(encoders=OWN.name, stages=2)), fill=False)
    assert asked.plan().encoders == OWN.name
    assert asked.sizes.endswith(OWN.words)
    per_place = {
        place.name: max(
            use.frozen for use in choose(setting_of(given=Given(encoders=place.name, stages=2))).proposal.memory
        )
        for place in (DEVICE, OWN, HOST)
    }
    assert per_place["device"] > per_place[OWN.name] > per_place["host"]


def test_bytes_of_a_storage_are_said_in_one_place(monkeypatch):
    """Parameters of four times the bytes show in the ledger, the search's sums and the simulated plan alike."""
    setting = setting_of(given=Given(stages=2, encoders="device"))
    before = choose(setting, fill=False)
    monkeypatch.setattr(type(DEVICE), "size", lambda self, parameter: 4 * parameter.num_bytes)
    wide = replace(setting, workload=replace(setting.workload, frozen=DEVICE, encoders=DEVICE))
    after = choose(wide, fill=False)
    layers = setting.graph.frozen_layers
    whole = Ledger(graph=setting.graph, workload=wide.workload).frozen_of(layers)
    assert whole == 4 * sum(p.num_bytes for p in setting.graph.parameters if not p.is_trainable)
    assert {use.frozen for use in after.proposal.memory} == {whole}
    assert {use.frozen for use in before.proposal.memory} == {setting.ledger.frozen_of(layers)}
