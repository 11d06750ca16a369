"""The screen on which a run shows the work under way: the caller of a run hands one in.

A `Heard` screen also tells the watchdog of a job how far the work is; `NoScreen` shows nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from diffusionpipe.units import Seconds


class Work(Protocol):
    """The methods by which one piece of work under way shows its progress."""

    def show(self, done: float, total: float, words: Mapping[str, object] | None = None) -> None:
        """Shows that `done` of `total` is done; `words` say the same in words, e.g. {"layer": "12/59"}."""
        ...

    def write(self, done: float, total: float, text: str) -> None:
        """Shows the progress on a terminal alone, with `text` beside the bar."""
        ...


class Screen(Protocol):
    """The methods of a screen that shows work under way to a user."""

    @property
    def columns(self) -> int | None:
        """The width of the terminal on which bars are drawn; None where there is none."""
        ...

    def work(
        self, title: str, *, is_timed: bool = False, budget: Seconds | None = None
    ) -> AbstractContextManager[Work]:
        """A context that shows its block as work of this title, e.g. "loading weights".

        `is_timed`: whether the work measures times, so that no thread of ours draws meanwhile. `budget`: the seconds
        after which the work is over; None: not known.
        """
        ...

    def bar(self, title: str) -> AbstractContextManager[Work]:
        """A context with a bar that stays when the block is over; it shows nothing but on a terminal."""
        ...


class Listener(Protocol):
    """The methods of a part of the program, such as the watchdog, that follows the work that a screen shows."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context whose block the listener follows as work of this title."""
        ...

    def advance(self) -> None:
        """Notes that the work has come further."""
        ...


class Heard:
    """A screen that shows work on another screen, and reports the work and its progress to a listener."""

    def __init__(self, screen: Screen, listener: Listener) -> None:
        self._screen, self._listener = screen, listener

    @property
    def columns(self) -> int | None:
        """The width of the other screen's terminal; see `Screen`."""
        return self._screen.columns

    @contextmanager
    def work(self, title: str, *, is_timed: bool = False, budget: Seconds | None = None) -> Iterator[Work]:
        """A context that shows its block as work, which is a phase of the listener; see `Screen`."""
        with self._listener.phase(title), self._screen.work(title, is_timed=is_timed, budget=budget) as work:
            yield _HeardWork(work, self._listener)

    def bar(self, title: str) -> AbstractContextManager[Work]:
        """A bar of the other screen, which the listener does not hear; see `Screen`."""
        return self._screen.bar(title)


class _HeardWork:
    """A piece of work whose progress is shown by another one and reported to a listener."""

    def __init__(self, work: Work, listener: Listener) -> None:
        self._work, self._listener = work, listener

    def show(self, done: float, total: float, words: Mapping[str, object] | None = None) -> None:
        self._listener.advance()
        self._work.show(done, total, words)

    def write(self, done: float, total: float, text: str) -> None:
        self._work.write(done, total, text)


class NoScreen:
    """A screen of a rank that shows nothing."""

    columns = None

    @contextmanager
    def work(self, title: str, *, is_timed: bool = False, budget: Seconds | None = None) -> Iterator[Work]:
        """A context that shows nothing; see `Screen`."""
        yield _NoWork()

    @contextmanager
    def bar(self, title: str) -> Iterator[Work]:
        """A context that shows nothing; see `Screen`."""
        yield _NoWork()


class _NoWork:
    """A piece of work whose progress is not shown."""

    def show(self, done: float, total: float, words: Mapping[str, object] | None = None) -> None:
        pass

    def write(self, done: float, total: float, text: str) -> None:
        pass


def steps_of(work: Work) -> Callable[[int, int], None]:
    """A function to call with (steps done, all steps), which shows them as the progress of the work."""
    return lambda done, total: work.show(done, total, {"step": f"{done}/{total}"})
