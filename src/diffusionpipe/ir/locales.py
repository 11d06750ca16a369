"""Words of users where the locale is not one of UTF-8, as LC_ALL=C or de_DE.ISO-8859-1.

Python then takes the bytes of arguments and of file names for letters of that locale, or for lone surrogates.
"""

import os
import sys
from io import TextIOWrapper


def as_utf8(text: str) -> str:
    """The text whose bytes in UTF-8 are the bytes that the system has given.

    The text itself where they are not UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def for_file_names(text: str) -> str:
    """The text without the letters that a file name cannot have in this locale."""
    encoding = sys.getfilesystemencoding()
    return text.encode(encoding, "ignore").decode(encoding)


def print_everything() -> None:
    """Let what this process prints never fail: letters that the locale does not have are written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
