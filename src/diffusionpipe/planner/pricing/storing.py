"""Prices settings whose frozen weights are kept elsewhere than on the device, and says which are worth a search.

A storage that brings layers from the host has two on the device at a time: a layer's weights come while the layer
before it runs. So each layer of a sequence takes its own time or the time of its copy, whichever is longer.
`copied.py` computes the time of an order of fills with compute between them.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import DEVICE, STORAGES, Storage
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.planner.pricing.copied import CopiedProfile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes

WORTH = 16
"""Encoders that take less than 1 / 16 of the smallest device's memory stay on the devices."""


def stored(setting: Setting, storage: Storage) -> Setting:
    """The setting with the frozen part in this storage.

    If the storage brings weights from the host, each frozen layer takes the time of its copy if that is longer; the
    device that copies slowest counts.
    """
    whole = setting.whole or setting
    workload = replace(whole.workload, encoders=whole.workload.encoders.at(storage))
    if not storage.brings:
        return replace(whole, workload=workload)
    bandwidth = min(device.host_bandwidth for device in setting.cluster.devices)
    moved = replace(whole, workload=workload, whole=whole)
    arriving = moved.ledger.fetches(moved.graph.frozen_layers, bandwidth)
    profile = whole.profile
    copied = CopiedProfile(arriving=arriving, **{field.name: getattr(profile, field.name) for field in fields(profile)})
    return replace(moved, profile=copied)


def stored_as(setting: Setting, name: str) -> Setting:
    """The setting with the frozen part in the storage of this name; on the device if the cost of copies is unknown.

    Raises:
        ConfigError: there is no such storage.
    """
    storage = storage_of(name)
    return stored(setting, storage if can_store(setting, storage) else DEVICE)


def settings_in_storages(setting: Setting) -> Iterator[Setting]:
    """The setting with the frozen part in each other storage that is worth a search, one after the other.

    The frozen part must be heavy, and the speed of copies must be known for a storage that brings weights from the
    host. If a storage is given, it is the only one.
    """
    given, usual = setting.given.encoders, setting.workload.encoders.name
    if given is not None:
        if given != usual:
            yield stored(setting, storage_of(given))
        return
    if is_heavy(setting):
        others = (storage for name, storage in STORAGES.items() if name != usual)
        yield from (stored(setting, storage) for storage in others if can_store(setting, storage))


def can_store(setting: Setting, storage: Storage) -> bool:
    """Whether the model has a frozen part, and the cluster the speed of copies if this storage needs it."""
    return bool(setting.graph.frozen_layers) and (knows_copies(setting) or not storage.brings)


def knows_copies(setting: Setting) -> bool:
    """Whether the cluster has the speed of copies from the host for each device."""
    return all(device.host_bandwidth > 0 for device in setting.cluster.devices)


def check_storage(setting: Setting) -> None:
    """Raise an error if the storage that is given for the frozen part cannot be used; return None otherwise.

    Raises:
        ConfigError: there is no frozen part, the storage is unknown, or the cluster does not have the speed of copies
            from the host.
    """
    if setting.given.encoders is None or not storage_of(setting.given.encoders).brings:
        return
    if not setting.graph.frozen_layers:
        raise ConfigError(f"pipeline.offload_frozen: {refusal(Feature.OFFLOAD, Feature.NO_ENCODERS)}")
    if not can_store(setting, storage_of(setting.given.encoders)):
        raise ConfigError(
            f"pipeline.offload_frozen: the cluster {setting.cluster.name} does not say how fast its devices copy from "
            'host memory; give every device a "host_bandwidth" in bytes per second, or measure: diffusionpipe cluster'
        )


def is_heavy(setting: Setting) -> bool:
    """Whether the frozen part takes more than a 16th of the smallest device's memory."""
    smallest = min(device.memory for device in setting.cluster.devices)
    return bool(setting.graph.frozen_layers) and WORTH * encoder_bytes(setting) > smallest


def encoder_bytes(setting: Setting) -> Bytes:
    """The bytes of the frozen part's weights on a device that runs it: all, or the most that it holds at a time."""
    return setting.ledger.resting(setting.graph.frozen_layers).device


def leanest_place(setting: Setting) -> Setting:
    """The setting with the frozen part in the storage that takes the least bytes of devices, if one is worth a search.

    Else it is the setting itself.
    """
    moved = list(settings_in_storages(setting))
    return min(moved, key=encoder_bytes) if moved else setting
