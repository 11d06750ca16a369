"""Writes docs/schedules.md from the docstrings in `diffusionpipe.schedules`, and its picture: `make docs`."""

import inspect
from pathlib import Path

from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator.comparison import FamilyComparison, WorkerCosts, compare_families
from diffusionpipe.viz import sketch
from diffusionpipe.viz.sheet import sheet

HERE = Path(__file__).parent
PICTURE = "images/schedules.png"
RANKS, MICROBATCHES = 4, 8
HEAD = f"""# Schedules

DiffusionPipe draws, simulates, checks for deadlocks and trains with every schedule on this page. `make docs` generates
the page from the docstrings of `src/diffusionpipe/schedules`.

    diffusionpipe schedule list
    diffusionpipe schedule zb-v --ranks 4 --microbatches 8 --comm 0.1 --png zb-v.png
    diffusionpipe schedule compare --ranks {RANKS} --microbatches {MICROBATCHES} --png schedules.png

![All schedules on {RANKS} ranks with {MICROBATCHES} micro-batches]({PICTURE})

The letters mean: `F` forward, `B` whole backward, `I` gradient of the inputs, `W` gradient of the weights. `2F0` is the
forward of micro-batch 0 on stage 2. If a picture has no room for stage numbers, small letters mean the worker's second
stage. A picture that is too wide for one line continues below, with the time above each part. p is the number of
workers, and m the number of micro-batches. In formulas F, B, I and W are the times of one worker's part of the model,
unless the text says otherwise. Pictures and table have F = I = W = 1 and free messages.

Columns of the table:

- **bubble**: the idle fraction of the makespan.
- **window**: the idle fraction between a worker's first start and its last end. This idle time remains if the
  optimizer's step does not wait for all workers (`training.post_validation`).
- **activations**: the peak of any worker, in units of one micro-batch's activations for one worker's part of the model.
- **messages**: the number of messages in one iteration.
- **weights**: the copies of the weights that the schedule keeps.

| schedule | makespan | bubble | window | activations | messages | weights |
|---|---:|---:|---:|---:|---:|---:|
"""


def document(comparison: FamilyComparison) -> str:
    """The whole page."""
    rows = [
        f"| [`{r.name}`](#{r.name}) | {r.makespan:g} | {r.timeline.bubble:.1%} | {r.window_bubble:.1%} | {r.peak:g} "
        f"| {r.messages} | {r.weights:g}x |"
        for r in comparison.results
    ]
    drawn = {result.name: sketch(result.timeline, width=118) for result in comparison.results}
    parts = [HEAD + "\n".join(rows)]
    for name, generator in REGISTRY.items():
        sections = [f"## {name}", text_of(inspect.getdoc(generator) or "")]
        if name in drawn:
            sections.append(f"```text\n{drawn[name]}\n```")
        else:
            sections.append(f"Not defined for {RANKS} ranks and {MICROBATCHES} micro-batches.")
        parts.append("\n\n".join(sections))
    return "\n\n".join(parts) + "\n"


def text_of(docstring: str) -> str:
    """The docstring as Markdown: examples in fences, without what it raises."""
    body = docstring.partition("\nRaises:")[0].partition("\nArgs:")[0].rstrip()
    paragraphs = body.split("\n\n")
    return "\n\n".join(f"```text\n{text}\n```" if text.startswith(">>>") else text for text in paragraphs)


def main() -> None:
    """Write page and picture."""
    comparison = compare_families(RANKS, MICROBATCHES, WorkerCosts())
    (HERE / "schedules.md").write_text(document(comparison), encoding="utf-8")
    timelines = [(result.name, result.timeline) for result in comparison.results]
    sheet(timelines, HERE / PICTURE, title=f"{RANKS} ranks, {MICROBATCHES} micro-batches, F = I = W = 1")


if __name__ == "__main__":
    main()
