"""How families that diffusers' own pipelines draw are guided; test_described_families compares their pictures."""

import json
import shutil

from tiny_described import save_described

from diffusionpipe.models.pipeline_defaults import Guidance, default_guidance


def test_a_distilled_klein_is_drawn_without_guidance_unless_told_otherwise(tmp_path):
    base = save_described("Flux2KleinPipeline", tmp_path / "base")
    assert default_guidance(base) == Guidance(scale=4.0)
    shutil.copytree(base, tmp_path / "distilled")
    index = json.loads((base / "model_index.json").read_text())
    (tmp_path / "distilled" / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert default_guidance(tmp_path / "distilled") == Guidance(scale=1.0)
