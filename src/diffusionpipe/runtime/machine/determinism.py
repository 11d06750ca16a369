"""Kernels whose results are the same in every run on the same kind of device.

On GPUs the backward of attention and of embeddings, convolutions, and matrix products that run on several streams add
in an order of their own by default. A kernel that has no other way raises torch's error, which names it.
"""

from collections.abc import MutableMapping

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable for cuBLAS's working memory, which cuBLAS reads when it starts."""


def be_deterministic(environ: MutableMapping[str, str]) -> None:
    """Let this process use only kernels that give the same bits in every run; to be called before it uses a GPU.

    Sets torch's and cuDNN's switches, and cuBLAS's variable in `environ` if it is not set.
    """
    # Eight buffers of 4096 KiB, one of the two settings with which NVIDIA's documentation promises determinism.
    environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # torch would fill each new tensor with NaN, which costs time; all are written before they are read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
