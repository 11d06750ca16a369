"""Parameters of blocks whose results are never read, such as those for captions in the last block of Qwen-Image.

    picture --- attention --- picture's MLP ---> read by the next layer
    text    ----+  |
                   +------- text's MLP ------> never read

They get no gradient, so they are not trained: no memory for their optimizer states, and no decay of weights that would
depend on the layout.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from diffusionpipe.models.cut.exporting import Exported
from diffusionpipe.models.cut.glue import CALL
from diffusionpipe.models.cut.leaves import fake_tensors, unchanged
from diffusionpipe.models.cut.module_calls import BATCHES, ModuleCall
from diffusionpipe.models.graphs.graph import attribute


def unread_parameters(root: nn.Module, exported: Exported, needed: Sequence[fx.Node]) -> set[nn.Parameter]:
    """The trained parameters of submodules on which the forward's output does not depend.

    `needed`: the nodes of the trace on which it depends. Only calls of which some results are not read are looked at;
    nothing is computed.
    """
    kept = set(needed)
    calls = {node: exported.call(node) for node in needed if node.target is CALL}
    times = Counter(call.module for call in calls.values())
    found: set[nn.Parameter] = set()
    for node, call in calls.items():
        read = sorted({int(user.args[1]) for user in node.users if user in kept})  # type: ignore[arg-type]
        # Another call of the module may be read where this one is not.
        if len(read) < len(node.meta["val"]) and times[call.module] == 1:
            found |= _without_gradient(root, call, node, read)
    return found


def _without_gradient(root: nn.Module, call: ModuleCall, node: fx.Node, read: Sequence[int]) -> set[nn.Parameter]:
    """The trained parameters of the call's module on which no result with an index in `read` depends.

    `node`: the call in the trace.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = attribute(root, call.module)
    assert isinstance(module, nn.Module)
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not own:
        return set()
    with unchanged(root), FakeTensorMode(allow_non_fake_inputs=True), fake_tensors(module), torch.enable_grad():
        given = [_example(each.meta["val"]) for each in node.args[0]]  # type: ignore[union-attr]
        parameters = {name: p.requires_grad_() for name, p in module.named_parameters() if name in own}
        results = call.run(root, given, BATCHES[0])
        outputs = [results[index] for index in read if results[index].requires_grad]
        gradients = torch.autograd.grad(
            outputs, list(parameters.values()), [torch.ones_like(each) for each in outputs], allow_unused=True
        )
    return {own[name] for name, gradient in zip(parameters, gradients, strict=True) if gradient is None}


def _example(traced: Tensor) -> Tensor:
    """An empty tensor of a traced tensor's shape and dtype, with the batch size that the trace was made with."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in traced.shape]
    return torch.empty(sizes, dtype=traced.dtype)
