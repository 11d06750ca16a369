"""Packages that diffusers and peft import wherever they are installed, though nothing of ours asks them to.

bitsandbytes takes a second of every process. A package that is None in `sys.modules` cannot be imported, and
`importlib.util.find_spec` does not find it, so diffusers and peft do without it. Code that needs it calls `reveal`
first.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("bitsandbytes",)


@contextmanager
def hidden() -> Iterator[None]:
    """A context in which `PACKAGES` cannot be imported; a package that is imported already stays."""
    for name in PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # the way to forbid an import
    try:
        yield
    finally:
        reveal()


def reveal() -> None:
    """Allow the import of `PACKAGES` again, also within the context of `hidden`."""
    for name in PACKAGES:
        if sys.modules.get(name, name) is None:
            del sys.modules[name]
