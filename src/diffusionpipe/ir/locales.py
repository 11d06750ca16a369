"""Words of users where the locale is not one of UTF-8, as LC_ALL=C or de_DE.ISO-8859-1.

Python then takes the bytes of arguments and of file names for letters of that locale, or for lone surrogates.
"""

import os
import sys
from io import TextIOWrapper


def as_utf8(text: str) -> str:
    """The argument or file name read as UTF-8, where Python has decoded its bytes by another locale.

    It is unchanged where its bytes are not UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def for_file_names(text: str) -> str:
    """The text without the letters that the encoding of file names does not have."""
    encoding = sys.getfilesystemencoding()
    return text.encode(encoding, "ignore").decode(encoding)


def print_everything() -> None:
    """Change stdout and stderr so that letters which the locale does not have are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
