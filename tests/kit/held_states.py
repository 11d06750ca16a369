"""The memory that an optimizer of torch holds."""

from torch import Tensor


def held_by(optimizer):
    """The bytes of all storages among the states of torch optimizers, each once."""
    storages = {}

    def note(value):
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for one in value:
                note(one)

    for part in optimizer.parts:
        for state in part.state.values():
            for value in state.values():
                note(value)
    return sum(storages.values())
