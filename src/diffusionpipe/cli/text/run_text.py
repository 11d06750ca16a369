"""A run's words on itself: at its start its facts, at its end where the time of a step went.

On a terminal it is a block with a table, elsewhere lines of key=value, one subject each.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from diffusionpipe.holding.storage import storage_of
from diffusionpipe.ir.words import bytes_in_words, short_count
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.training.run_facts import (
    RunFacts,
    count_parameters,
    named_microbatches,
    parts_of,
    ranks_of_worker,
    shape_of,
    trained_components,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    from diffusionpipe.ir.data_survey import Line
    from diffusionpipe.planner.correction.correct import IterationTimes
    from diffusionpipe.workflows.training.expectation import Expectation

logger = logging.getLogger(__name__)

MAX_LISTED = 8
"""The most workers whose memory is shown one by one; of more workers, only the least and the most memory are shown."""

Pairs = Mapping[str, object]


class ConsoleWords:
    """Shows the words of a run: as tables on a terminal, else as lines in the log."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    def data(self, lines: "Sequence[Line]") -> None:
        """Shows the facts about the data, some of which are warnings."""
        if self._console.is_terminal:
            self._console.print(data_block(lines))
        else:
            for line in lines:
                logger.log(logging.WARNING if line.is_warning else logging.INFO, "%s: %s", line.name, line.text)

    def begin(self, facts: RunFacts, expected: "Expectation") -> None:
        """Shows the facts about a run that begins, and its expected times and memory."""
        if self._console.is_terminal:
            self._console.print(start_block(facts, expected))
        else:
            for line in start_lines(facts, expected):
                logger.info("%s", line)

    def end(
        self,
        measured: Mapping[str, Seconds],
        expected: "Expectation",
        peak: float | None,
        corrected: "IterationTimes | None",
    ) -> None:
        """Shows where the time of the median step went, beside the prediction, and rank 0's peak of memory in GiB."""
        if self._console.is_terminal:
            self._console.print(end_table(measured, expected, peak, corrected))
        else:
            logger.info("%s", end_line(measured, expected, peak, corrected))


def print_data(lines: "Sequence[Line]") -> None:
    """Prints the facts about the data: a table on a terminal, else a line each."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(data_block(lines))
        return
    width = max(len(line.name) for line in lines) + 2
    for line in lines:
        console.print(f"{line.name:<{width}}{line.text}", markup=False, highlight=False, soft_wrap=True)


def data_block(lines: "Sequence[Line]") -> "Panel":
    """The facts about the data as a panel for a terminal, warnings in yellow."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    before = ""
    for line in lines:
        # A name of several lines is written once.
        rows.add_row("" if line.name == before else line.name, Text(line.text, style="yellow" * line.is_warning))
        before = line.name
    return Panel(rows, title="data", title_align="left", highlight=False)


def start_lines(facts: RunFacts, expected: "Expectation") -> Iterator[str]:
    """The facts about the run for the log: a line of key=value pairs for each subject."""
    plan = facts.plan
    shape, parts = shape_of(plan), parts_of(plan, facts.model)
    counts = _parameters(facts)
    yield _line(run=facts.folder, model=facts.model_path, precision=facts.precision)
    trained = ",".join(trained_components(facts.model))
    numbers = {"trained_parameters": counts["trained"], "frozen_parameters": counts["frozen"]}
    adapters = {"lora_rank": facts.lora_rank} if facts.lora_rank is not None else {}
    yield _line(trained=trained, **adapters, **numbers)
    yield _line(ranks=plan.mesh.num_ranks, nodes=len(set(facts.hosts)), device=_devices(facts))
    data: dict[str, object] = {"data": facts.data, "samples": facts.samples}
    if facts.conditions:
        data["conditioning_pictures"] = facts.conditions
    if facts.held_out is not None:
        data["validation_samples"] = facts.held_out
    yield _line(**data)
    sizes: dict[str, object] = {"schedule": shape.name, "stages": len(parts)}
    if shape.replicas:
        sizes["replicas"] = ",".join(map(str, shape.replicas))
    sizes |= {"copies": plan.mesh.data_parallel, "microbatches": "+".join(map(str, shape.microbatches))}
    if plan.train.lead:
        sizes["versions"] = facts.versions
    sizes |= {"microbatch_size": shape.microbatch_size, "batch": plan.batch, "filled": plan.is_filled}
    sharded: object = plan.mesh.sharded.value if plan.mesh.owners > 1 else plan.mesh.shard > 1
    yield _line(**sizes, sharded=sharded, offload_frozen=storage_of(plan.encoders).brings)
    for number, part in enumerate(parts):
        yield _line(
            stage=number,
            on_ranks=_listed(part.ranks),
            stage_layers=len(part.layers),
            first=part.layers[0],
            last=part.layers[-1],
            stage_parameters=short_count(part.parameters),
        )
    yield from _memory_lines(facts, expected)
    if expected.decoding:
        yield _line(decoding=expected.decoding)
    if expected.step is None:
        yield "predicted_step_s=unknown reason=layers_not_measured"
    else:
        yield _line(**_predicted(expected), predicted_samples_per_s=f"{plan.batch / expected.step:.4g}")
    begin = "none" if facts.checkpoint is None else str(facts.checkpoint)
    yield _line(steps=facts.num_steps, from_step=facts.step, resumed=begin)


