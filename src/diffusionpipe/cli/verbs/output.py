"""The output of the ranks of a job: our log on one console, and no noise of other packages."""

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NOISE = (
    ("torch._subclasses.fake_tensor", "failed while attempting to run meta for"),
    ("transformers.utils.import_utils", "requires torchvision (not installed)"),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"),
)
"""(logger, words) of messages that are left out, because users need not act: a model that does not fit together becomes
our own error, no picture goes through transformers' processors, and nothing needs a faster kernel of bitsandbytes."""
NOISY_WARNINGS = ("Mismatch dtype between input and weight",)
"""Beginnings of warnings that are left out: norms in float32 under autocast are intended."""


class ConsoleHandler(logging.Handler):
    """A log handler that writes records on a console, above the bars that may be there."""

    def __init__(self, console: "Console") -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record as one line, which is not wrapped, so that it can be searched and copied."""
        from rich.text import Text

        try:
            self._console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:
            self.handleError(record)


@dataclass(frozen=True)
class Without:
    """A log filter that leaves out records whose message contains `words`."""

    words: str

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged: its message does not have the words."""
        # The message before its arguments are put in: they may have such words by chance.
        return self.words not in str(record.msg)


def log_to(console: "Console", rank: int | None) -> None:
    """Sends our log to the console: all messages of rank 0 and of a process without a rank (None), else warnings alone.

    On a terminal the lines of rank 0 do not name the rank. Messages no longer go to the console of an earlier call.
    """
    is_named = rank is not None and (rank > 0 or not console.is_terminal)
    handler = ConsoleHandler(console)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {f'rank={rank} ' if is_named else ''}%(message)s", datefmt="%H:%M:%S")
    )
    package = logging.getLogger("diffusionpipe")
    # A rank that changes its number logs to one console, not to two.
    for earlier in [one for one in package.handlers if isinstance(one, ConsoleHandler)]:
        package.removeHandler(earlier)
    package.addHandler(handler)
    package.setLevel(logging.WARNING if rank else logging.INFO)


def quieten() -> None:
    """Leaves out the messages and warnings of other packages that NOISE and NOISY_WARNINGS list; others stay."""
    for name, words in NOISE:
        logging.getLogger(name).addFilter(Without(words))
    for beginning in NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=beginning, category=UserWarning)
