"""Memory that is written again within an iteration, and the one rule for it.

    Memory may be written again when no tensor lies in it but the one that its keeper holds.

Each of these lies in memory: a received tensor; a view, a slice or an identity of it that another stage has; a tensor
that is saved for autograd, put aside by I for W, being sent, or held by the caller as a result. torch counts the
tensors of each storage, so no list of readers is needed, and the rule holds on every legal order:

    gradients of parameters    are added to in place, so each is moved out of memory where it is not alone
                               (`gradients.BlockGradients.added`); buckets are memory of their own from the start
    weights come from hosts    what a layer writes must not lie in the staging memory (`host_weights.HostWeights`)
    rows of the store          written once in an iteration; results must not lie in them (`store.RowStore.lasting`)

Received messages, and encoder outputs on their way to a later fill, are new memory each time.

>>> received = torch.zeros(4, 6)
>>> handed_on = received[1:].flatten()
>>> num_in_memory_of(handed_on), memory_of(handed_on) == memory_of(received)
(2, True)
>>> num_in_memory_of(handed_on.clone())
1
"""

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """The address at which the memory of the tensor's storage begins; its views begin anywhere in it."""
    return tensor.untyped_storage().data_ptr()


def storage_of(tensor: Tensor) -> int:
    """The identity of the tensor's storage while it lives, which views share; fake tensors have no address."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def num_in_memory_of(tensor: Tensor) -> int:
    """The number of tensors that share the tensor's storage, with itself and with those that only torch holds."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # `storage` counts too


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient; before torch 2.10 it is always the parameter's own."""
    own: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return own or parameter.dtype