def _memory_lines(facts: RunFacts, expected: "Expectation") -> Iterator[str]:
    rest = {} if expected.has_activations else {"activations": "unknown"}
    for worker, size in enumerate(expected.memory):
        ranks = _listed(ranks_of_worker(facts.plan, worker))
        yield _line(on_ranks=ranks, memory_mib=f"{size / 2**20:.1f}", **rest)


def start_block(facts: RunFacts, expected: "Expectation") -> "Panel":
    """The facts about the run as a panel for a terminal, with a table of its stages."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    plan, counts = facts.plan, _parameters(facts)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    held_out = f", {facts.held_out} for validation" if facts.held_out is not None else ""
    steered = ", each with a conditioning picture" if facts.conditions else ""
    hosts, trained = len(set(facts.hosts)), ", ".join(trained_components(facts.model))
    adapters = f" (adapters of rank {facts.lora_rank})" if facts.lora_rank is not None else ""
    named = {
        "model": f"{facts.model_path}, trained {counts['trained']} parameters of {trained}{adapters}, "
        f"frozen {counts['frozen']}",
        "data": f"{_number(facts.samples, 'sample')} in {facts.data}{steered}{held_out}",
        "ranks": f"{_number(plan.mesh.num_ranks, 'rank')} on {_number(hosts, 'node')}: {_devices(facts)}",
        "precision": facts.precision,
        "layout": _layout(facts),
        "memory": _memory(facts, expected),
        **({"samples": expected.decoding} if expected.decoding else {}),
        "step": _step(facts, expected),
        "training": _training(facts),
    }
    for name, text in named.items():
        rows.add_row(name, Text(text))
    content = Group(rows, Text(), _stage_table(facts))
    return Panel(content, title=Text(str(facts.folder)), title_align="left", highlight=False)


def _stage_table(facts: RunFacts) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "ranks", "trained", "layers"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first to last")
    for number, part in enumerate(parts_of(facts.plan, facts.model)):
        ends = Text(f"{part.layers[0]} to {part.layers[-1]}")
        table.add_row(str(number), _listed(part.ranks), short_count(part.parameters), str(len(part.layers)), ends)
    return table


def _layout(facts: RunFacts) -> str:
    plan, shape = facts.plan, shape_of(facts.plan)
    words = [shape.name]
    if plan.mesh.pipeline > 1:
        words.append(_number(len(parts_of(plan, facts.model)), "stage"))
    if shape.replicas:
        words.append(f"replicas {', '.join(map(str, shape.replicas))}")
    if plan.mesh.data_parallel > 1:
        words.append(f"{plan.mesh.data_parallel} copies")
    words.append(f"{named_microbatches(shape.microbatches)} of {shape.microbatch_size}")
    words.append(f"batch {plan.batch}")
    words.append("filled" if plan.is_filled else "not filled")
    if plan.train.lead:
        words.append(f"no flush, weights {facts.versions}")
    if storage_of(plan.encoders).brings:
        words.append("frozen weights in host memory")
    return ", ".join(words)


def _memory(facts: RunFacts, expected: "Expectation") -> str:
    sizes = [(ranks_of_worker(facts.plan, worker), size) for worker, size in enumerate(expected.memory)]
    if len(sizes) > MAX_LISTED:
        most = max(sizes, key=lambda pair: pair[1])
        least = min(size for _, size in sizes)
        text = f"{bytes_in_words(least)} to {bytes_in_words(most[1])}, the most on rank {_listed(most[0])}"
    else:
        text = ", ".join(f"rank {_listed(ranks)}: {bytes_in_words(size)}" for ranks, size in sizes)
    kind = "expected at the peak" if expected.has_activations else "weights, gradients, optimizer; activations unknown"
    return f"{text} ({kind})"


def _step(facts: RunFacts, expected: "Expectation") -> str:
    if expected.step is None or expected.iteration is None:
        return "time unknown: the layers were not measured"
    update = f", update {_milliseconds(expected.update)}" if expected.update is not None else ""
    if (loading := expected.loading) is not None:
        update += f", data workers about {_milliseconds(loading.usual)}"
        update += f" ({loading.least * 1000:.1f} to {loading.most * 1000:.1f})"
    rate = f"{facts.plan.batch / expected.step:.4g} samples/s"
    return f"{_milliseconds(expected.step)} expected (iteration {_milliseconds(expected.iteration)}{update}), {rate}"


def _training(facts: RunFacts) -> str:
    steps = facts.num_steps
    if facts.checkpoint is None:
        return _number(steps, "step")
    return f"steps {facts.step + 1} to {steps}, from {facts.checkpoint}"


def end_line(
    measured: Mapping[str, Seconds],
    expected: "Expectation",
    peak: float | None,
    corrected: "IterationTimes | None" = None,
) -> str:
    """A line of key=value pairs for the log: the parts of the median step, the prediction, and rank 0's peak of memory.

    `peak`: in GiB, None where it is unknown; `corrected`: the prediction after the check of the first steps.
    """
    pairs: dict[str, object] = {f"median_{name}_s": f"{seconds:.4f}" for name, seconds in measured.items()}
    pairs |= _predicted(expected)
    if corrected is not None:
        pairs["corrected_step_s"] = f"{corrected.step:.4f}"
    if peak is not None:
        pairs["memory_peak_gib"] = f"{peak:.2f}"
        if expected.has_activations:
            pairs["predicted_peak_gib"] = f"{expected.memory[0] / 2**30:.2f}"
    return _line(**pairs)


def end_table(
    measured: Mapping[str, Seconds],
    expected: "Expectation",
    peak: float | None,
    corrected: "IterationTimes | None" = None,
) -> "Table":
    """A table of the parts of the median step, beside the prediction, and of rank 0's peak of memory.

    `peak`: in GiB, None where it is unknown; `corrected`: the prediction after the check of the first steps.
    """
    from rich.table import Table

    predicted = {"step": expected.step, "iteration": expected.iteration, "update": expected.update}
    table = Table(box=None, pad_edge=False)
    table.add_column("median step", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    later: dict[str, Seconds] = {}
    if corrected is not None:
        table.add_column("corrected", justify="right", no_wrap=True)
        later = {"step": corrected.step, "iteration": corrected.iteration, "update": corrected.update}
    for name, seconds in measured.items():
        foreseen = (predicted.get(name), *([later.get(name)] if later else []))
        table.add_row(name, _milliseconds(seconds), *("-" if one is None else _milliseconds(one) for one in foreseen))
    if peak is not None:
        foreseen_peak = bytes_in_words(expected.memory[0]) if expected.has_activations else "-"
        table.add_row("memory of rank 0", bytes_in_words(int(peak * 2**30)), foreseen_peak)
    return table


def _predicted(expected: "Expectation") -> dict[str, object]:
    loading = expected.loading
    times = {
        "step": expected.step,
        "iteration": expected.iteration,
        "update": expected.update,
        "loading": loading.usual if loading is not None else None,
        "least_loading": loading.least if loading is not None else None,
        "most_loading": loading.most if loading is not None else None,
    }
    return {f"predicted_{name}_s": f"{seconds:.4f}" for name, seconds in times.items() if seconds is not None}


def _parameters(facts: RunFacts) -> dict[str, object]:
    return {
        "trained": short_count(count_parameters(facts.model, trained=True)),
        "frozen": short_count(count_parameters(facts.model, trained=False)),
    }


def _devices(facts: RunFacts) -> str:
    """The devices in one line, e.g. "NVIDIA H200" or "6 x NVIDIA A100, 2 x NVIDIA L40S"."""
    kinds = {name: facts.devices.count(name) for name in dict.fromkeys(facts.devices)}
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{count} x {name}" for name, count in kinds.items())


def _line(**pairs: object) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items())


def _value(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def _listed(ranks: Sequence[int]) -> str:
    """The ranks as text, consecutive ones as a range: "0-3,8"."""
    texts: list[str] = []
    start = 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            texts.append(f"{ranks[start]}" if start == index else f"{ranks[start]}-{rank}")
            start = index + 1
    return ",".join(texts)


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _milliseconds(seconds: Seconds) -> str:
    return f"{seconds * 1000:.1f} ms"
