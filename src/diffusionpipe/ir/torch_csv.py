"""Exchange of schedules with torch.distributed.pipelining: its compute-only CSV format. No torch is needed.

One row per rank, one action per cell, an empty cell is a tick without work (its place says nothing about time, so it
is dropped):

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

torch reads it with `_load_csv(path, format="compute_only")`, torchtitan through `pipeline_parallel_schedule_csv`. The
format can say one chain of stages, each on one rank, and micro-batches of one size; everything else is refused by name.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir.action import Action, Op, parse_action
from diffusionpipe.ir.placement import WHOLE, Edge, Pipeline, Placement, Stage
from diffusionpipe.ir.schedule import Schedule

_OPS = (Op.F, Op.B, Op.I, Op.W)
_COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")


def schedule_to_csv(schedule: Schedule) -> str:
    """The CSV text of a schedule over a chain of stages, in torch's compute-only format: a row for each rank.

    Raises:
        ScheduleError: the schedule says something that the format cannot say; every such thing is named.
    """
    problems = list(_inexpressible(schedule))
    if problems:
        raise ScheduleError([f"schedule {schedule.name!r} has no torch CSV: {problem}" for problem in problems])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.orders)
    return text.getvalue()


def _inexpressible(schedule: Schedule) -> Iterator[str]:
    placement = schedule.placement
    if len(placement.pipelines) != 1:
        yield f"it has {len(placement.pipelines)} pipelines, but the format supports only one"
        return
    pipeline = placement.pipelines[0]
    if pipeline.stages != tuple(range(len(placement.stages))):
        order = ", ".join(map(str, pipeline.stages))
        yield f"its stages run in the order {order}, but the format counts them upwards from 0"
    if len(set(pipeline.microbatches)) > 1:
        yield f"its micro-batches have different sizes {', '.join(map(str, pipeline.microbatches))}"
    for edge in pipeline.edges:
        if edge.consumer != edge.producer + 1:
            yield f"stage {edge.consumer} reads from stage {edge.producer}, but the format supports only neighbours"
    for index, stage in enumerate(placement.stages):
        if stage.share != WHOLE:
            yield (
                f"stage {index} handles the share {stage.share} of the samples, but the format supports only "
                "whole micro-batches"
            )
        if len(placement.replicas(index)) > 1:
            yield f"stages {', '.join(map(str, placement.replicas(index)))} share weights"
    beyond = ", ".join(dict.fromkeys(action.op.value for _, action in schedule.actions() if action.op not in _OPS))
    if beyond:
        yield f"it has the actions {beyond}, but the compute-only format has only F, B, I, W; export before the passes"


def schedule_from_csv(text: str, *, name: str = "csv", microbatch_size: int = 1) -> Schedule:
    """The schedule that a CSV text of torch's compute-only format states, over a chain of stages with neighbour edges.

    Where some backwards are whole (B) and others split (I, W), as torch's V schedules mix them, each B becomes I and W
    in its place, which does the same work in the same order. Legality is not checked; `timing.legal` does it.

    Raises:
        ScheduleError: a cell is not a compute action, a stage is on two ranks, or a forward is missing or occurs twice;
            every problem is named with its place.
    """
    try:
        return schedule_from_rows(csv.reader(io.StringIO(text)), name=name, microbatch_size=microbatch_size)
    except ScheduleError as error:
        raise ScheduleError([f"torch CSV: {problem}" for problem in error.problems]) from None


def place_in_file(row: int, cell: int) -> str:
    """The words "line R, cell C" for errors; `row` and `cell` count from 0, the words from 1."""
    return f"line {row + 1}, cell {cell + 1}"


def schedule_from_rows(
    rows: Iterable[Sequence[str]],
    *,
    name: str,
    microbatch_size: int = 1,
    place: Callable[[int, int], str] = place_in_file,
) -> Schedule:
    """The schedule that rows of cells state, one row for each rank, read as `schedule_from_csv` reads them.

    `place` gives the words that name a cell in errors, from the numbers of its row and its column.

    Raises:
        ScheduleError: as `schedule_from_csv`.
    """
    problems: list[str] = []
    orders = [_parse_row(number, row, place, problems) for number, row in enumerate(rows)]
    # Empty lines at the end of a file. An empty line between others is a rank without work.
    while orders and not orders[-1]:
        orders.pop()
    worker_of_stage = _homes(orders, place, problems)
    num_microbatches = 1 + max(
        (a.microbatch for order in orders for a in order if a.microbatch is not None), default=-1
    )
    problems.extend(_missing(orders, num_microbatches))
    if problems:
        raise ScheduleError(problems)
    ops = frozenset(a.op for order in orders for a in order)
    # Whole backwards and split ones: a pipeline of ours has either B, or I and W.
    if ops > {Op.B, Op.I}:
        orders = [_split_backwards(order) for order in orders]
        ops -= {Op.B}
    num_stages = len(worker_of_stage)
    pipeline = Pipeline(
        stages=tuple(range(num_stages)),
        microbatches=(microbatch_size,) * num_microbatches,
        ops=ops,
        edges=tuple(Edge(producer=stage, consumer=stage + 1) for stage in range(num_stages - 1)),
    )
    stages = tuple(Stage(worker=worker_of_stage[stage], weights=stage) for stage in range(num_stages))
    placement = Placement(stages=stages, pipelines=(pipeline,))
    return Schedule(name=name, placement=placement, orders=tuple(tuple(order) for order in orders))


def _parse_row(number: int, row: Sequence[str], place: Callable[[int, int], str], problems: list[str]) -> list[Action]:
    order = []
    for column, cell in enumerate(row):
        word = cell.strip()
        if not word:
            continue
        where = f"{place(number, column)}: {word!r}"
        # torch writes them as "(0F0;1B0)OVERLAP_F_B".
        if word.startswith("(") or "OVERLAP" in word:
            problems.append(f"{where} overlaps two actions; write them one after the other in cells of their own")
            continue
        if any(op in word for op in _COMMUNICATION):
            problems.append(f'{where} is not a computation; write the file with format="compute_only"')
            continue
        try:
            action = parse_action(word)
        except ScheduleError:
            problems.append(f"{where} is not an action; write e.g. 2F0, 2B0, 2I0 or 2W0")
            continue
        if action.op in _OPS:
            order.append(action)
        else:
            problems.append(f"{where} is unknown to torch's format; it has F, B, I, W")
    return order


def _homes(orders: Sequence[Sequence[Action]], place: Callable[[int, int], str], problems: list[str]) -> dict[int, int]:
    worker_of_stage: dict[int, int] = {}
    for worker, order in enumerate(orders):
        for stage in dict.fromkeys(action.stage for action in order):
            first = worker_of_stage.setdefault(stage, worker)
            if first != worker:
                one, other = (place(row, 0).partition(",")[0] for row in (first, worker))  # "line 3", without the cell
                problems.append(f"stage {stage} is on {one} and on {other}; a stage has one rank")
    return worker_of_stage


def _missing(orders: Sequence[Sequence[Action]], num_microbatches: int) -> Iterator[str]:
    forwards = Counter((a.stage, a.microbatch) for order in orders for a in order if a.op is Op.F)
    if not forwards:
        yield "holds no forward; give one row of actions per rank"
        return
    for (stage, microbatch), count in forwards.items():
        if count > 1:
            yield f"the forward {stage}F{microbatch} occurs {count} times"
    num_stages = 1 + max(a.stage for order in orders for a in order)
    num_absent = num_stages * num_microbatches - len(forwards)
    if num_absent:
        pairs = ((stage, microbatch) for stage in range(num_stages) for microbatch in range(num_microbatches))
        stage, microbatch = next(pair for pair in pairs if pair not in forwards)
        yield (
            f"{num_stages} stages and {num_microbatches} micro-batches need {num_stages * num_microbatches} forwards, "
            f"{num_absent} are missing, the first is {stage}F{microbatch}"
        )


def _split_backwards(order: Sequence[Action]) -> list[Action]:
    split: list[Action] = []
    for action in order:
        ops = (Op.I, Op.W) if action.op is Op.B else (action.op,)
        split.extend(Action(stage=action.stage, op=op, microbatch=action.microbatch) for op in ops)
    return split
