"""A storage of encoders that the product does not know."""

from collections.abc import Sequence

from diffusionpipe.holding import Storage


class EverySecond(Storage):
    """Every second layer of the encoders rests in host memory."""

    @property
    def name(self) -> str:
        return "every second"

    @property
    def words(self) -> str:
        return ", half of the encoders on host"

    def hosted(self, layers: Sequence[str]) -> frozenset[str]:
        return frozenset(layers[1::2])


OWN = EverySecond()
