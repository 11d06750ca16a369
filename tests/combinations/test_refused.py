"""The table of combinations is whole: its tests exist, its refusals are raised, and its document is up to date."""

import ast
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from kit.pairs import NOT_TRIED, TABLE, WORKS, Refused, Works
from kit.tiny_models import FILLING_UNET, tiny_controlled, tiny_dit, tiny_stable_diffusion
from planner import synthetic

from diffusionpipe.combinations.features import MEANINGS, Feature
from diffusionpipe.combinations.refused import REFUSED, refusal
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
from diffusionpipe.models.opening.folder import REGISTRY, family_graph
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers, check_options
from diffusionpipe.planner.pricing.given import Given, check_given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import check_storage
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.trainer.recipe import Recipe, decided, recipe_from_table
from diffusionpipe.trainer.recipe.cached_keys import Counts
from diffusionpipe.trainer.setup.caching import Cacheable, check_cache

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_table_names_exists():
    for name in WORKS:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_no_pair_is_said_to_work_and_to_be_refused_by_other_lines():
    said = [frozenset(pair) for name, pairs in WORKS.items() for pair in pairs if "test_combinations" not in name]
    assert len(said) == len(set(said))
    assert not set(said) & {frozenset(pair) for pair in REFUSED}
    assert not NOT_TRIED & set(TABLE)


def test_every_feature_has_a_meaning_and_an_entry():
    assert set(MEANINGS) == set(Feature)
    assert set().union(*TABLE) == set(Feature)


def plan_of(**sizes):
    """Refused while the plan is made."""
    graph = synthetic.chain([0.01] * 8).graph
    return lambda: build_plan(
        graph, Layout(**{"batch": 8, "stages": 2, "microbatches": 2, "sharded": Sharded.ALL} | sizes)
    )


def recipe_with(**sections):
    """Refused when the recipe is read."""
    small = {
        "model": {"path": "model"},
        "data": {"train": "pictures", "resolution": 32},
        "training": {"steps": 10, "batch": 8},
        "run": {"folder": "runs/small"},
    }
    return lambda: Recipe.model_validate(
        small | {name: small.get(name, {}) | section for name, section in sections.items()}
    )


def search_over(num_ranks, **given):
    return lambda: check_given(Given(sharded=Sharded.ALL, **given), batch=16, num_ranks=num_ranks)


def adapters_on(build, trained):
    return lambda: add_lora(build().components, trained, LoraSettings(rank=2))


def tied(other, **sizes):
    """A weight that the first layer has in common with another one."""

    def refused():
        graph = synthetic.chain([0.01] * 8).graph
        first = graph.layer(graph.backbone_layers[0])
        layers = tuple(
            replace(one, parameters=first.parameters) if one.name == graph.backbone_layers[other] else one
            for one in graph.layers
        )
        build_plan(replace(graph, layers=layers), Layout(batch=8, microbatches=2, **sizes))

    return refused


def without_encoders():
    profile = synthetic.chain([0.01] * 4)
    everything = tuple(replace(parameter, is_trainable=True) for parameter in profile.graph.parameters)
    profile = replace(profile, graph=replace(profile.graph, parameters=everything))
    return Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(8))


def estimating(pipeline, lora=None):
    """A model of that pipeline, asked to read its own estimate."""
    objective = Objective(ObjectiveSettings(self_conditioning=0.5), {})
    return lambda: family_graph(REGISTRY[pipeline], {}, objective, resolution=8, train=None, dtype="float32", lora=lora)


def without_flush(**sizes):
    return plan_of(**{"sharded": False, "versions": Versions.STASHED} | sizes)


def nothing_to_keep():
    counts = Counts(pictures=1, views=1.0, texts=1, variants=1.0)
    recipe = recipe_with(pipeline={"encoders": "cache", "fill": False})()
    check_cache(
        Cacheable(
            kept=(),
            counts=counts,
            sizes=(),
            variants=(),
            totals=(),
            settings=(),
            num_samples=1,
            spared=frozenset(),
            encoded_anew=(),
        ),
        recipe,
    )


CLIPPED = {"training": {"clip": "block"}}


def several_models(**sections):
    """Refused when the recipe of two models is read."""
    table = {
        "models": {"base": {"path": "a"}, "super": {"path": "b"}},
        "data": {"train": "pictures", "resolution": 32},
        "training": {"steps": 10, "batch": 8},
        "run": {"folder": "runs/small"},
    }
    return lambda: recipe_from_table(table | sections, source="small.toml")


