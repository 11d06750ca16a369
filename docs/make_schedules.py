"""Writes docs/schedules.md from the docstrings in `diffusionpipe.schedules`, and its picture: `make docs`."""

import inspect
from pathlib import Path

from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator.comparison import Comparison, WorkerCosts, compare_families
from diffusionpipe.viz import sketch
from diffusionpipe.viz.sheet import sheet

HERE = Path(__file__).parent
PICTURE = "images/schedules.png"
RANKS, MICROBATCHES = 4, 8
HEAD = f"""# Schedules

Every schedule here is drawn, simulated, checked for deadlocks and run with real gradients by the same code. This page
is generated from the docstrings of `src/diffusionpipe/schedules` by `make docs`.

    diffusionpipe schedule list
    diffusionpipe schedule zb-v --ranks 4 --microbatches 8 --comm 0.1 --png zb-v.png
    diffusionpipe schedule compare --ranks {RANKS} --microbatches {MICROBATCHES} --png schedules.png

![All schedules on {RANKS} ranks with {MICROBATCHES} micro-batches]({PICTURE})

The letters: `F` forward, `B` whole backward, `I` gradient of the inputs, `W` gradient of the weights; `2F0` is the
forward of micro-batch 0 on stage 2. Where stage numbers have no room, small letters are the worker's second stage. Long
pictures go on below, under their time. p is the number of workers, m of micro-batches, F, B, I and W are times of one
worker's part of the model. The pictures and the table have F = I = W = 1 and free messages. "Window" is the idle part
between a worker's first start and its last end: it is what is lost where the optimizer's step does not wait for all
workers (`training.post_validation`). Activations are those of one worker's part of the model for one micro-batch.

| schedule | makespan | bubble | window | activations | messages | weights |
|---|---:|---:|---:|---:|---:|---:|
"""


def document(comparison: Comparison) -> str:
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
