"""One run: a setting and a seed, trained by the recurrence and judged."""

from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

from torch import Tensor, nn

from benchmarks.asynchronous.digits import BATCH, Digits, loss_layers, recognised, validation_loss, write_model
from benchmarks.asynchronous.recurrence import Recurrence, mean_ages, parts_of
from benchmarks.asynchronous.settings import STAGES, Setting
from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.graphs.graph import LayerGraph, layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.trainer.model.parameter_groups import learning_rates
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.gradient_norm import clip_alone
from diffusionpipe.trainer.optim.learning_rate import learning_rate_at
from diffusionpipe.trainer.optim.optimizer import Group, RankOptimizer, build_optimizer
from diffusionpipe.trainer.optim.staleness_rates import factor_at

CURVE_FROM, CURVE_EVERY = 0.5, 20
"""From this part of the run on the loss is taken every so many steps, of the first rows of the validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has reached."""

    setting: str
    seed: int
    ages: tuple[float, ...]
    """Of each stage's weights in its forwards, in the mean."""
    loss: float
    """Of the averaged weights at the end, over all held-out pictures."""
    curve: tuple[tuple[int, float], ...]
    """(steps made, the same over the first 150 rows)."""
    recognised: float
    """Share of generated digits."""
    processor: float
    """Seconds."""


class Stages:
    """Mutable: the model of a run, its optimizers and its average."""

    def __init__(self, graph: LayerGraph, model: ModelGraph, digits: Digits, setting: Setting) -> None:
        layout = Layout(
            batch=BATCH, stages=STAGES, microbatches=setting.microbatches, versions=setting.versions, delay=1
        )
        plan = build_plan(model, layout)
        self.graph, self.setting, self.recipe = graph, setting, digits.recipe
        self.parts = parts_of(plan)
        named = [layer_parameters(graph, layers) for layers in plan.blocks[:STAGES]]  # that of the encoders is last
        self._named = [{name: p for name, p in block.items() if p.requires_grad} for block in named]
        self.optimizers = [self._optimizer(block) for block in self._named]
        parameters = {name: p for block in self._named for name, p in block.items()}
        decay = self.recipe.training.ema_decay
        assert isinstance(decay, float), "the example has an average"
        self.average = Ema(parameters, dict.fromkeys(parameters, decay))
        self.recurrence = Recurrence(
            [list(block.values()) for block in self._named],
            self.parts,
            self.optimizers,
            is_predicted=setting.is_predicted,
        )

    def _optimizer(self, named: dict[str, nn.Parameter]) -> RankOptimizer:
        setting = self.setting
        arguments = {**self.recipe.optimizer.arguments, **setting.arguments}
        muon = Group("matrices", {"weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}, optimizer="Muon")

        def group_of(name: str) -> Group:
            is_matrix = setting.optimizer == "Muon" and named[name].ndim == 2
            return muon if is_matrix else Group(arguments=arguments)

        optimizer = build_optimizer("AdamW", named, setting.learning_rate, arguments, group_of)
        assert optimizer is not None, "each stage has biases"
        return optimizer

    def clip(self) -> None:
        """The gradients, by the norm of all or each stage's by its own."""
        blocks = self.recurrence.stages
        if not self.setting.is_clipped_by_block:
            blocks = [[parameter for block in blocks for parameter in block]]
        for block in blocks:
            clip_alone(block, self.recipe.training.clip_norm)

    def set_rates(self, step: int, steps: int) -> None:
        """The recipe's curve, and what the stage's age leaves of it."""
        schedule = replace(learning_rates(self.recipe), peak=self.setting.learning_rate, total_steps=steps)
        for optimizer, age in zip(self.optimizers, mean_ages(self.parts), strict=True):
            factor = factor_at(step, age, self.setting.fading) if self.setting.fading else 1.0
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, schedule) * factor


def train(digits: Digits, setting: Setting, steps: int, *, keep: Path | None = None) -> Outcome:
    """Train the setting and judge what it has learnt; `steps` are those of the flushed run.

    `keep`: a folder for a model with the averaged weights.
    """
    steps = round(setting.length * steps)
    batches, curve = digits.batches(steps), []
    start = process_time()
    graph, model = digits.model()
    layers = loss_layers(graph)
    run = Stages(graph, model, digits, setting)
    for step, batch in enumerate(batches):

        def loss_of(rows: tuple[int, ...], batch: dict[str, Tensor] = batch) -> Tensor:
            taken = batch if len(rows) == BATCH else {name: value[list(rows)] for name, value in batch.items()}
            return run_layers(layers, graph.components, taken, targets=["loss"])["loss"].sum() / BATCH

        run.set_rates(step, steps)
        if not setting.flushed_until * steps <= step < setting.flushed_from * steps:
            run.recurrence.flush()
        run.recurrence.step(loss_of, run.clip)
        run.average.update(step)
        made = step + 1
        if made >= CURVE_FROM * steps and made % CURVE_EVERY == 0:
            with run.average.swapped():
                curve.append((made, validation_loss(graph, digits.validation[:1])))
    with run.average.swapped():
        loss = validation_loss(graph, digits.validation)
        share = recognised(graph, digits)
        if keep is not None:
            write_model(graph, digits, keep)
    return Outcome(
        setting=setting.name,
        seed=digits.seed,
        ages=mean_ages(run.parts),
        loss=loss,
        curve=tuple(curve),
        recognised=share,
        processor=process_time() - start,
    )
