"""The versions of a block's weights that live at once: a ring of storages, of which the parameters show one at a time.

    stashed, first of 3 stages, a micro-batch for each batch           ring 0   1   2
    F2 of window 0 reads version 0, bound before it; the newest             v0
    B0 reads version 0, bound before it                                     v0
    STEP   copies the newest into the next storage and steps there          v0  v1
    F3 of window 1 reads version 1                                          v0  v1
    B1 reads version 0, as its forward did; bound before it                 v0  v1
    STEP   version 2                                                        v0  v1  v2

A linear layer's backward reads the storage that its forward read, but a convolution's reads what its parameter shows at
that moment. So a version is bound before the forward *and* before the backward, and its storage is not written in
between. With one storage, the newest, both read the values that are there when they run.

Weights that are predicted for a forward are copies beside the ring, and its backward reads the same copy. A copy is
known by the version that it was made of and the step that it was made for. The oldest copy makes room for the next one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class BlockVersions:
    """The versions of one block's weights that live at once; the parameters show one of them at a time.

    Mutable: the values that parameters show, the ring of versions, and the predicted copies.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_versions: int, num_predictions: int = 0) -> None:
        """`num_versions` live at once; `num_predictions` of them are predicted copies."""
        self._parameters = tuple(parameters)
        present = [parameter.data for parameter in parameters]
        others = [[torch.empty_like(value) for value in present] for _ in range(num_versions - 1)]
        num_others = len(others) - num_predictions
        self._ring: tuple[list[Tensor], ...] = (present, *others[:num_others])
        self._copies = others[num_others:]
        self._predicted: dict[tuple[int, int], list[Tensor]] = {}
        """(version, step) -> the predicted copy of the version for the step, the oldest first."""
        self._bound: int | tuple[int, int] = 0
        self._newest = self._first = 0

    @property
    def newest(self) -> int:
        """The number of the newest version, which is the number of steps made."""
        return self._newest

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages of all versions and predicted copies."""
        storages = (*self._ring, *self._copies)
        return sum(value.numel() * value.element_size() for values in storages for value in values)

    def bind(self, version: int) -> None:
        """Let the parameters show the values of a version, or of the version of the last flush if that is newer."""
        version = max(version, self._first)
        assert version <= self._newest < version + len(self._ring), "this version does not live"
        if version != self._bound:
            self._show(version)

    def bind_predicted(self, version: int, step: int, predict: Callable[[int], None]) -> None:
        """Let the parameters show a version's predicted copy: the weights that are expected when step `step` starts.

        The first call for a version and a step makes the copy, while the version is the newest: `predict(version)`
        changes the parameters, which show a copy of it. If the step starts from the version itself, they show that.
        """
        version = max(version, self._first)
        if version == step:
            self.bind(version)
            return
        key = version, step
        if key not in self._predicted:
            assert version == self._newest, "this prediction does not live"
            self._make(key, predict)
        if key != self._bound:
            self._show_values(self._predicted[key], key)

    @torch.no_grad()
    def _make(self, key: tuple[int, int], predict: Callable[[int], None]) -> None:
        """Make the predicted copy for `key`, (version, step), and let the parameters show it.

        Forwards of other micro-batches may be open meanwhile.
        """
        # Copies are taken in order until all are in use; then the oldest makes room.
        if len(self._predicted) == len(self._copies):
            values = self._predicted.pop(next(iter(self._predicted)))
        else:
            values = self._copies[len(self._predicted)]
        if values:
            torch._foreach_copy_(values, self._ring[self._newest % len(self._ring)])
        self._predicted[key] = values
        self._show_values(values, key)
        # Open forwards have saved these parameters; a change that autograd sees would stop their backward.
        with _unsafe_preserve_version_counter(self._parameters):
            predict(key[0])

    def _show(self, version: int) -> None:
        self._show_values(self._ring[version % len(self._ring)], version)

    def _show_values(self, values: Sequence[Tensor], bound: int | tuple[int, int]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
        self._bound = bound

    @torch.no_grad()
    def step(self, update: Callable[[], None]) -> None:
        """Make the next version: `update` changes the parameters, which show a copy of the newest one.

        Forwards of other micro-batches are open, so autograd must not take this for a change of what they saved.
        """
        source, target = (self._ring[version % len(self._ring)] for version in (self._newest, self._newest + 1))
        # With one storage the update is made in place.
        if source is not target and source:
            torch._foreach_copy_(target, source)
        self._newest += 1
        self._show(self._newest)
        with _unsafe_preserve_version_counter(self._parameters):
            update()

    def flush(self) -> None:
        """Show the newest version and forget older ones; only for a moment at which no micro-batch is open."""
        # Actions of the next batches may ask for versions older than the flush; they get this one.
        self._first = self._newest
        self._predicted.clear()
        self.bind(self._newest)
