"""The versions of a block's weights that live at once: a ring of storages, of which the parameters show one at a time.

    stashed, first of 3 stages, a micro-batch for each batch           ring 0   1   2
    F2 of window 0 reads version 0, bound before it; the newest             v0
    B0 reads version 0, bound before it                                     v0
    STEP   copies the newest into the next storage and steps there          v0  v1
    F3 of window 1 reads version 1                                          v0  v1
    B1 reads version 0, as its forward did; bound before it                 v0  v1
    STEP   version 2                                                        v0  v1  v2

A linear layer's backward reads the storage that its forward read, but a convolution's reads what its parameter shows at
that moment. So a version is bound before the forward *and* before the backward, and nobody writes to its storage in
between. With one storage, the newest, both read what is there when they run.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class BlockVersions:
    """Mutable: what the parameters show, and the contents of the ring."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_versions: int) -> None:
        self._parameters = tuple(parameters)
        present = [parameter.data for parameter in parameters]
        others = ([torch.empty_like(value) for value in present] for _ in range(num_versions - 1))
        self._ring: tuple[list[Tensor], ...] = (present, *others)
        self._bound = self._newest = self._first = 0

    @property
    def newest(self) -> int:
        """The steps made."""
        return self._newest

    @property
    def num_bytes(self) -> int:
        """Held by all storages."""
        return sum(value.numel() * value.element_size() for values in self._ring for value in values)

    def bind(self, version: int) -> None:
        """Let the parameters show a version; nothing reads an older one than that of the last flush."""
        version = max(version, self._first)
        assert version <= self._newest < version + len(self._ring), "this version does not live"
        if version != self._bound:
            self._show(version)

    def _show(self, version: int) -> None:
        for parameter, value in zip(self._parameters, self._ring[version % len(self._ring)], strict=True):
            parameter.data = value
        self._bound = version

    @torch.no_grad()
    def step(self, update: Callable[[], None]) -> None:
        """Make the next version: `update` changes the parameters, which show a copy of the newest one.

        Forwards of other micro-batches are open, so autograd must not take this for a change of what they saved.
        """
        source, target = (self._ring[version % len(self._ring)] for version in (self._newest, self._newest + 1))
        if source is not target and source:
            torch._foreach_copy_(target, source)
        self._newest += 1
        self._show(self._newest)
        with _unsafe_preserve_version_counter(self._parameters):
            update()

    def flush(self) -> None:
        """Nothing is open: the parameters show the newest version, and nothing reads an older one from now on."""
        self._first = self._newest
        self.bind(self._newest)
