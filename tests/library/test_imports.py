"""The library's names load late, and what needs no torch loads none."""

import os
import subprocess
import sys
from pathlib import Path

import diffusionpipe as dp

PROFILE = Path(__file__).parents[1] / "files" / "profile.json"
HEAVY = ("torch", "diffusers", "transformers", "matplotlib", "pydantic", "numpy", "rich", "typer")


def run(program):
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)


def test_the_import_alone_loads_nothing_heavy():
    found = run(
        f"import sys, diffusionpipe; print([name for name in {HEAVY} if name in sys.modules], len(sys.modules))"
    )
    heavy, count = found.stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(count) < 150


def test_schedules_simulations_and_plans_of_a_profile_file_load_no_torch():
    program = f"""
import sys, diffusionpipe as dp
order = dp.schedule("zb-h1", ranks=2, microbatches=4)
dp.simulate(order).show()
choice = dp.plan({str(PROFILE)!r}, cluster="rtx4090x2", batch=16, stages=2, microbatches=2)
print(choice.table())
assert not {{"torch", "diffusers", "transformers"}} & set(sys.modules)
"""
    assert "layout" in run(program).stdout


def test_every_public_name_is_there_and_no_module_takes_its_place():
    for name in dp.__all__:
        assert getattr(dp, name) is not None
    package = Path(dp.__file__).parent
    places = {path.stem for path in package.iterdir()}
    assert not places & set(dp.__all__)
    assert set(dp.__all__) <= set(dir(dp))
