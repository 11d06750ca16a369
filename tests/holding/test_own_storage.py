"""A storage that tests alone know is searched, priced and simulated by the product; `tests/runtime` runs it."""

import ast
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from kit import every_second
from kit.every_second import OWN
from planner import synthetic

import diffusionpipe
from diffusionpipe.holding import DEVICE, HOST, STORAGES, Item, Ledger, State
from diffusionpipe.holding.storage import Narrow, OnHost
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import settings_in_storages, stored
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose

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


class _Mapped(OnHost):
    """All encoders in host memory, where kernels read them: nothing is copied to the device."""

    name, brings = "mapped", False

    def staged(self, sizes):
        return 0


def test_without_a_speed_of_copies_a_storage_that_needs_none_is_tried_alone(monkeypatch):
    monkeypatch.setitem(STORAGES, _Mapped.name, _Mapped())
    heavy = setting_of(memory=10.0)
    devices = tuple(replace(device, host_bandwidth=0.0) for device in heavy.cluster.devices)
    silent = replace(heavy, cluster=replace(heavy.cluster, devices=devices))
    tried = {one.workload.encoders.name: one for one in settings_in_storages(silent)}
    assert list(tried) == ["mapped"]
    assert [one.workload.encoders.name for one in settings_in_storages(heavy)] == ["host", "every second", "mapped"]
    assert tried["mapped"].ledger.resting(silent.graph.frozen_layers).device == 0
    asked = replace(silent, given=Given(encoders="mapped", stages=2))
    assert choose(asked, fill=False).plan().encoders == "mapped"


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


def test_the_time_of_a_fetch_is_said_in_one_place(monkeypatch):
    """Fetches that take longer show in the ledger, in the prices of fills and in the simulated step."""
    setting = setting_of(given=Given(stages=2, encoders="host"))
    before = choose(setting, fill=False)
    fetch = type(HOST).fetch
    monkeypatch.setattr(type(HOST), "fetch", lambda self, size, bandwidth: 1.0 + fetch(self, size, bandwidth))
    after = choose(setting_of(given=Given(stages=2, encoders="host")), fill=False)
    layers = setting.graph.frozen_layers
    own = stored(setting, HOST).ledger.fetches(layers, 2.0)
    assert min(own.values()) > 1
    assert max(after.proposal.costs.fills) > 1 > max(before.proposal.costs.fills)
    assert after.step > before.step + 1


def test_the_bytes_of_a_state_are_said_in_one_place(monkeypatch):
    """Moments of three times the bytes show in the ledger, the search's sums, the simulated plan and its neighbours."""
    setting = setting_of(memory=40.0, given=Given(stages=2))
    before = choose(setting, fill=False)
    size = State.size
    monkeypatch.setattr(
        State,
        "size",
        lambda self, parameter: size(self, parameter) * (3 if self.item is Item.OPTIMIZER else 1),
    )
    wide = setting_of(memory=40.0, given=Given(stages=2))
    after = propose(wide, before.candidate.layout(wide))
    sums = Judge(setting=wide).footprint.uses(before.candidate)
    for old, new, estimated in zip(before.proposal.memory, after.memory, sums, strict=True):
        assert new.optimizer == 3 * old.optimizer == estimated.optimizer
        assert new.total - old.total == 2 * old.optimizer
    numbers = sum(prod(p.shape) for p in setting.graph.parameters if p.is_trainable)
    assert wide.ledger.held([p.name for p in setting.graph.parameters]).optimizer == 3 * 8 * numbers


def test_no_module_outside_the_ledger_branches_on_a_kind_of_storage():
    """None imports a class of storage, and none compares with a storage: they ask it, or hand its name on."""
    kinds = {kind.__name__ for kind in (type(DEVICE), type(HOST), Narrow)}
    package = Path(diffusionpipe.__file__).parent
    wrong = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.is_relative_to(package / "holding") or "diffusionpipe.holding" not in text:
            continue
        tree = ast.parse(text)
        names = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusionpipe.holding")
            for alias in node.names
        }
        wrong += [f"{path}: imports {name}" for name in kinds & {*names.values()}]
        places = {name for name, found in names.items() if found in ("DEVICE", "HOST")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.match_case):
                used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                wrong += [f"{path}:{getattr(node, 'lineno', '')}: compares with {name}" for name in used & places]
    assert not wrong


@pytest.mark.slow
def test_a_fifth_storage_leaves_mypy_strict_without_an_error_and_one_without_layers_does_not(tmp_path):
    """No module outside the ledger counts the kinds; a storage that does not say its layers is refused by its class."""
    text = Path(every_second.__file__).read_text(encoding="utf-8")
    more = "\nfrom diffusionpipe.holding import STORAGES\n\nSTORAGES[OWN.name] = OWN\n"
    (tmp_path / "whole.py").write_text(text + more, encoding="utf-8")
    (tmp_path / "half.py").write_text(text.replace("def hosted", "def kept") + more, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    found = [
        subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, check=False)
        for name in ("whole.py", "half.py")
    ]
    assert (found[0].returncode, found[1].returncode) == (0, 1), found[0].stdout
    assert 'Cannot instantiate abstract class "EverySecond"' in found[1].stdout
