"""The recipe of a run: everything that a training depends on, read from a TOML file and checked.

`Recipe` and its sections are in `schema` and the modules that it names; `recipe_file` reads and writes files. Other
packages import from here.
"""

from diffusionpipe.trainer.recipe.decided import continued, decided, planned, recorded_recipe
from diffusionpipe.trainer.recipe.effects import Effect, default_of, effect_of, values_of, with_values
from diffusionpipe.trainer.recipe.layout import ranks_that_train, replicas_of_stages
from diffusionpipe.trainer.recipe.learning_rate_section import LearningRateSection
from diffusionpipe.trainer.recipe.model_section import FrozenDtype
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.objective_section import ObjectiveKind, ObjectiveSection, Variance
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.overrides import override
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.prompts import PromptLine, negatives_of, read_prompts
from diffusionpipe.trainer.recipe.recipe_file import (
    SECTIONS,
    load_recipe,
    recipe_from_table,
    recipe_to_toml,
    tables_of,
    tables_to_toml,
)
from diffusionpipe.trainer.recipe.run_section import PLAN, RunSection, TrackerName
from diffusionpipe.trainer.recipe.sampling_section import SamplingSection
from diffusionpipe.trainer.recipe.schema import Check, DataSection, OnError, Recipe
from diffusionpipe.trainer.recipe.training_section import OnSpike, RecipePrecision, TrainingSection

__all__ = [
    "PLAN",
    "SECTIONS",
    "Check",
    "DataSection",
    "Effect",
    "FrozenDtype",
    "LearningRateSection",
    "MemberSection",
    "ObjectiveKind",
    "ObjectiveSection",
    "OnError",
    "OnSpike",
    "OptimizerSection",
    "PipelineSection",
    "PromptLine",
    "Recipe",
    "RecipePrecision",
    "RunSection",
    "SamplingSection",
    "TrackerName",
    "TrainingSection",
    "Variance",
    "continued",
    "decided",
    "default_of",
    "effect_of",
    "load_recipe",
    "negatives_of",
    "override",
    "planned",
    "ranks_that_train",
    "read_prompts",
    "recipe_from_table",
    "recipe_to_toml",
    "recorded_recipe",
    "replicas_of_stages",
    "tables_of",
    "tables_to_toml",
    "values_of",
    "with_values",
]
