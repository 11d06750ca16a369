"""The files that a command will write, checked before its work."""

from collections.abc import Sequence
from pathlib import Path


def check_outputs(*files: Path | None, pictures: Sequence[Path | None] = ()) -> None:
    """Checks that files can be written, and that `pictures` have an ending that can be drawn; None is passed over.

    Raises:
        ConfigError: a folder is missing, full or read-only, a file is a folder, or a picture has an unknown ending.
    """
    from diffusionpipe.files import output_file

    output_file.check_outputs((*files, *pictures))
    asked = [path for path in pictures if path is not None]
    if asked:
        from diffusionpipe.viz.pictures import check_picture

        for path in asked:
            check_picture(path)
