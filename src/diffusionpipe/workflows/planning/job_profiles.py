"""Profiles that all ranks of a job measured together, in the folder of kept profiles."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from diffusionpipe.costs import Profile
from diffusionpipe.profiler.measured import package_versions
from diffusionpipe.trainer.old_documents import update_of_before
from diffusionpipe.trainer.setup.job_profile import Measurement
from diffusionpipe.workflows.planning.profile_cache import ProfileKey, find_profile, keep_profile

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedProfiles:
    """Finds and keeps measured profiles as files in a folder: a `ProfileCache`."""

    folder: Path

    def find(self, measurement: Measurement) -> Profile | None:
        """The profile that was kept for an equal measurement; None if there is none.

        Raises:
            FileFormatError: the kept file has been altered.
        """
        before = replace(measurement, update=update_of_before(measurement.update))
        return find_profile(_key(measurement), self.folder) or find_profile(_key(before), self.folder)

    def keep(self, measurement: Measurement, profile: Profile) -> None:
        """Keep the profile for later equal measurements; a folder that cannot be written gives a warning."""
        try:
            keep_profile(_key(measurement), profile, self.folder)
        except OSError as error:
            logger.warning("profile_kept=False folder=%s reason=%s", self.folder, error.strerror)


def _key(measurement: Measurement) -> ProfileKey:
    return ProfileKey(
        model=measurement.model,
        precision=measurement.precision,
        batch_sizes=measurement.batch_sizes,
        device=measurement.ranks[0].partition(": ")[2],
        rates=None,
        versions=package_versions(),
        ranks=measurement.ranks,
        update=measurement.update,
    )
