"""A process that keeps the memory which it has freed.

A C library returns large freed blocks to the system, and every page of the next such block costs a fault: 40 % of the
forward of a small U-Net at 64 samples. Whether that happens depends on what else lies on the heap, so layers in passes
and the same layers in training would not take equally long.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers from glibc's malloc.h."""


def disable_malloc_trim() -> bool:
    """Let this process keep freed memory for its next tensors, for good; False if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Without mmap large blocks come from the heap, where they stay when freed; -1 keeps the heap's end from shrinking.
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
