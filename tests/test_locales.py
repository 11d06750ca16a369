"""Words of users pass through every locale: names of files, logs, prompts, metadata."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion
from PIL import Image
from test_structure import MODULES, relative

from diffusionpipe.trainer.recipe.recipe_file import recipe_to_toml

ENVIRON = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
BIRD = "青い鳥 é"

SCRIPT = """
import json, logging, os, sys
from pathlib import Path
import numpy as np
from rich.console import Console
from diffusionpipe import cli
from diffusionpipe.cli.verbs.output import log_to
from diffusionpipe.ir.locales import as_utf8, print_everything
from diffusionpipe.trainer.data.scan.dataset import scan
from diffusionpipe.trainer.recipe import RecipePrecision
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.sample_file import SampleOrigin, file_name, read_origin, write_sample
import typer

assert sys.getfilesystemencoding() == "ascii"
bird = json.loads(sys.stdin.read())
given = as_utf8(sys.argv[1])
assert given == bird, ascii(given)

def show(prompt: list[str] = [], out: Path = Path("x")) -> None:
    assert prompt == [bird], ascii(prompt)
    os.fsencode(out)

app = typer.Typer()
app.command()(show)
command = typer.main.get_command(app)
cli._expand_homes(command)
command(args=["--prompt", sys.argv[1], "--out", sys.argv[1]], standalone_mode=False)

print_everything()
log_to(Console(file=sys.stdout), 0)
logging.getLogger("diffusionpipe").warning("caption=%s", bird)
print(bird, sys.argv[1])

samples = {sample.text: sample.name for sample in scan(Path("data"), "text").samples}
assert set(samples) == {"by metadata", bird}, ascii(samples)
os.stat(os.path.join("data", samples["by metadata"]))

settings = SamplingSettings(steps=1, guidance=1.0, seed=0, scheduler={})
precision = RecipePrecision.FLOAT32
about = {"model": "m", "weights": "average", "index": 7, "count": 8, "resolution": 4}
origin = SampleOrigin(settings=settings, prompt=bird, precision=precision, **about)
path = Path("drawn") / file_name(origin)
write_sample(np.zeros((4, 4, 3), np.uint8), origin, path)
assert read_origin(path).prompt == bird
print("wrote", path)

table = {"model": {"path": "m"}, "data": {"train": bird, "resolution": 8}, "training": {"steps": 1, "batch": 1}}
try:
    recipe_from_table(table, source="r.toml")
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_words_of_users_pass_where_the_locale_has_no_letters_for_them(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (4, 4)).save(data / "ü鳥.png")
    Image.new("RGB", (4, 4)).save(data / "b.png")
    (data / "b.txt").write_text(BIRD, encoding="utf-8")
    (data / "metadata.jsonl").write_text('{"file_name": "u\u0308鳥.png", "text": "by metadata"}\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, BIRD],
        input=b'"' + BIRD.encode("unicode_escape").replace(b"\\xe9", b"\\u00e9") + b'"',
        cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}, **ENVIRON},
        capture_output=True,
        check=False,
    )
    said = (done.stdout + done.stderr).decode("utf-8")
    assert done.returncode == 0, said
    assert "\\u9752\\u3044\\u9ce5" in said
    assert "wrote drawn/007.png" in said
    assert "data.train: this locale has no letters for the path (its encoding is ascii); set LC_ALL=C.UTF-8" in said


@pytest.mark.slow
def test_a_run_with_prompts_and_captions_in_japanese_ends_well_where_the_locale_is_c(tmp_path):
    data = save_pictures(tmp_path / "data", count=4)
    lines = data / "metadata.jsonl"
    lines.write_text(lines.read_text(encoding="utf-8").replace('"a"', f'"{BIRD}"'), encoding="utf-8")
    model = save_stable_diffusion(tmp_path / "model")
    sampling = {"every": 1, "prompts": (BIRD,), "steps": 2}
    recipe = recipe_of(model, data, tmp_path / "run", sampling=sampling, training={"steps": 1}, pipeline={"stages": 1})
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "diffusionpipe", "train", "recipe.toml", "--ranks", "1", "--device", "cpu"],
        cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}, **ENVIRON},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode("utf-8", "replace")
    assert list((tmp_path / "run" / "samples").rglob("000.png"))


def opened_without_encoding(tree):
    """Lines that open a file as text and do not say in which encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if is_method else getattr(node.func, "id", "")
        first = {"read_text": 0, "write_text": 1}.get(name)
        if first is not None and is_method and len(node.args) <= first:
            yield node.lineno
        module = node.func.value.id if is_method and isinstance(node.func.value, ast.Name) else ""
        if name == "open" and module not in {"os", "Image", "av", "tarfile"}:
            modes = [*node.args[0 if is_method else 1 :], *(k.value for k in node.keywords if k.arg == "mode")]
            if not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes):
                yield node.lineno
        if any(keyword.arg in {"text", "universal_newlines"} for keyword in node.keywords) and name in {"run", "Popen"}:
            yield node.lineno


def test_the_check_of_encodings_sees_what_it_looks_for():
    code = "open(p)\np.open('w')\np.read_text()\np.write_text(x)\nrun(c, text=True)\n"
    fine = "open(p, 'rb')\np.open('xb')\np.read_text(encoding='ascii')\np.write_text(x, 'utf-8')\nos.open(p, 0)\n"
    assert list(opened_without_encoding(ast.parse(code + fine))) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=lambda path: path.name)
def test_every_text_file_is_opened_in_a_stated_encoding(folder):
    found = [
        f"{relative(path)}:{line}"
        for path in sorted(Path(folder).glob("*.py"))
        for line in opened_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
