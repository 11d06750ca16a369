"""What every rank needs, imported once: ranks are forked from a process that has it."""

import torch.distributed.pipelining  # noqa: F401

import benchmarks.throughput.emulated
import benchmarks.throughput.overhead
import benchmarks.throughput.real  # noqa: F401
