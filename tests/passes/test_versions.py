"""Windows and the versions that they read: the table of the family, and the rules of the checker."""

from dataclasses import replace
from math import ceil

import pytest

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Edge, Op, Range, Schedule, parse_action
from diffusionpipe.ir.files import schedule_from_text, schedule_to_text
from diffusionpipe.ir.unroll import fold, unroll
from diffusionpipe.ir.versions import Versions, batches_held, staleness_of, versions_held
from diffusionpipe.passes import (
    PlacedFill,
    connect_blocks,
    insert_fills,
    reduce_gradients,
    replicate,
    with_versions,
    without_flush,
)
from diffusionpipe.planner.assembly.windows import communicate_window, overlap, turns_of
from diffusionpipe.schedules import REGISTRY, generator_of
from diffusionpipe.timing import Streams
from diffusionpipe.timing.legal import check

ROWS = [row for row in Versions if row is not Versions.FLUSHED]


def is_consistent(table):
    """Whether each backward reads what its forward read."""
    return all(row == table[stage, Op.F] for (stage, _), row in table.items())


def is_uniform(table):
    """Whether all stages read equally old weights."""
    return len({(op, row) for (_, op), row in table.items()}) == len({op for _, op in table})


def window_of(versions: Versions, p: int, m: int, family: str = "1f1b") -> Schedule:
    window = overlap(p, m, family)
    return with_versions(window, versions, delay=max(1, window.lead))


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("versions", ROWS)
def test_staleness_and_versions_are_those_of_the_table(versions, p):
    for m in (1, 2, 4, 8):
        window = window_of(versions, p, m)
        table, held = staleness_of(window), versions_held(window)
        delay = ceil((p - 1) / m)
        for stage in range(p):
            own = tuple(ceil(max(0, p - 1 - stage - i) / m) for i in range(m))
            first = tuple(ceil(max(0, p - 1 - i) / m) for i in range(m))
            forward, backward, count = {
                Versions.STASHED: (own, own, 1 + own[0]),
                Versions.PREDICTED: (own, own, 1 + copies(p - 1 - stage, m)),
                Versions.VERTICAL: (first, first, 1 + first[0]),
                Versions.DELAYED: ((delay,) * m, (delay,) * m, 1 + delay),
                Versions.NEWEST: (own, (0,) * m, 1),
            }[versions]
            assert (table[stage, Op.F], table[stage, Op.B], held[stage]) == (forward, backward, count)
        assert is_consistent(table) == (versions is not Versions.NEWEST)
        assert is_uniform(table) == (versions in (Versions.DELAYED, Versions.VERTICAL))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("versions", ROWS)
