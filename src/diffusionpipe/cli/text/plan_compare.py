"""`diffusionpipe plan --compare`: our plan beside the plans of other systems' planners, all simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from textwrap import wrap
from typing import TYPE_CHECKING

from diffusionpipe.cli.text.plan_table import MICROBATCHES, WORDS, Line, decimals_of, shortened, wrapped
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.planner.pricing.given import NOTHING

if TYPE_CHECKING:
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.planner.rivals.simulated import Rival

ALL = "all"
HEADS = (
    (("formula", "ms"), "formula", None),
    (("simu-", "lated ms"), "simulated", None),
    (("only en-", "coding"), "only encoding", None),
    (("step", "ms"), "step", None),
    (("times", "as long"), "times as long", 3),
    (("peak", "GiB"), "peak GiB", 1),
    (("missing", "GiB"), "missing GiB", 1),
)
"""Two lines of each column's head, its entry in docs/glossary.md, its decimals (None: as many as its largest value
has)."""
SYMBOLS = (
    "In the formulas: S stages, M micro-batches; F, B forward and backward of one micro-batch on a stage; r replicas "
    "of a stage."
)


def names_of(text: str, *, writes: bool) -> tuple[str, ...]:
    """The names of the systems in `text`, the value of --compare; "all" for all. `writes`: a plan is to be written.

    Raises:
        ConfigError: there is no such system, or several are named and a plan is to be written.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.rivals.planners import PLANNERS

    given = [word.strip() for word in text.split(",") if word.strip()]
    known = ", ".join(PLANNERS)
    wrong = [word for word in given if word not in (ALL, *PLANNERS)]
    if wrong or not given:
        close = get_close_matches(wrong[0], PLANNERS, n=1) if wrong else []
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"--compare: {f'no system is named {wrong[0]!r}' if wrong else 'no system is named'}{hint}; give {ALL}, or "
            f"some of {known}, with commas between"
        )
    # Each system once, in the order given.
    names = tuple(PLANNERS) if ALL in given else tuple(dict.fromkeys(given))
    if writes and len(names) > 1:
        raise ConfigError(
            f"--out: --compare names {len(names)} systems; name the one whose plan to write, or leave out --compare to "
            "write the best plan"
        )
    return names


