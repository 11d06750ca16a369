"""Ends this rank within seconds when another one has died, even while the main thread is blocked in C++.

Every rank beats once per `interval` in a key-value store and watches its successor on the ring of ranks:

    rank 0 --watches--> rank 1 --watches--> rank 2 --watches--> rank 0

A rank that finds its successor gone, or fails itself, posts a verdict; the first verdict counts and every rank reads it
with its next beat. So the cost is a handful of store requests per rank and second for any number of ranks, and all
ranks name the same culprit. Gone means: the process does not exist any more (same machine, noticed within one
interval), or no beat for `patience` (another machine, a stopped or frozen process), or the store itself is gone.

A rank may also live and hang. Beats carry the work of a rank (`runtime.job.progress`); `runtime.job.stall` finds the
rank that hangs, and every rank writes its Python stacks before it ends.

A long computation that holds Python's global lock delays beats, so `patience` is well above such pauses; and silence is
counted in the watcher's own rounds, so that a watcher that was paused itself accuses no rank.

Two ranks in one process. Rank 1 fails and posts the verdict [1]; rank 0 reads it with its next beat [2]:

>>> from queue import Queue
>>> from torch.distributed import HashStore
>>> store, said = HashStore(), Queue()
>>> posts = [Post(rank=rank, world_size=2, interval=0.01) for rank in (0, 1)]
>>> watchdogs = [Watchdog(post=post, connect=lambda: store, end=said.put) for post in posts]
>>> for watchdog in watchdogs:
...     watchdog.start()
>>> watchdogs[1].report(DiffusionPipeError("no such layer"))
>>> said.get(timeout=60).splitlines()[1:]
['no such layer', 'Rank 0 stops too.']
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from diffusionpipe.errors import DiffusionPipeError, PeerError
from diffusionpipe.runtime.job.progress import Moment, Progress
from diffusionpipe.runtime.job.stall import (
    are_settled,
    dump_stacks,
    may_judge,
    moment_to_text,
    parse_moment,
    reason_of,
    root_cause,
)
from diffusionpipe.runtime.job.verdict import (
    ExitReason,
    RankProcess,
    Verdict,
    is_gone,
    parse_member,
    parse_verdict,
    this_member,
    why_frozen,
)
from diffusionpipe.runtime.job.watch_post import Post, _deaf_to_sigterm, _is_broken_connection, end_process
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # no stub has it

_LONGEST = 300
"""The most characters of a reason that repeats a text from the store."""


class Watchdog:
    """Watches the ranks of a job from one of them, in threads of its own, and ends this rank when another has ended.

    `connect` opens the watchdog's own connection to the store. `end` is called with the message in the watchdog's
    thread when the run is over and the main thread has not taken notice by itself. `note` is called with this rank's
    own error before any other rank can hear of it: a rank that hears it may end, and the launcher then ends this rank
    too. `guard` starts and ends it.
    """

    def __init__(
        self,
        *,
        post: Post,
        connect: "Callable[[], Store]",
        end: Callable[[str], None] = end_process,
        note: Callable[[BaseException], object] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._post, self._connect, self._end, self._note = post, connect, end, note
        self._progress = progress or Progress(post.rank)
        self.remedy: Callable[[], str] = lambda: ""
        """A function that returns the remedy for the user, as the end of this rank's message about the verdict."""
        self._me = this_member(post.rank)
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._is_claimed = self._has_heard = False
        self._known, self._left, self._hurry = threading.Event(), threading.Event(), threading.Event()
        self._answers = 0
        self._successor_beat, self._silence, self._last_round = "", 0.0, 0.0
        self._store_holder: RankProcess | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that this watchdog has posted or read: the rank that ended the run, and how; None before that."""
        return self._verdict

    def failure(self) -> PeerError | None:
        """The verdict as an error of this rank, with the remedy; None if there is no verdict."""
        return PeerError(self._message(self._verdict)) if self._verdict is not None else None

    def _message(self, verdict: Verdict) -> str:
        return "\n".join(filter(None, (verdict.message(self._post.rank), self.remedy())))

    @contextlib.contextmanager
    def guard(self) -> Iterator["Watchdog"]:
        """Watch the job while the block runs; a block without an error ends only when all ranks have reached its end.

        Raises:
            PeerError: instead of a broken connection's error, when another rank is its cause.
        """
        self.start()
        try:
            yield self
            self._finish()
        except BaseException as error:
            cause = self.translate(error)
            if cause is not error:
                raise cause from error
            if self._note is not None:
                # The note comes first: a rank that hears of the error may end, and the launcher then kills this one.
                self._note(error)
            self.report(error)
            raise
        finally:
            self._left.set()

    def start(self) -> None:
        """Connect, introduce this rank and start beating. A job of one rank only watches its own progress."""
        if self._post.world_size == 1:
            threading.Thread(target=self._watch_alone, name="watchdog_watch_alone", daemon=True).start()
            return
        store = self._store = self._connect()
        store.set(f"member/{self._post.rank}", json.dumps(asdict(self._me)))
        self._last_round = time.monotonic()
        # Two threads, because a request to a dead store blocks the first for ever.
        for target in (self._watch, self._watch_store):
            threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with `error`, so that they end at once and name the cause."""
        if self._store is None or self._verdict is not None:
            return
        self._is_claimed = True
        text = str(error) if isinstance(error, DiffusionPipeError) else f"{type(error).__name__}: {error}"
        reason = "was interrupted by Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"failed:\n{text}"
        try:
            self._publish(Verdict(fate=ExitReason.FAILED, reason=reason, member=self._me))  # [1]
        except RuntimeError:  # the store is gone: the others will notice that themselves
            return

    def translate(self, error: BaseException) -> BaseException:
        """The `PeerError` that names the rank whose end caused `error`; `error` itself if it is this rank's own.

        A broken connection is seen before any rank can tell which one broke it, so this waits for the verdict.
        """
        if self._store is None or not _is_broken_connection(error):
            return error
        with self._lock:
            self._is_claimed = True  # from here on the main thread speaks for this rank
        # The beating thread now asks twenty times in an interval.
        self._hurry.set()
        # torch's agent sends SIGTERM to the survivors while they still ask which rank died.
        with _deaf_to_sigterm():
            self._known.wait(self._post.patience + 4 * self._post.interval)
        if (failure := self.failure()) is not None:
            return failure
        if isinstance(error, PeerError):
            return error
        # No verdict came: the error is this rank's own, and `guard` reports it.
        with self._lock:
            self._is_claimed = False
        return error

    def _finish(self) -> None:
        """Wait until every rank has come to the end of its block without an error, then stop watching.

        Raises:
            PeerError: a rank has ended the run, or is frozen when the others have left.
        """
        if self._store is None:
            return
        # A count and not a list: one request tells whether all are there.
        self._store.add("done", 1)
        while not self._all_done():
            if (failure := self.failure()) is not None:
                raise failure
            time.sleep(self._post.interval / 20)
        self._left.set()
        others = set(range(self._post.world_size)) - {self._post.rank}
        # Without a rank that holds the store, rank 0 waits for the others in its place.
        if self._post.rank != (self._post.store_rank or 0):
            self._store.set(f"left/{self._post.rank}", "1")
            return
        # The store may die with this process: let the others go first.
        deadline = time.monotonic() + self._post.patience
        while others and time.monotonic() < deadline:
            others = {rank for rank in others if not self._peek(f"left/{rank}")}
            time.sleep(self._post.interval / 20)
        for rank in sorted(others):
            member = parse_member(self._peek(f"member/{rank}"))
            if frozen := why_frozen(member, self._me):
                reason = f"has done its work but does not end: it is frozen, {frozen}"
                self._verdict = Verdict(fate=ExitReason.SILENT, reason=reason, member=member)
                raise PeerError(self._message(self._verdict))

    # The beating thread.

    def _watch(self) -> None:
        beat, looked = 0, time.monotonic()
        try:
            while not self._left.is_set():
                beat += 1
                mine, looked = self._look(looked), time.monotonic()
                self._requests().set(f"beat/{self._post.rank}", f"{beat} {moment_to_text(mine)}")
                verdict = self._heard() or self._judge_successor() or self._judge_progress(mine)  # [2]
                self._answers += 1
                if verdict is not None:
                    self._conclude(verdict)
                self._hurry.wait(self._progress.pause(self._post.interval))
                if self._hurry.is_set():
                    # `_hurry` stays set, so its wait does not pause any more.
                    time.sleep(self._post.interval / 20)
        except RuntimeError as error:
            self._conclude(self._store_lost(f"ended (its key-value store is gone: {str(error).splitlines()[0]})"))
        except (ValueError, TypeError, LookupError) as error:  # or this thread would end unseen, and watch no more
            reason = f"holds a key-value store in which a stranger has written ({type(error).__name__}: {error})"
            self._conclude(self._store_lost(reason[:_LONGEST]))

    def _watch_alone(self) -> None:
        looked = time.monotonic()
        while not self._left.wait(self._progress.pause(self._post.interval)):
            mine, looked = self._look(looked), time.monotonic()
            if mine.is_over_limit:
                reason = reason_of(mine, {}, self._progress.folder)
                self._conclude(Verdict(fate=ExitReason.STUCK, reason=reason, member=self._me))

    def _look(self, last: Seconds) -> Moment:
        """The moment of this rank now; of the time since `last`, two intervals count at most.

        So a pause of the whole machine does not count as a hang.
        """
        # Two intervals at most, because in a pause of the machine no rank could make progress.
        return self._progress.look(min(time.monotonic() - last, 2 * self._post.interval))

    def _judge_progress(self, mine: Moment) -> Verdict | None:
        grace = 3 * self._post.interval
        if not may_judge(mine, grace):
            return None
        beats = {rank: self._peek(f"beat/{rank}") for rank in range(self._post.world_size)}
        moments = {rank: parse_moment(beat.partition(" ")[2]) for rank, beat in beats.items() if beat}
        moments[self._post.rank] = mine
        # Within the grace the others may still be on their way to a wait; the message could not name them yet.
        if mine.limit is not None and mine.still <= mine.limit + grace and not are_settled(moments):
            return None
        culprit = root_cause(moments, self._post.rank)
        # A rank that has done everything waits in `_finish`, which is not a hang.
        if culprit is None or self._all_done():
            return None
        member = parse_member(self._peek(f"member/{culprit.rank}"))
        reason = reason_of(culprit, moments, self._progress.folder)
        return self._publish(Verdict(fate=ExitReason.STUCK, reason=reason, member=member))

    def _dump_stacks(self) -> None:
        """Write the Python stacks of this rank into its file, and wait for a short time until all ranks have done so.

        The first rank that ends gets the others killed.
        """
        dump_stacks(self._progress)
        if self._store is None:
            return
        deadline = time.monotonic() + 2.5 * self._post.interval
        with contextlib.suppress(RuntimeError):  # the store may end with its rank now
            written = self._store.add("dumped", 1)
            while written < self._post.world_size and time.monotonic() < deadline:
                time.sleep(self._post.interval / 20)
                written = self._store.add("dumped", 0)
            if self._post.rank == self._post.store_rank:
                time.sleep(self._post.interval / 5)  # the store ends with this rank: let the others read the count

    def _judge_successor(self) -> Verdict | None:
        rank = (self._post.rank + 1) % self._post.world_size
        now = time.monotonic()
        elapsed = min(now - self._last_round, 2 * self._post.interval)
        self._last_round = now
        beat = self._peek(f"beat/{rank}")
        if not beat:
            return None  # it has not arrived yet; who waits for it has a time limit
        self._silence = self._silence + elapsed if beat == self._successor_beat else 0.0
        self._successor_beat = beat
        member = parse_member(self._peek(f"member/{rank}"))
        gone = is_gone(member, self._me)
        # A process may end as soon as all have come to the end.
        if not (gone or self._silence > self._post.patience) or self._all_done():
            return None
        reason = "died: its process is gone (killed, out of memory, or crashed)"
        if not gone:
            frozen = why_frozen(member, self._me)
            reason = f"stopped answering {self._silence:.0f} s ago{f': it is frozen, {frozen}' if frozen else ''}"
        return self._publish(Verdict(fate=ExitReason.DIED if gone else ExitReason.SILENT, reason=reason, member=member))

    def _heard(self) -> Verdict | None:
        if self._post.store_rank is not None and self._store_holder is None:
            found = self._peek(f"member/{self._post.store_rank}")
            self._store_holder = parse_member(found) if found else None
        text = self._peek("verdict")
        return self._take(parse_verdict(text), waits=self._post.rank == self._post.store_rank) if text else None

    def _publish(self, verdict: Verdict) -> Verdict:
        """Post `verdict` unless one is posted already; returns the one that counts, once other ranks could read it."""
        # compare_set writes only where no verdict is, so the first one counts.
        text = self._requests().compare_set("verdict", "", json.dumps(asdict(verdict))).decode()
        return self._take(parse_verdict(text), waits=True)

    def _take(self, verdict: Verdict, *, waits: bool) -> Verdict:
        """Count this rank among those that have read `verdict`, and return it.

        `waits`: whether to wait for the other ranks to read it, as the rank that posted it or holds the store does.
        """
        store = self._requests()
        # A rank that failed confirms its own verdict. With other fates the culprit may be gone and is not waited for.
        listeners = self._post.world_size - (0 if verdict.fate is ExitReason.FAILED else 1)
        deadline = time.monotonic() + 2.5 * self._post.interval
        with self._lock:
            # Each rank counts once, though its main thread and its watchdog may both come here.
            is_first, self._has_heard = not self._has_heard, True
        with contextlib.suppress(RuntimeError):  # the store may end with its rank now
            heard = store.add("heard", int(is_first))
            while waits and heard < listeners and time.monotonic() < deadline:
                time.sleep(self._post.interval / 20)
                heard = store.add("heard", 0)
        return verdict

    # The thread that watches the store: a client blocks for ever when the store's machine loses power.

    def _watch_store(self) -> None:
        pause, silence, answers = self._post.interval / 2, 0.0, self._answers
        while not self._left.wait(pause):
            silence = 0.0 if self._answers != answers else silence + pause
            answers = self._answers
            if silence > self._post.patience:
                self._conclude(self._store_lost(f"stopped answering {silence:.0f} s ago"))

    def _store_lost(self, reason: str) -> Verdict:
        unnamed = None
        if self._post.store_rank is not None:
            unnamed = RankProcess(rank=self._post.store_rank, host="", pid=0, machine="")
        return Verdict(fate=ExitReason.STORE_LOST, reason=reason, member=self._store_holder or unnamed)

    # Both threads.

    def _conclude(self, verdict: Verdict) -> None:
        with self._lock:
            if self._verdict is not None or self._left.is_set():
                return
            self._verdict = verdict
            is_claimed = self._is_claimed
        if verdict.fate is ExitReason.STUCK:
            self._dump_stacks()
        # Where the main thread has claimed the end, it raises the error itself.
        if not is_claimed:
            self._end(self._message(verdict))
        self._known.set()
        self._left.set()

    def _requests(self) -> "Store":
        assert self._store is not None
        return self._store

    def _peek(self, key: str) -> str:
        """The value of `key`, "" if there is none; unlike `Store.get` it never waits."""
        store = self._requests()
        return store.get(key).decode() if store.check([key]) else ""

    def _all_done(self) -> bool:
        return self._requests().add("done", 0) == self._post.world_size
