"""What may be wrong with a tortured job."""

from kit.jobs import HangError, StrayError


class CauseError(AssertionError):
    """The message names the wrong rank or cause, or the exit status is wrong."""


class LostError(AssertionError):
    """A checkpoint that was there is gone or damaged."""


class UnequalError(AssertionError):
    """A resumed run differs from an uninterrupted one."""


COLUMNS = {
    HangError: "hang",
    StrayError: "stray",
    CauseError: "wrong cause",
    LostError: "lost",
    UnequalError: "not equal",
}
"""Errors and their columns in the table; any other error is "other"."""


def column_of(error: BaseException) -> str:
    return next((name for kind, name in COLUMNS.items() if isinstance(error, kind)), "other")
