"""The ledger of a rank: parameters and all that lies beside them, where it rests, and its bytes. No torch."""

from diffusionpipe.holding.workload import Workload

__all__ = ["Workload"]