def filling_and_estimating():
    components = dict(tiny_stable_diffusion(unet=FILLING_UNET).components)
    objective = ObjectiveSettings(self_conditioning=0.5)
    del components["objective"]
    family_graph(
        REGISTRY["StableDiffusionInpaintPipeline"],
        components,
        Objective(objective, {}),
        resolution=8,
        train=["unet"],
        dtype="float64",
        lora=None,
    )


F = Feature
CASES = {
    (F.SHARDED, F.REPLICAS): [
        plan_of(data_parallel=2, replicas=(2, 1)),
        recipe_with(pipeline={"sharded": True, "data_parallel": 2, "microbatches": 1, "replicas": [2]}),
    ],
    (F.SHARDED, F.ONE_COPY): [plan_of(), recipe_with(pipeline={"sharded": True})],
    (F.SHARDED, F.ONE_RANK): [search_over(1)],
    (F.SHARDED, F.GIVEN_PIPELINES): [search_over(4, stages=2), search_over(4, data_parallel=2)],
    (F.SHARDED, F.TWO_DIRECTIONS): [plan_of(data_parallel=2, schedule="chimera")],
    (F.SHARDED, F.TIED): [tied(-1, stages=1, data_parallel=2, sharded=Sharded.ALL, buckets=2)],
    (F.VERSIONS, F.TIED): [tied(-1, stages=2, versions=Versions.STASHED)],
    (F.LORA, F.FROM_SCRATCH): [recipe_with(lora={"rank": 8}, model={"from_scratch": True})],
    (F.DORA, F.NARROW_STORE): [
        recipe_with(
            lora={"rank": 8, "dora": True}, model={"frozen_dtype": "bfloat16"}, training={"precision": "bfloat16"}
        )
    ],
    (F.LORA, F.DIT): [adapters_on(tiny_dit, "transformer")],
    (F.LORA, F.CONTROLNET): [
        adapters_on(tiny_controlled, "controlnet"),
        lambda: family_graph(
            REGISTRY["StableDiffusionControlNetPipeline"],
            {},
            Objective(ObjectiveSettings(), {}),
            resolution=8,
            train=["text_encoder"],
            dtype="float32",
            lora=LoraSettings(rank=2),
        ),
    ],
    (F.SELF_CONDITIONING, F.LORA): [
        recipe_with(lora={"rank": 8}, objective={"self_conditioning": 0.5}),
        estimating("StableDiffusionPipeline", lora=LoraSettings(rank=2)),
    ],
    (F.SELF_CONDITIONING, F.CONTROLNET): [estimating("StableDiffusionControlNetPipeline")],
    (F.SELF_CONDITIONING, F.MASKS): [
        recipe_with(objective={"self_conditioning": 0.5}, data={"masks": "edges"}),
        filling_and_estimating,
    ],
    (F.SEVERAL_MODELS, F.MASKS): [several_models(data={"train": "pictures", "resolution": 32, "masks": "edges"})],
    (F.SELF_CONDITIONING, F.PATCHES): [recipe_with(objective={"self_conditioning": 0.5}, data={"patches": {}})],
    (F.SEVERAL_MODELS, F.PATCHES): [several_models(data={"train": "pictures", "resolution": 32, "patches": {}})],
    (F.LORA, F.PATCHES): [recipe_with(lora={"rank": 8}, data={"patches": {}})],
    (F.VERSIONS, F.PATCHES): [recipe_with(pipeline={"versions": "stashed"}, data={"patches": {}}, **CLIPPED)],
    (F.SEVERAL_MODELS, F.LORA): [several_models(lora={"rank": 8})],
    (F.SEVERAL_MODELS, F.ORDERS_FILE): [several_models(pipeline={"orders": "orders.csv"})],
    (F.OFFLOAD, F.NO_ENCODERS): [lambda: check_storage(replace(without_encoders(), given=Given(encoders="host")))],
    (F.FILL, F.NO_ENCODERS): [
        lambda: check_options(FillOptions(), FrozenLayers(components=(), forward=lambda layer, samples: 0.0), 2)
    ],
    (F.DORA, F.QUANTISED): [
        recipe_with(lora={"rank": 8, "dora": True}, model={"frozen_dtype": "nf4"}, training={"precision": "bfloat16"})
    ],
    (F.QUANTISED, F.FROM_SCRATCH): [
        recipe_with(model={"frozen_dtype": "int8", "from_scratch": True}, training={"precision": "bfloat16"})
    ],
    (F.QUANTISED, F.WIDE): [
        recipe_with(model={"frozen_dtype": "nf4"}, training={"precision": "float32"}),
        lambda: decided(recipe_with(model={"frozen_dtype": {"unet": "int8"}})(), has_bfloat16=False),
    ],
    (F.NARROW_STORE, F.WIDE): [recipe_with(model={"frozen_dtype": "bfloat16"}, training={"precision": "float32"})],
    (F.VERSIONS, F.SHARDED): [
        without_flush(sharded=Sharded.ALL, data_parallel=2),
        recipe_with(pipeline={"versions": "stashed", "sharded": True, "data_parallel": 2}, **CLIPPED),
    ],
    (F.VERSIONS, F.BUCKETS): [without_flush(buckets=2)],
    (F.VERSIONS, F.ORDERS): [
        without_flush(orders=one_f_one_b(2, 2)),
        recipe_with(pipeline={"versions": "stashed", "orders": "orders.csv"}, **CLIPPED),
    ],
    (F.VERSIONS, F.OFFLOAD): [
        without_flush(encoders="host"),
        recipe_with(pipeline={"versions": "stashed", "offload_frozen": True}, **CLIPPED),
    ],
    (F.PREDICTION, F.OTHER_OPTIMIZER): [
        recipe_with(pipeline={"versions": "predicted"}, optimizer={"name": "SGD"}, **CLIPPED),
        recipe_with(pipeline={"versions": "predicted"}, optimizer={"name": "RMSprop"}, **CLIPPED),
    ],
    (F.VERSIONS, F.SELF_CONDITIONING): [
        recipe_with(pipeline={"versions": "stashed"}, objective={"self_conditioning": 0.5}, **CLIPPED)
    ],
    (F.VERSIONS, F.POST_VALIDATION): [
        recipe_with(pipeline={"versions": "stashed"}, training={"clip": "block", "post_validation": True})
    ],
    (F.REPLAN, F.VERSIONS): [
        recipe_with(pipeline={"versions": "stashed", "fill": True, "replan": "suggest"}, **CLIPPED)
    ],
    (F.REPLAN, F.SEVERAL_MODELS): [several_models(pipeline={"plan": "auto", "replan": "suggest"})],
    (F.REPLAN, F.PLAN_FILE): [recipe_with(pipeline={"plan": "plan.json", "replan": "suggest"})],
    (F.REPLAN, F.NOT_MEASURED): [recipe_with(pipeline={"replan": "suggest"})],
    (F.CACHE, F.VERSIONS): [recipe_with(pipeline={"versions": "stashed", "encoders": "cache"}, **CLIPPED)],
    (F.CACHE, F.SEVERAL_MODELS): [several_models(pipeline={"encoders": "cache"})],
    (F.CACHE, F.NO_ENCODERS): [nothing_to_keep],
    (F.VERSIONS, F.SPIKES): [
        recipe_with(pipeline={"versions": "stashed"}, training={"clip": "block", "on_spike": "stop"})
    ],
    (F.VERSIONS, F.GLOBAL_CLIPPING): [recipe_with(pipeline={"versions": "stashed"})],
    (F.VERSIONS, F.SEVERAL_MODELS): [
        recipe_with(pipeline={"versions": "stashed"}, models={"base": {"path": "a"}, "large": {"path": "b"}}, **CLIPPED)
    ],
}
"""What provokes each refusal, in every place that raises it."""


