"""Recorded trainings, run by today's code."""

from pathlib import Path
from tempfile import mkdtemp

from crew import Crew
from golden.recipes import TRAININGS, recipe_of
from tiny_runs import losses_of, train, train_here


def run_training(name: str, precision: str, place: Path, crew: Crew | None) -> list[float]:
    """The losses of a training, on the ranks of a crew or as the only rank; models and data are in `place`."""
    training = TRAININGS[name]
    folder = Path(mkdtemp(dir=place))
    recipe = recipe_of(
        training, precision, model=str(place / training.kind), data=str(place / "data"), folder=str(folder)
    )
    for result in crew.run(train, recipe) if crew else [train_here(recipe)]:
        if isinstance(result, Exception):
            raise result
    return list(losses_of(folder).values())
