"""Profiles that are made once: a folder of profile files, each named by the hash of all that it depends on.

    $XDG_CACHE_HOME/diffusionpipe/profiles/5f3a....json        XDG_CACHE_HOME is ~/.cache where it is not set

Nothing in it is ever wrong, only superfluous; the folder may be deleted at any time.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path

from diffusionpipe.costs import LayerProfile, ModelGraph, Profile
from diffusionpipe.costs.devices import DeviceRates
from diffusionpipe.costs.files import read_profile, write_profile
from diffusionpipe.ir.codec import encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """All facts on which a profile depends: model, precision, batch sizes, device, versions."""

    model: ModelGraph
    precision: str
    batch_sizes: Sequence[int]
    device: str
    rates: DeviceRates | None
    """The rates with which it is computed; None where it is measured."""
    versions: tuple[tuple[str, str], ...]
    """(package, version) of the packages on which the numbers depend."""
    ranks: tuple[str, ...] = ()
    """Node and device of each rank that measured together with the others; () where one measured alone."""
    update: str = ""
    """The kind of the measured update; "" where none was measured."""

    @property
    def digest(self) -> str:
        """A hash of the key, which names the profile's file."""
        content = {
            "model": encode(self.model, ModelGraph),
            "precision": self.precision,
            "batch_sizes": list(self.batch_sizes),
            "device": self.device,
            "rates": asdict(self.rates) if self.rates is not None else None,
            "versions": self.versions,
            "ranks": self.ranks,
            "update": self.update,
            # The names of a profile's figures: files from before a new figure are not found.
            "figures": [field.name for field in fields(LayerProfile)],
        }
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The path of the folder in which profiles are kept, below XDG_CACHE_HOME or ~/.cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffusionpipe" / "profiles"


def cached_profile(key: ProfileKey, make: Callable[[], Profile], folder: Path | None) -> tuple[Profile, Path | None]:
    """(profile of this key, its file): from the folder or, if it is not there, from `make`, and then kept there.

    Without a `folder`, the profile is always made and the file is None.

    Raises:
        FileFormatError: the kept file has been altered.
    """
    return kept_profile(key.digest if folder else "", make, folder)


def kept_profile(digest: str, make: Callable[[], Profile], folder: Path | None) -> tuple[Profile, Path | None]:
    """(profile, its file) that is kept under the name `digest`; if none is, `make` makes the profile, which is kept.

    The file is None without a folder, and, with a warning, for a folder that cannot be written.

    Raises:
        FileFormatError: the kept file has been altered.
    """
    if folder is None:
        return make(), None
    path = folder / f"{digest}.json"
    if path.exists():
        return read_profile(path), path
    profile = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(profile, path)
    except OSError as error:
        logger.warning("profile_kept=False folder=%s reason=%s", folder, error.strerror)
        return profile, None
    return profile, path


def find_profile(key: ProfileKey, folder: Path) -> Profile | None:
    """The profile of that key in the folder; None if it is not there.

    Raises:
        FileFormatError: the kept file has been altered.
    """
    path = _path(key, folder)
    return read_profile(path) if path.exists() else None


def keep_profile(key: ProfileKey, profile: Profile, folder: Path) -> None:
    """Write the profile into the folder, under the name of its key.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(profile, _path(key, folder))


def _path(key: ProfileKey, folder: Path) -> Path:
    return folder / f"{key.digest}.json"
