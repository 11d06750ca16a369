"""Folders as runs leave them, made without a training, for reports."""

import json
from dataclasses import replace

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from planner import synthetic

from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir import Phase
from diffusionpipe.ir.data_survey import Line, Survey, TrainedSize
from diffusionpipe.ir.files import SURVEY, write_file, write_plan, write_timeline
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import pricing_of, propose

SCRIPT = '</script><script>document.title = "planted"</script><img src=x onerror="document.title=\'planted\'">'
"""A caption that would run if it became markup."""


def loss_at(step, start=1.0):
    """A loss that falls and jitters, with one high value."""
    return start / (1 + step / 300) + 0.05 * ((step * 7919 % 101) / 101 - 0.5) + (3.0 if step == 777 else 0.0)


def write_metrics(folder, steps, *, batch=16, start=1.0, every=50):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "loss": loss_at(step, start),
                "epoch": step / 100,
                "gradient_norm": 0.3,
                "learning_rate": 1e-4,
            }
            row |= {"step_s": 0.05 + step % 3 / 1000, "samples_per_s": batch / 0.05, "bubble": 0.2, "data_s": 0.001}
            row |= {"iteration_s": 0.045, "update_s": 0.004, "host_memory_gib": 1.5}
            file.write(json.dumps(row) + "\n")
            if step % every == 0:
                file.write(json.dumps({"step": step, "validation_loss": loss_at(step, start) + 0.01}) + "\n")


def write_recipe(folder, **values):
    """A resolved recipe with a few keys; `values` add to [run]."""
    more = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    (folder / "recipe.toml").write_text(
        '[model]\npath = "/home/someone/models/tiny"\n\n[training]\nsteps = 400\nbatch = 16\n\n'
        f'[run]\nfolder = "{folder}"\n{more}\n'
    )


def write_survey(folder):
    """Two sizes, a warning, and a name with markup."""
    sizes = (
        TrainedSize(size="512 x 512", samples=30, visits=30, cut=0.25, enlarged=0.5),
        TrainedSize(size="768 x 384", samples=90, visits=90, cut=0.04, enlarged=1.25),
    )
    lines = (
        Line(name="pictures", text=f"120 in {folder.parent}/data, of 64 x 48 to 4,000 x 3,000 pixels"),
        Line(name="captions", text=f"3 are empty, e.g. {SCRIPT}", is_warning=True),
    )
    write_file(Survey(lines=lines, further=(), sizes=sizes), folder / "survey.json", SURVEY)


def write_samples(folder, steps=(100, 200), prompts=("a red cat", SCRIPT, "חתול אדום")):
    for step in steps:
        for index, prompt in enumerate(prompts):
            kept = PngInfo()
            kept.add_itxt("prompt", prompt)
            path = folder / f"samples/step-{step:08d}/{index:03d}-sample.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (step % 256, 80 * index, 90)).save(path, pnginfo=kept)


def write_plan_of(folder, *, stages=2, microbatches=4, ranks=2, measured=True, layers=6, filled=None):
    """plan.json, profile.json and cluster.json, and a timeline in which everything takes a tenth longer.

    `filled`: a profile whose frozen work fills bubbles.
    """
    plain = synthetic.chain([0.01] * layers, parameters=[10**6] * layers, elements=10**5, frozen=0.01)
    profile = plain if filled is None else filled
    profile, cluster = replace(profile, update=1e-9), synthetic.cluster(ranks)
    batch = 2 * microbatches * (ranks // stages)
    setting = Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch))
    layout = Layout(batch=batch, stages=stages, microbatches=microbatches, data_parallel=ranks // stages)
    filler = None if filled is None else filler_of(setting)
    plan = build_plan(profile.graph, layout, pricing=pricing_of(setting), filler=filler)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(plan, folder / "plan.json")
    write_profile(profile, folder / "profile.json")
    write_cluster(cluster, folder / "cluster.json")
    if measured:
        timeline = propose(setting, layout).timeline
        spans = tuple(replace(span, start=1.1 * span.start, end=1.1 * span.end) for span in timeline.spans)
        end = max(span.end for span in spans)
        update = tuple(Phase(worker=rank, name="optimizer", start=end, end=end + 0.002) for rank in range(stages))
        write_timeline(
            replace(timeline, spans=spans, source="measured", update=update, memory=()), folder / "timeline.json"
        )
    return plan


def make_run(folder, *, steps=400, start=1.0, **values):
    """A whole run of two ranks."""
    write_metrics(folder, steps, start=start)
    write_recipe(folder, **values)
    write_survey(folder)
    write_samples(folder)
    write_plan_of(folder)
    (folder / "ended.json").write_text('{"checkpoint": "step-00000400", "merged": false}')
    return folder