def writable(rivals: Sequence[Rival], names: Sequence[str] = ()) -> Rival:
    """The one system of `rivals` whose plan is to be written; `names` are those that were asked for.

    Raises:
        ConfigError: it has no layout, or one that cannot train.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.rivals.planners import PLANNERS

    if not rivals:
        needs = "".join(f", none with {PLANNERS[name].needs}" for name in names)
        raise ConfigError(
            f"--out: the system has no layout for this batch{needs}; use a batch that is a multiple of the number of "
            "devices, or fewer devices"
        )
    (rival,) = rivals
    title, batch = rival.planner.title, rival.setting.workload.batch
    if rival.scale < 1:
        raise ConfigError(
            f"--out: the replicas of {title}'s stages cannot share this batch equally; a batch of {batch} can be shared"
        )
    if rival.proposal.overflow > 0:
        raise ConfigError(
            f"--out: {title}'s layout needs {rival.proposal.overflow / GIB:.1f} GiB more than the fullest device has; "
            "recompute activations, or use more devices"
        )
    return rival


def print_rivals(names: Sequence[str], choice: Choice) -> tuple[Rival, ...]:
    """Prints our plan beside the plans of these systems, and returns the systems that have a layout."""
    from rich.console import Console

    from diffusionpipe.planner.rivals.simulated import simulated

    rivals = simulated(names, choice.setting.whole or choice.setting)
    console = Console(highlight=False)
    for line, style in rival_lines(names, choice, rivals, width=max(console.width, 72)):
        console.print(line, style=style, markup=False, soft_wrap=True)
    return rivals


def rival_lines(names: Sequence[str], choice: Choice, rivals: Sequence[Rival], *, width: int) -> Iterator[Line]:
    """The lines of the screen of --compare, each with its style.

    They have at most `width` columns where that is at least 72.
    """
    setting = choice.setting
    workload, cluster = setting.workload, setting.cluster
    yield f"batch {workload.batch} on {cluster.name}, {cluster.num_ranks} devices", "bold"
    layouts = [choice.sizes, *(f"{rival.planner.title}, {rival.sizes}{'*' * (rival.scale < 1)}" for rival in rivals)]
    columns = zip(*_figures(choice, rivals), strict=True)
    texts = [_texts(column, decimals) for column, (_, _, decimals) in zip(columns, HEADS, strict=True)]
    shown = [index for index, column in enumerate(texts) if any(column)]
    heads = [HEADS[index][0] for index in shown]
    texts = [texts[index] for index in shown]
    widths = [max(map(len, (*head, *column))) for head, column in zip(heads, texts, strict=True)]
    # The layout's column gets what the figures leave.
    room = min(max(map(len, layouts)) + 2, width - sum(widths) - 2 * len(widths))
    if is_short := room < max(map(len, layouts)) + 2:
        layouts = [shortened(layout) for layout in layouts]
    explained = (MICROBATCHES,) if is_short and any(" mb" in layout for layout in layouts) else ()
    for part in (0, 1):
        cells = [head[part].rjust(size) for head, size in zip(heads, widths, strict=True)]
        yield "  ".join([("layout" if part else "").ljust(room), *cells]).rstrip(), "bold"
    for row, layout in enumerate(layouts):
        figures = [column[row].rjust(size) for column, size in zip(texts, widths, strict=True)]
        for number, line in enumerate(wrapped(layout, room, is_winner=not row)):
            yield "  ".join([line.ljust(room), *(figures if not number else ())]).rstrip(), "" if row else "bold green"
    yield "", ""
    for text in (*_legend(names, choice, rivals, layouts), *explained):
        yield from ((line, "dim") for line in wrap(text, width, subsequent_indent="  ", break_on_hyphens=False))
    if rivals:
        yield "", ""
    formulas = [
        f"{rival.planner.title}: {rival.planner.formula}. {rival.planner.source}."
        + f" {rival.remark}." * bool(rival.remark)
        for rival in rivals
    ]
    for text in (SYMBOLS, *formulas) if rivals else ():
        yield from ((line, "") for line in wrap(text, width, subsequent_indent="  ", break_on_hyphens=False))


def _figures(choice: Choice, rivals: Sequence[Rival]) -> Iterator[tuple[float | None, ...]]:
    """The numbers of each row of the table, a column of `HEADS` each: our plan, then each rival; None is left blank."""
    ours = choice.proposal
    devices = choice.setting.cluster.devices
    room = min(device.memory for device in devices)
    yield (
        None,
        (ours.iteration - ours.exposed) * 1e3,
        ours.exposed * 1e3,
        ours.step * 1e3,
        1.0,
        (room + ours.overflow) / GIB,
        None,
    )
    for rival in rivals:
        overflow = rival.proposal.overflow
        yield (
            rival.formula * 1e3,
            rival.pipeline * 1e3,
            rival.encoding * 1e3,
            rival.step * 1e3,
            rival.step / ours.step,
            (room + overflow) / GIB,
            overflow / GIB if overflow > 0 else None,
        )


def _texts(values: Sequence[float | None], decimals: int | None) -> list[str]:
    if decimals is None:
        decimals = decimals_of([value for value in values if value is not None])
    return ["" if value is None else f"{value:.{decimals}f}" for value in values]


def _legend(names: Sequence[str], choice: Choice, rivals: Sequence[Rival], layouts: Sequence[str]) -> Iterator[str]:
    from diffusionpipe.planner.rivals.planners import PLANNERS

    titles = {rival.planner.title for rival in rivals}
    absent: dict[str, list[str]] = {}
    # Systems that have no layout for the same reason share a line.
    for planner in (PLANNERS[name] for name in names if PLANNERS[name].title not in titles):
        absent.setdefault(planner.needs, []).append(planner.title)
    yield ">: the plan   others: the layout that each system's planner chooses; its encoders run first"
    yield "formula: the iteration without encoders, as the planner's own formula (below) predicts it"
    yield "simulated: the same by our simulator   only encoding: ms in which only the encoders run"
    update = "simulated, only encoding and the update" if choice.proposal.update else "simulated and only encoding"
    yield f"step: {update} together   times as long: as the plan's step"
    lacks = any(rival.proposal.overflow > 0 for rival in rivals)
    yield f"peak: memory of the fullest device{'   missing: memory that it lacks' if lacks else ''}"
    if any(rival.scale < 1 for rival in rivals):
        yield "*: its replicas cannot share this batch; simulated with a larger batch, and times scaled to this one"
    if choice.setting.given != NOTHING:
        yield "The recipe gives sizes of the plan; other systems choose theirs freely."
    yield from (f"{', '.join(systems)}: there is no layout with {needs}" for needs, systems in absent.items())
    yield from (text for word, text in WORDS if any(word in layout for layout in layouts))