@pytest.mark.parametrize(
    ("pair", "provoke"), [pytest.param(pair, one, id="-".join(pair)) for pair, ones in CASES.items() for one in ones]
)
def test_a_refusal_is_raised_with_the_reason_of_the_table(pair, provoke):
    reason = re.sub(r"\\\{\w+(!r)?\\\}", ".*", re.escape(REFUSED[pair]))
    with pytest.raises(Exception, match=reason) as error:
        provoke()
    assert type(error.value).__name__ in ("ConfigError", "RecipeError", "ModelError", "ValidationError")


def test_every_refusal_is_provoked_and_comes_from_the_table():
    assert set(CASES) == set(REFUSED)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    raised = re.findall(r"refusal\(\s*Feature\.(\w+),\s*Feature\.(\w+)", code)
    assert {frozenset({Feature[one], Feature[other]}) for one, other in raised} >= {
        frozenset(pair)
        for pair in REFUSED
        if pair != (F.LORA, F.CONTROLNET)  # raised as that of a DiT
    }
    for pair, reason in REFUSED.items():
        assert code.count(reason[:40]) <= 2, pair  # in the table alone


def test_a_pair_that_works_has_no_refusal():
    with pytest.raises(KeyError):
        refusal(Feature.FILL, Feature.REPLICAS)


def test_the_document_is_generated_from_the_table():
    spec = spec_from_file_location("make_combinations", ROOT / "docs/make_combinations.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs/combinations.md").read_text(encoding="utf-8")
    assert module.document() == written, "run `make docs`"
    assert all(isinstance(entry, Works | Refused) for entry in TABLE.values())
