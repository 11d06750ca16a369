"""The ledger of a rank: parameters and all that lies beside them, where it rests, and its bytes. No torch."""

from diffusionpipe.holding.ledger import Ledger
from diffusionpipe.holding.state import Held, Item, State, plain_states
from diffusionpipe.holding.storage import DEVICE, HOST, STORAGES, Storage
from diffusionpipe.holding.workload import Workload

__all__ = [
    "DEVICE",
    "HOST",
    "STORAGES",
    "Held",
    "Item",
    "Ledger",
    "State",
    "Storage",
    "Workload",
    "plain_states",
]
