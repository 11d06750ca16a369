"""The places in which the weights of frozen layers are kept while nothing reads them, and the cost of bringing them.

    DEVICE        on the device, as wide as the model graph says
    narrow(2)     on the device, two bytes a number
    HOST          in host memory; a layer comes to the device while the one before it runs, so two are there at a time

A storage of another kind says which of its layers are in host memory, and how many bytes a parameter takes. All that
follows from it is derived from these answers: memory of devices and hosts, times of copies, the copying of the runtime.
Planner and runtime ask the storage, and never which one it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from diffusionpipe.costs.graph import ParameterSpec
from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Bytes, Seconds


class Storage(ABC):
    """A way to keep frozen weights while no layer reads them: the place, the bytes, and the time of bringing them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the place in plan files, such as "device" or "host"."""

    @abstractmethod
    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """The ones of these layers, which run in this order, whose weights are kept in host memory."""

    @property
    def words(self) -> str:
        """Words for this storage in tables of layouts, such as ", encoders on host"; "" where nothing is to be said."""
        return ""

    def size(self, parameter: ParameterSpec) -> Bytes:
        """The bytes that a frozen parameter takes in this storage."""
        return parameter.num_bytes

    def narrow(self, width: int) -> "Storage":
        """The same storage, but with `width` bytes for each number."""
        return Narrow(width=width, of=self)

    def at(self, place: "Storage") -> "Storage":
        """The storage `place` with this storage's bytes for each number."""
        return place

    def staged(self, sizes: Sequence[Bytes]) -> Bytes:
        """The bytes on the device for hosted layers of these sizes as they come and go: the sum of the two largest."""
        return sum(sorted(sizes)[-2:])

    def fetch(self, size: Bytes, bandwidth: float) -> Seconds:
        """The seconds in which a layer of `size` bytes is brought from the host, at `bandwidth` bytes a second."""
        return size / bandwidth

    @property
    def brings(self) -> bool:
        """Whether weights come from the host; the cluster must then give each device its bandwidth of such copies."""
        return True


@dataclass(frozen=True, slots=True)
class OnDevice(Storage):
    """The storage that keeps all weights on the device, all the time."""

    @property
    def name(self) -> str:
        """The name "device"."""
        return "device"

    @property
    def brings(self) -> bool:
        """False: nothing has to be brought."""
        return False

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """The empty set: no layer is in host memory."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class OnHost(Storage):
    """The storage that keeps all weights in host memory; they come to the device layer by layer."""

    @property
    def name(self) -> str:
        """The name "host"."""
        return "host"

    @property
    def words(self) -> str:
        """The words ", encoders on host"."""
        return ", encoders on host"

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """All of these layers."""
        return frozenset(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow(Storage):
    """The storage that keeps weights where the storage `of` does, but with `width` bytes for each number."""

    width: int
    of: Storage

    @property
    def name(self) -> str:
        """The name of the storage `of`."""
        return self.of.name

    @property
    def words(self) -> str:
        """The words for the storage `of` in tables of layouts."""
        return self.of.words

    @property
    def brings(self) -> bool:
        """Whether the storage `of` brings weights from the host."""
        return self.of.brings

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """The ones of these layers that the storage `of` keeps in host memory."""
        return self.of.hosted(layers)

    def size(self, parameter: ParameterSpec) -> Bytes:
        """The bytes of a parameter with `width` bytes for each number."""
        return prod(parameter.shape) * self.width

    def narrow(self, width: int) -> Storage:
        """The storage `of` with another `width`."""
        return Narrow(width=width, of=self.of)

    def at(self, place: Storage) -> Storage:
        """The storage `place` with this width."""
        return Narrow(width=self.width, of=place)

    def staged(self, sizes: Sequence[Bytes]) -> Bytes:
        """The bytes on the device for hosted layers of these sizes, as the storage `of` counts them."""
        return self.of.staged(sizes)

    def fetch(self, size: Bytes, bandwidth: float) -> Seconds:
        """The seconds in which a layer of `size` bytes is brought from the host, as the storage `of` counts them."""
        return self.of.fetch(size, bandwidth)


DEVICE, HOST = OnDevice(), OnHost()

STORAGES: dict[str, Storage] = {storage.name: storage for storage in (DEVICE, HOST)}
"""The places of encoders among which a search chooses, by the name in plan files. One that is added is searched, priced
and run."""


def storage_of(name: str) -> Storage:
    """The storage with this name, "device" or "host".

    Raises:
        ConfigError: there is none with this name; the message lists all names.
    """
    if name not in STORAGES:
        raise ConfigError(
            f"the storage {name!r} for weights of encoders is not known to this version; use {', '.join(STORAGES)}"
        )
    return STORAGES[name]