def test_groups_of_k_are_as_old_as_the_next_steps_that_they_precede(versions, k):
    """Group g of stage s runs before the backwards of group g - (p - 1 - s), counted over all batches."""
    for p in range(2, 7):
        for groups in range(1, 5):
            window = window_of(versions, p, k * groups, f"kfkb-{k}")
            table, held = staleness_of(window), versions_held(window)
            delay = max(1, ceil((p - 1) / groups))
            for stage in range(p):
                ages = [0] * groups
                for g in range(8 * groups, 9 * groups):  # its batch less the batch in whose window it runs
                    ages[g % groups] = g // groups - (g - (p - 1 - stage)) // groups
                first = [g // groups - (g - (p - 1)) // groups for g in range(8 * groups, 9 * groups)]
                own, all_first = (tuple(age for age in row for _ in range(k)) for row in (ages, first))
                forward, backward = {
                    Versions.STASHED: (own, own),
                    Versions.PREDICTED: (own, own),
                    Versions.VERTICAL: (all_first, all_first),
                    Versions.DELAYED: ((delay,) * k * groups,) * 2,
                    Versions.NEWEST: (own, (0,) * k * groups),
                }[versions]
                assert (table[stage, Op.F], table[stage, Op.B]) == (forward, backward)
                if versions is not Versions.PREDICTED:  # the oldest version that a backward of a later window reads
                    least = {Versions.NEWEST: 0, Versions.DELAYED: delay}.get(versions, max(backward))
                    assert held[stage] == 1 + least


def test_a_group_length_of_one_is_1f1b_and_one_that_cuts_a_batch_is_refused():
    assert overlap(4, 4, "kfkb-1").orders == overlap(4, 4).orders
    for family, m, better in (("kfkb", 5, 6), ("kfkb-3", 4, 6), ("kfkb-3", 2, 3)):
        with pytest.raises(ConfigError, match=f"{m} micro-batches are not a multiple of [23]; use {better}"):
            overlap(3, m, family)
    with pytest.raises(ConfigError, match="a delay of 1 needs at least 6 micro-batches for 4 stages; use more"):
        with_versions(overlap(4, 4, "kfkb"), Versions.DELAYED, delay=1)
    with_versions(overlap(4, 6, "kfkb"), Versions.DELAYED, delay=1)


def test_pipedream_with_four_stages_and_accumulation():
    window = window_of(Versions.STASHED, 4, 4)
    assert [sum(staleness_of(window)[stage, Op.F]) / 4 for stage in range(4)] == [0.75, 0.5, 0.25, 0]
    assert " ".join(map(str, window.orders[0])).startswith("0F3 0B0~1 0F0+1~1 0B1~1")


@pytest.mark.parametrize("p", range(2, 9))
def test_three_windows_of_every_row_pass_the_strictest_machine(p):
    """With skips: stage 0 also feeds the last stage."""
    edges = [Edge(producer=i, consumer=i + 1, tensors=("x",), gradients=("x",)) for i in range(p - 1)]
    if p > 2:
        edges.append(Edge(producer=0, consumer=p - 1, tensors=("skip",), gradients=("skip",)))
    for family, m in (("1f1b", 4), ("dapple-b", 4), ("kfkb", 4), ("kfkb-3", 6)):
        flushed = connect_blocks(generator_of(family)(p, m), edges)
        turns = turns_of(family, p, m)
        window = without_flush(flushed, turns.ahead, turns.length)
        explicit = communicate_window(window)
        check(unroll(explicit, 3), streams=Streams.HOST)
        for versions in ROWS:
            read = with_versions(explicit, versions, delay=window.lead)
            check(read)
            assert staleness_of(read) == staleness_of(with_versions(window, versions, delay=window.lead))
            assert schedule_from_text(schedule_to_text(read)) == read


def copies(ahead: int, m: int) -> int:
    """The most predicted copies that live at once: micro-batch k, counted over all batches, of batch k // m runs its
    forward in window (k - ahead) // m, before the backward of k - ahead."""
    readings = [(k // m, (k - ahead) // m) for k in range(8 * m + 8 * ahead + 8)]
    return max(len({(a, b) for a, b in readings[k - ahead : k + 1] if a > b}) for k in range(4 * ahead, len(readings)))


def changed(window: Schedule, worker: int, old: str, new: str) -> Schedule:
    order = " ".join(map(str, window.orders[worker])).replace(old, new)
    orders = list(window.orders)
    orders[worker] = tuple(map(parse_action, order.split()))
    return replace(window, orders=tuple(orders))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("0F0+1~1", "0F0+1", "worker 0: 0F0+1 reads weights of the future; the newest are ~1 for its batch"),
        ("0B1~1", "0B1~2", "worker 0: 0B1~2 reads neither what its forward read (~1) nor ~0"),
        ("0B1~1 0STEP", "0STEP 0B1~1", "worker 0: 0STEP comes before 0B1~1, whose gradient it takes in"),
        (" 0STEP", "", "worker 0: block 0 has 0 STEPs in a window; it needs one"),
        ("0B0~1", "0B0+1~1", "worker 0: 0B0+1~1 belongs to a later batch; only forwards and messages may"),
        ("0STEP", "0STEP~1", "worker 0: 0STEP~1 reads no weights, so it has no staleness"),
        ("0F0+1~1", "0F0+2~2", "worker 0: 0F0+2~2 "),
    ],
)
def test_the_checker_names_what_a_window_breaks(old, new, problem):
    window = window_of(Versions.STASHED, 3, 2)
    check(window)
    broken = changed(window, 0, old, new)
    if new == "0F0+2~2":  # it only fills the pipeline more
        broken = changed(broken, 0, "0B0~1", "0B0~2")
        check(broken)
        return
    with pytest.raises(ScheduleError) as error:
        check(broken)
    assert problem in str(error.value)


def replicated(p: int, m: int, replicas: tuple[int, ...]) -> Schedule:
    """The window of a chain whose stages are replicated, with the sums of their gradients."""
    copies = reduce_gradients(replicate(REGISTRY["1f1b"](p, m, 4), replicas), is_data_parallel=False)
    ahead = [lead for lead, count in zip(turns_of("1f1b", p, m).ahead, replicas, strict=True) for _ in range(count)]
    return without_flush(copies, ahead)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2, 2), (4, 2, 1), (1, 2, 1, 2)])
