"""The work that is under way, for the user to see: a bar on a terminal, a line now and then elsewhere. Rank 0 shows it.

loading weights ━━━━━━━╸━━━  parameters 1.2B/2.6B, 8 s left 0:00:07       on a terminal; gone when it is done
loading weights parameters=1.2B/2.6B elapsed_s=13 left_s=15              in the log, if it takes longer than 3 s
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

PATIENCE: Seconds = 3.0
"""The seconds after which work that is still under way gets its first line in the log."""
LOG_EVERY: Seconds = 10.0
"""The seconds between two lines in the log about the same work."""
REFRESH: Seconds = 0.2
"""The shortest time between two drawings of a bar that no thread redraws, in seconds."""

Clock = Callable[[], Seconds]


class ConsoleWork:
    """One piece of work under way on the screen, with its title, progress and time left."""

    def __init__(self, title: str, clock: Clock, budget: Seconds | None = None) -> None:
        """`budget`: the seconds after which the work is over, done or not; None for no limit."""
        self._title, self._clock, self._budget = title, clock, budget
        self._started = self._drawn = self._shown = clock()
        self._done, self._total = 0.0, 0.0
        self._words: Mapping[str, object] = {}
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def show(self, done: float, total: float, words: Mapping[str, object] | None = None) -> None:
        """Shows that `done` of `total` is done; `words`: name -> text to show for it, e.g. {"layer": "12/59"}."""
        self._done, self._total, self._words = done, total, words or {}
        self._shown = self._clock()
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in self._words.items()]
        if (left := self._left()) is not None:
            texts.append(f"{left:.0f} s left")
        self.write(done, total, ", ".join(texts))

    def write(self, done: float, total: float, text: str) -> None:
        """Shows the progress as a bar with `text` beside it, if the output is a terminal."""
        if self._bars is None or self._task is None:
            return
        self._bars.update(self._task, completed=done, total=total, text=text)
        now = self._clock()
        # Timed work has no thread that draws, so a bar is drawn here, and not too often.
        if not self._bars.live.auto_refresh and now - self._drawn >= REFRESH:
            self._drawn = now
            self._bars.refresh()

    def draw_on(self, bars: Progress) -> None:
        """Adds the work's bar to these bars."""
        self._bars, self._task = bars, bars.add_task(self._title, total=None, text="")
        bars.refresh()

    def clear(self) -> None:
        """Removes the work's bar, if it has one."""
        if self._bars is not None and self._task is not None:
            self._bars.remove_task(self._task)

    def line(self) -> str:
        """A line for the log: the title, the words shown last, and the seconds elapsed and left."""
        pairs = dict(self._words) | {"elapsed_s": f"{self._clock() - self._started:.0f}"}
        if (left := self._left()) is not None:
            pairs["left_s"] = f"{left:.0f}"
        return " ".join([self._title, *(f"{name}={value}" for name, value in pairs.items())])

    def _left(self) -> Seconds | None:
        """The seconds until the end, at the pace up to the last report, less the time since; None if not known.

        The time since the last report does not count for the pace: work under way is not done.
        """
        if not 0 < self._done <= self._total:
            return None
        now = self._clock()
        left = (self._shown - self._started) * (self._total - self._done) / self._done - (now - self._shown)
        if self._budget is not None:
            left = min(left, self._started + self._budget - now)
        return left if left > 0 else None


class ConsoleScreen:
    """Shows work under way: as bars on a terminal, else as lines in the log; nothing on ranks that do not speak."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        speaks: bool = True,
        patience: Seconds = PATIENCE,
        log_every: Seconds = LOG_EVERY,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`speaks`: false on all ranks but the first; a rank that does not speak shows nothing.

        `patience`: seconds until work gets its first line in the log; `log_every`: seconds between its further lines.
        """
        self.console = console or Console(stderr=True)
        self._clock, self._speaks, self._patience, self._log_every = clock, speaks, patience, log_every
        self._bars: Progress | None = None

    @property
    def columns(self) -> int | None:
        """The width of the terminal, where bars are drawn; None where there is none, or the rank does not speak."""
        return self.console.width if self._speaks and self.console.is_terminal else None

    @contextmanager
    def work(self, title: str, *, is_timed: bool = False, budget: Seconds | None = None) -> Iterator[ConsoleWork]:
        """A context that shows its block as work of this title, e.g. "loading weights"; its bar goes with it.

        `is_timed`: the work measures times, so no thread of ours draws beside it. `budget`: the seconds after which it
        is over.
        """
        work = ConsoleWork(title, self._clock, budget)
        if self.columns is not None:
            with self._drawn(work, is_kept=False, is_timed=is_timed):
                yield work
        elif self._speaks:
            with self._logged(work):
                yield work
        else:
            yield work

    @contextmanager
    def bar(self, title: str) -> Iterator[ConsoleWork]:
        """A context with a bar that stays when the block is over; it shows nothing but on a terminal."""
        work = ConsoleWork(title, self._clock)
        if self.columns is not None:
            with self._drawn(work, is_kept=True, is_timed=False):
                yield work
        else:
            yield work

    @contextmanager
    def _drawn(self, work: ConsoleWork, *, is_kept: bool, is_timed: bool) -> Iterator[None]:
        """A context that draws the work's bar in the live display of the outermost work, or in a new one.

        `is_kept`: the bar stays at the end. `is_timed`: no thread redraws it, for the work measures times.
        """
        outer, bars = self._bars, self._bars
        if bars is None:
            bars = self._bars = _bars(self.console, is_kept=is_kept, is_timed=is_timed)
            bars.start()
        work.draw_on(bars)
        try:
            yield
        finally:
            if not is_kept:
                work.clear()
            if outer is None:
                self._bars = None
                bars.stop()

    @contextmanager
    def _logged(self, work: ConsoleWork) -> Iterator[None]:
        is_over = threading.Event()

        def watch() -> None:
            wait = self._patience
            while not is_over.wait(wait):
                logger.info("%s", work.line())
                wait = self._log_every

        # A thread, because the work itself does not come back here while it lasts.
        thread = threading.Thread(target=watch, name=f"log of {work.line()}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _bars(console: Console, *, is_kept: bool, is_timed: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=not is_kept,
        auto_refresh=not is_timed,
        refresh_per_second=4,
    )
