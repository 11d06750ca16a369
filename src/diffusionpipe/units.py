"""The two units of the whole code: seconds and bytes. Milliseconds and gibibytes exist only where people read them."""

from typing import TypeAlias

Seconds: TypeAlias = float
Bytes: TypeAlias = int