def test_windows_of_replicas_pass_the_strictest_machine(replicas):
    for m in (1, 2, 4):
        explicit = communicate_window(replicated(len(replicas), m, replicas))
        check(unroll(explicit, 4), streams=Streams.HOST)
        check(with_versions(explicit, Versions.STASHED))


def test_the_checker_names_a_replica_that_steps_without_the_sum():
    window = with_versions(replicated(2, 1, (1, 2)), Versions.STASHED)
    check(window)
    for worker in (1, 2):
        with pytest.raises(ScheduleError) as error:
            check(changed(window, worker, f"{worker}REDUCE_GRAD ", ""))
        assert f"worker {worker}: block 1 has no REDUCE_GRAD in a window, but other workers hold it too" in str(
            error.value
        )
        late = changed(window, worker, f"{worker}REDUCE_GRAD {worker}STEP", f"{worker}STEP {worker}REDUCE_GRAD")
        with pytest.raises(ScheduleError, match=f"{worker}STEP comes before {worker}REDUCE_GRAD"):
            check(late)


def encoding(p: int, m: int) -> Schedule:
    """A window whose workers each encode two samples of a batch behind their first backward, without messages."""
    window = without_flush(REGISTRY["1f1b"](p, m, 2 * p), turns_of("1f1b", p, m).ahead)
    fills = {
        w: [
            PlacedFill(position=2, component="v", layers=Range(0, 1), samples=Range(first, first + 2 * m))
            for first in [2 * m * w]
        ]
        for w in range(p)
    }
    return insert_fills(window, fills, block=p, outputs=dict.fromkeys(range(p), ("latents",)))


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (3, 1), (4, 1), (4, 4), (5, 2)])
def test_windows_that_encode_pass_the_strictest_machine(p, m):
    window = encoding(p, m)
    count = 2 * window.lead + 2
    assert fold(window, unroll(window, count), count) == window
    explicit = communicate_window(window)
    check(unroll(explicit, 5), streams=Streams.HOST)
    assert explicit.lead == window.lead == batches_held(window) - 1 == 1 + ceil((p - 1) / m)
    read = with_versions(explicit, Versions.STASHED)
    check(read)
    assert schedule_from_text(schedule_to_text(read)) == read


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "3ENCODE#0+2",
            "3ENCODE#0+3",
            "worker 0: 3ENCODE#0+3 leads by more than 2; another batch is in its",
        ),
        ("3ENCODE#0+2", "3ENCODE#0+1", "3ENCODE#0"),
        ("3ENCODE#0+2 ", "", "worker 0: 3ENCODE#0 is missing"),
        ("0RECV_F0>1+2", "0RECV_F0>1+3", "worker 0: 0RECV_F0>1+3 leads by more than 2; another batch is in its pl"),
    ],
)
def test_the_checker_names_an_encoding_out_of_its_window(old, new, problem):
    window = with_versions(communicate_window(encoding(3, 2)), Versions.STASHED)
    assert old in " ".join(map(str, window.orders[0]))
    with pytest.raises(ScheduleError) as error:
        check(changed(window, 0, old, new))
    assert problem in str(error.value)


def test_what_has_no_window_is_refused():
    with pytest.raises(ConfigError, match="a delay of 1 needs at least 3 micro-batches for 4 stages; use more, or del"):
        with_versions(overlap(4, 1), Versions.DELAYED, delay=1)
    with pytest.raises(ConfigError, match="with one nothing is in flight"):
        overlap(1, 4)
    with pytest.raises(ConfigError, match="'gpipe' does not alternate"):
        overlap(4, 4, "gpipe")
    with pytest.raises(ConfigError, match="a delay of 1 needs at least 2 micro-batches for 3 stages"):
        with_versions(replicated(3, 1, (4, 2, 1)), Versions.DELAYED, delay=1)
    with pytest.raises(ConfigError, match="a delay of 1 needs at least 2 micro-batches for 3 stages"):
        with_versions(encoding(3, 1), Versions.DELAYED, delay=1)
