"""The documents of a run in its folder: the complete recipe and the plan."""

from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import write_plan
from diffusionpipe.trainer.recipe import PLAN, Recipe, recipe_to_toml

SURVEY_FILE = "survey.json"
"""The name of the file in the run folder with the facts about the training data."""
OF_THE_PLAN = ("timeline.json", "timeline.png", "trace.json")
"""The names of files in the run folder that show a step of its plan."""


def write_documents(recipe: Recipe, plan: Plan) -> None:
    """Writes recipe.toml and plan.json into the run's folder.

    Where the plan differs from the one in the folder, it removes the old plan's timelines.
    """
    folder = recipe.run.folder
    write_atomically(folder / "recipe.toml", recipe_to_toml(recipe))
    path = folder / PLAN
    before = path.read_bytes() if path.exists() else None
    write_plan(plan, path)
    # A resumed run mostly has the same plan, and its timeline stays.
    if path.read_bytes() != before:
        for name in OF_THE_PLAN:
            (folder / name).unlink(missing_ok=True)
