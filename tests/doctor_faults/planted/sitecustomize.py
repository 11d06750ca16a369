"""Python imports this module when it starts. In the rank that PLANTED_RANKS names it plants what no CPU machine has.

    torch=2.9.0     another version of torch
    gpu=UUID        one CUDA device with this UUID: the functions of torch.cuda answer as if there were one

Under these functions there is only the driver. Nothing computes on the device: doctor has to find the fault before.
"""

import os

if os.environ.get("RANK", "none") in os.environ.get("PLANTED_RANKS", "").split(","):
    from types import SimpleNamespace

    import torch

    kind, _, value = os.environ["PLANTED"].partition("=")
    if kind == "torch":
        torch.__version__ = value
    else:
        card = SimpleNamespace(name="Planted GPU", uuid=value, total_memory=80 * 2**30)
        torch.cuda.device_count = lambda: 1
        torch.cuda.set_device = lambda device: None
        torch.cuda.get_device_properties = lambda device=None: card
        torch.cuda.mem_get_info = lambda device=None: (79 * 2**30, 80 * 2**30)
        torch.cuda.nccl.version = lambda: (2, 27, 5)
