"""The memory that a recipe's training holds for each parameter, and the samples that it draws together."""

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding import DEVICE, Item, Workload, plain_states
from diffusionpipe.holding.rest import RESTS
from diffusionpipe.holding.state import State, freed_at_once, in_bfloat16, widened_bytes
from diffusionpipe.holding.storage import storage_of
from diffusionpipe.trainer.model.guidance import drawn_guidance
from diffusionpipe.trainer.model.members import folder_of, gradient_dtype_of, trained_dtype
from diffusionpipe.trainer.model.optimizer_states import optimizer_states, with_optimizer
from diffusionpipe.trainer.model.parameter_groups import is_averaged
from diffusionpipe.trainer.recipe import Recipe, RecipePrecision
from diffusionpipe.trainer.recipe.training_section import Average, Rounded


def workload_of(recipe: Recipe, model: ModelGraph | None = None) -> Workload:
    """The workload of a recipe: its batch, and the bytes of each parameter's value, gradient, states and average.

    All are float32, or float64 in that precision, unless `training.weights`, `training.ema_states` or
    `optimizer.states` say otherwise. Where groups of parameters differ in the states that the optimizer keeps, the
    largest counts for all. States that do not follow from the number of parameters are counted for the parameters of
    `model`; without a model a matrix of an example's size is counted. Frozen parameters have the width in the model's
    description, where they are as they will be stored. Where the sizes are searched, the search chooses the place of
    the frozen part.

    Raises:
        RecipeError: the states of the optimizer cannot be counted.
    """
    groups = recipe.groups()
    narrow = trained_dtype(recipe) is not None
    state, once = optimizer_states(recipe, model)
    width = 8 if recipe.training.precision is RecipePrecision.FLOAT64 else 4
    states = with_optimizer(
        state,
        plain_states(
            parameter=width,
            gradient=width,
            optimizer=0 if state is None else state.width,
            ema=width if is_averaged(groups) else 0,
            has_backup=recipe.training.post_validation,
        ),
        RESTS[recipe.optimizer.states],
    )
    kept = recipe.training.ema_states
    ema = State(item=Item.EMA, width=2 if kept is Average.BFLOAT16 else width, is_hosted=kept is Average.HOST)
    states = tuple(ema if one.item is Item.EMA else one for one in states)
    gradient = gradient_dtype_of(recipe).itemsize
    if narrow:
        states = in_bfloat16(states, gradient=gradient, has_errors=recipe.training.rounding is Rounded.KAHAN)
    parameters = model.parameters if model is not None else ()
    update = widened_bytes(parameters, gradient=gradient) if narrow else 0
    if recipe.optimizer.in_backward:
        states, update = freed_at_once(states, parameters)
    return Workload(
        batch=recipe.training.batch,
        states=states,
        once=once,
        update=update,
        checkpointed=recipe.training.recomputed,
        encode_chunk=recipe.pipeline.sizes.encode_chunk,
        encoders=DEVICE if recipe.pipeline.is_searched else storage_of(recipe.pipeline.sizes.encoders),
    )


def samples_drawn_together(recipe: Recipe) -> int:
    """The number of rows that go through the denoiser at a time when a run draws: its samples, twice with guidance.

    0 if the run draws no samples.

    Raises:
        ModelError: there is no model folder.
        RecipeError: a key of guidance has no effect on the model.
    """
    sampling = recipe.sampling
    if not sampling.every:
        return 0
    models = (recipe.alone(name) for name in recipe.backbones)
    is_guided = any(drawn_guidance(one, folder_of(one)).is_guided for one in models)
    return (len(sampling.prompts) or len(sampling.labels)) * (2 if is_guided else 1)
