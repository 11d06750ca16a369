"""Profiles that are made once: a folder of profile files, each named by the hash of all that it depends on.

    $XDG_CACHE_HOME/diffusionpipe/profiles/5f3a....json        XDG_CACHE_HOME is ~/.cache where it is not set

Nothing in it is ever wrong, only superfluous; the folder may be deleted at any time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from diffusionpipe.costs import ModelGraph, Profile
from diffusionpipe.costs.devices import DeviceRates
from diffusionpipe.costs.files import read_profile, write_profile
from diffusionpipe.ir.codec import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """All that a profile depends on."""

    model: ModelGraph
    precision: str
    batch_sizes: Sequence[int]
    device: str
    rates: DeviceRates | None
    """What it is computed with; None where it is measured."""
    versions: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """The name of the file."""
        content = {
            "model": encode(self.model, ModelGraph),
            "precision": self.precision,
            "batch_sizes": list(self.batch_sizes),
            "device": self.device,
            "rates": asdict(self.rates) if self.rates is not None else None,
            "versions": self.versions,
        }
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where profiles are kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffusionpipe" / "profiles"


def cached_profile(key: ProfileKey, make: Callable[[], Profile], folder: Path | None) -> tuple[Profile, Path | None]:
    """The profile of that key and its file, made and kept if the folder has it not; None for no folder: always made.

    Raises:
        FileFormatError: the kept file has been altered.
    """
    if folder is None:
        return make(), None
    path = folder / f"{key.digest}.json"
    if path.exists():
        return read_profile(path), path
    profile = make()
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    return profile, path
