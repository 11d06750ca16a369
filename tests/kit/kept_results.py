"""Results that one process of a test run computes for all others: most of what a new rank does would be done again.

They are files in a folder that lives as long as the run. A key is compared by its pickle, in which functions are names.
What cannot be pickled, such as a closure or a traced graph, is computed by each process for itself.
"""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = "DIFFUSIONPIPE_TESTS_KEPT_RESULTS"
"""The environment variable with the folder; processes inherit it. Without it nothing is kept."""


@contextmanager
def results_kept() -> Iterator[None]:
    """This process and those that it starts share their results; one that has inherited a folder uses it."""
    if FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kept-results-") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def kept(key: object, make: Callable[[], T]) -> T:
    """What `make` returns, or what it has returned to any process of this run that had the same key."""
    path = _path_of(key)
    if path is None:
        return make()
    if path.exists():
        found: T = pickle.loads(path.read_bytes())
        return found
    made = make()
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(pickle.dumps(made))
    draft.replace(path)  # at once: others may be reading
    return made


def _path_of(key: object) -> Path | None:
    """The file of a result; None where it is not shared."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder).is_dir():
        return None
    try:
        pickled = pickle.dumps(key)
    except Exception:  # each kind of object refuses with an error of its own
        return None
    return Path(folder) / hashlib.sha256(pickled).hexdigest()
