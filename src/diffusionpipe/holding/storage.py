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
    """A place for frozen weights, and their width there."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the place, as plan files hold it."""

    @abstractmethod
    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """The layers among these, which run in this order, whose weights are kept in host memory."""

    @property
    def words(self) -> str:
        """Words that follow the sizes of a layout that differs from others in this: ", encoders on host"; or ""."""
        return ""

    def size(self, parameter: ParameterSpec) -> Bytes:
        """Bytes of a frozen parameter at rest."""
        return parameter.num_bytes

    def narrow(self, width: int) -> "Storage":
        """The same place with `width` bytes a number."""
        return Narrow(width=width, of=self)

    def at(self, place: "Storage") -> "Storage":
        """Another place with the same bytes a number."""
        return place

    def staged(self, sizes: Sequence[Bytes]) -> Bytes:
        """Bytes on the device that hosted layers of these sizes take as they come and go: the two largest ones."""
        return sum(sorted(sizes)[-2:])

    def fetch(self, size: Bytes, bandwidth: float) -> Seconds:
        """Time of bringing a hosted layer of that size from the host, at `bandwidth` bytes a second."""
        return size / bandwidth

    @property
    def brings(self) -> bool:
        """Whether anything has to be brought, so that devices must say how fast they copy from the host."""
        return True


@dataclass(frozen=True, slots=True)
class OnDevice(Storage):
    """All weights are on the device, all the time."""

    @property
    def name(self) -> str:
        """The name in plan files."""
        return "device"

    @property
    def brings(self) -> bool:
        """Nothing has to be brought."""
        return False

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """None of the layers."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class OnHost(Storage):
    """All weights are in host memory, and come to the device layer by layer."""

    @property
    def name(self) -> str:
        """The name in plan files."""
        return "host"

    @property
    def words(self) -> str:
        """The words for tables of layouts."""
        return ", encoders on host"

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """All of the layers."""
        return frozenset(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow(Storage):
    """Weights of `width` bytes a number, in the place of another storage."""

    width: int
    of: Storage

    @property
    def name(self) -> str:
        """The name of the place."""
        return self.of.name

    @property
    def words(self) -> str:
        """The words of the place."""
        return self.of.words

    @property
    def brings(self) -> bool:
        """Whether anything has to be brought in that place."""
        return self.of.brings

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        """The layers that are kept in host memory in that place."""
        return self.of.hosted(layers)

    def size(self, parameter: ParameterSpec) -> Bytes:
        """Bytes of a parameter at this width."""
        return prod(parameter.shape) * self.width

    def narrow(self, width: int) -> Storage:
        """The same place with another width."""
        return Narrow(width=width, of=self.of)

    def at(self, place: Storage) -> Storage:
        """Another place with this width."""
        return Narrow(width=self.width, of=place)

    def staged(self, sizes: Sequence[Bytes]) -> Bytes:
        """Bytes on the device as that place has them."""
        return self.of.staged(sizes)

    def fetch(self, size: Bytes, bandwidth: float) -> Seconds:
        """Time of bringing a layer as that place has it."""
        return self.of.fetch(size, bandwidth)


DEVICE, HOST = OnDevice(), OnHost()

STORAGES: dict[str, Storage] = {storage.name: storage for storage in (DEVICE, HOST)}
"""The places of encoders among which a search chooses, by the name in plan files. One that is added is searched, priced
and run."""


def storage_of(name: str) -> Storage:
    """The storage of that name.

    Raises:
        ConfigError: there is none; it names those that there are.
    """
    if name not in STORAGES:
        raise ConfigError(
            f"the storage {name!r} for weights of encoders is not known to this version; use {', '.join(STORAGES)}"
        )
    return STORAGES[name]
