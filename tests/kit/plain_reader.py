"""Opens folders of models by diffusers alone and draws from them: a program of its own, which imports nothing of ours.

`python plain_reader.py jobs.json results.json`. A job is an object:

    folder      a complete folder
    adapters    a folder of adapters that the pipeline loads, or null
    call        arguments of the pipeline
    arrays      arguments that are tensors: the name, and a file of numpy
    eager       components of transformers whose attention is computed step by step
    noise       a file of numpy with the noise of a pipeline that takes none as an argument, or left out
    seed        of the generator that the pipeline gets
    picture     where what is drawn is written, a file of numpy

The result of a job holds what was reported while it was opened, and the error, or null.
"""

import importlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SERIOUS = ("missing", "newly initialized", "not initialized", "unexpected", "not used", "not expected", "mismatch")
"""Words of a warning that something was not read as it was written."""
_HARMLESS = "This is safe to ignore"
"""Said of every text encoder that has no adapters."""
_LISTED = 4


class Reports(logging.Handler):
    """Keeps warnings that tell of something that was not read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.keep(record.getMessage())

    def keep(self, text: str) -> None:
        """Keep a text that has one of the words."""
        if any(word in text.lower() for word in _SERIOUS) and _HARMLESS not in text:
            self.kept.append(" ".join(text.split())[:300])


def main() -> int:
    """Does all jobs."""
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = [_done(job) for job in jobs]
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    return 0


def _done(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    reports = Reports()
    error = None
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _draw(job, reports)
        for warning in seen:
            reports.keep(str(warning.message))
    except Exception as problem:  # a library raises whatever it meets
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}"
    return {"reports": sorted(set(reports.kept)), "error": error}


def _draw(job: dict[str, Any], reports: Reports) -> None:
    import diffusers
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    for name, library in libraries.items():
        library.logging.set_verbosity_warning()
        logger = logging.getLogger(name)
        logger.handlers[:] = [reports]
    folder = Path(job["folder"])
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and entry[0] in libraries:
            _open(getattr(libraries[entry[0]], entry[1]), folder / name, name, reports)
    parts = {
        name: getattr(transformers, index[name][1]).from_pretrained(folder / name, attn_implementation="eager")
        for name in job["eager"]
    }
    pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(folder, **parts)
    pipeline.set_progress_bar_config(disable=True)
    if job["adapters"] is not None:
        importlib.import_module("peft")
        pipeline.load_lora_weights(job["adapters"])
    arrays = {name: torch.from_numpy(np.load(path)) for name, path in job["arrays"].items()}
    generator = torch.Generator().manual_seed(job["seed"])
    if job.get("noise") is not None and "latents" not in arrays:
        module: Any = sys.modules[type(pipeline).__module__]
        module.randn_tensor = lambda *_, **__: torch.from_numpy(np.load(job["noise"]))
    with torch.no_grad():
        drawn = pipeline(**job["call"], **arrays, generator=generator, output_type="np")[0]
    np.save(job["picture"], np.asarray(drawn))


def _open(kind: Any, path: Path, name: str, reports: Reports) -> None:
    """Open a component by itself: then its class says which tensors it has not found."""
    if not issubclass(kind, torch.nn.Module):
        return
    _, found = kind.from_pretrained(path, output_loading_info=True)
    for problem, keys in found.items():
        if keys:
            listed = ", ".join(sorted(map(str, keys))[:_LISTED])
            reports.kept.append(f"{name}: {len(keys)} {problem}: {listed}")


if __name__ == "__main__":
    sys.exit(main())
