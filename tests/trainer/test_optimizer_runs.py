"""Whole runs with optimizers of other packages: two stages do what one process does, and so do their continuations."""

import shutil

import pytest
import torch
from kit.crew import crew_of
from kit.held_states import held_by
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, tensors_of, train, train_here
from safetensors.torch import load_file
from torch import nn

from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Ledger
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.checkpoint_folder import FOLDER
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.step.loop import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"min_8bit_size": 16}
CLASSES = {
    "AdamW8bit": {"name": "bitsandbytes.optim.AdamW8bit", "arguments": SMALL},
    "Lion8bit": {"name": "bitsandbytes.optim.Lion8bit", "arguments": SMALL, "learning_rate": 1e-3},
    "PagedAdamW8bit": {"name": "bitsandbytes.optim.PagedAdamW8bit", "arguments": SMALL},
    "Lion": {"name": "pytorch_optimizer.Lion", "learning_rate": 1e-3},
    "CAME": {"name": "pytorch_optimizer.CAME", "learning_rate": 1e-3},
    "Adan": {"name": "pytorch_optimizer.Adan"},
    "SOAP": {"name": "pytorch_optimizer.SOAP"},
    "AdaFactor": {"name": "pytorch_optimizer.AdaFactor"},
    "Adafactor": {"name": "Adafactor"},
    "Muon": {"name": "Muon", "rest": {"name": "AdamW", "learning_rate": 1e-3}},
}
AVERAGING = {"name": "schedulefree.AdamWScheduleFree", "learning_rate": 0.02, "arguments": {"warmup_steps": 2}}
DISTANCE = {"name": "prodigyopt.Prodigy", "learning_rate": 1.0, "arguments": {"d0": 1e-3}}
ALL = [pytest.param(kind, marks=pytest.mark.slow) for kind in CLASSES]
PLAIN = {"clip_norm": "none", "ema_decay": "none"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of 6 steps that saves after step 3."""

    def make(name, optimizer, **sections):
        training = PLAIN | sections.pop("training", {})
        common = {"checkpoint": {"every": 3, "keep": 9}, "training": training, "optimizer": optimizer}
        return recipe_of(place / "dit", place / "data", place / name, **common | sections)

    return make


@pytest.fixture(scope="module")
def alone(recipe, place):
    """The folder of the finished run in one process, for each class."""
    done = {}

    def folder(kind):
        if kind not in done:
            assert train_here(recipe(f"{kind}-alone", CLASSES[kind])) == 6
            done[kind] = place / f"{kind}-alone"
        return done[kind]

    return folder


def assert_same_bits(found, expected):
    one, other = tensors_of(latest(found)), tensors_of(latest(expected))
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize("kind", ALL)
def test_two_stages_end_with_the_bits_of_one_process(crew, recipe, alone, place, kind):
    own = recipe(f"{kind}-two", CLASSES[kind])
    assert crew.run(train, own) == [6, 6]
    assert_same_bits(place / f"{kind}-two", alone(kind))
    losses = losses_of(alone(kind))
    assert len(set(losses.values())) == 6
    first, last = (tensors_of(path) for path in sorted((alone(kind) / FOLDER).iterdir()))
    changed = [name for name in first if name.startswith("model.") and not torch.equal(first[name], last[name])]
    assert len(changed) > len([name for name in first if name.startswith("model.")]) / 2


@pytest.mark.parametrize("kind", ALL)
def test_a_run_over_two_stages_goes_on_in_one_process_and_back(crew, recipe, alone, place, kind):
    one = place / f"{kind}-from-alone"
    shutil.copytree(alone(kind), one)
    assert crew.run(train, recipe(one.name, CLASSES[kind]), "3") == [6, 6]
    assert_same_bits(one, alone(kind))
    shutil.rmtree(one / FOLDER / "step-00000006")
    assert train_here(recipe(one.name, CLASSES[kind]), "3") == 6
    assert_same_bits(one, alone(kind))


@pytest.fixture(scope="module")
def noted(recipe, place):
    """Weights before the first step, gradients of each, and the last checkpoint, of Muon with rest and groups."""
    before, gradients, held, update = {}, [], [], Stepper._update

    def note(self, step):
        named = self._session.worker.parameters
        before.update({name: p.detach().clone() for name, p in named.items()} if step == 0 else {})
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        update(self, step)
        counted = Ledger(graph=self._session.model, workload=workload_of(self._session.recipe, self._session.model))
        held.append((counted.held(named.keys()).optimizer, held_by(self._session.optimizer)))

    groups = {"*.bias": {"weight_decay": 0.0, "learning_rate": 0.002}, "*ff*": {"weight_decay": 0.3}}
    optimizer = {"name": "Muon", "rest": {"name": "AdamW", "learning_rate": 0.001}, "groups": groups}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_update", note)
        assert train_here(recipe("noted", optimizer, training={"steps": 3}, checkpoint={"every": 3})) == 3
    return before, gradients, tensors_of(latest(place / "noted")), held


def test_muon_steps_matrices_and_rest_all_others_as_torchs_own_optimizers_do(noted):
    before, gradients, found, _ = noted
    held = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    outer = ("transformer.pos_embed.", "transformer.proj_out_", "transformer.norm_out")
    rest = {name for name, p in held.items() if p.ndim < 2 or "embed" in name or name.startswith(outer)}
    matrices = {name: nn.Parameter(p.detach().flatten(1)) for name, p in held.items() if name not in rest}
    assert matrices
    assert {name for name in held if f"optimizer.{name}.momentum_buffer" in found} == set(matrices)
    fed = [p for name, p in matrices.items() if "ff" in name]
    others = [p for name, p in matrices.items() if "ff" not in name]
    biases = [held[name] for name in rest if name.endswith(".bias")]
    weights = [held[name] for name in rest if not name.endswith(".bias")]
    muon = torch.optim.Muon([{"params": fed, "weight_decay": 0.3}, {"params": others}], lr=0.01)
    adamw = torch.optim.AdamW(
        [{"params": biases, "weight_decay": 0.0, "lr": 0.002}, {"params": weights}], lr=0.001, fused=True
    )
    for own in gradients:
        for name, p in held.items():
            p.grad = own[name]
        for name, p in matrices.items():
            p.grad = own[name].flatten(1)
        muon.step()
        adamw.step()
    for name, p in (held | matrices).items():
        assert torch.equal(found[f"model.{name}"].view_as(p), p), name


def test_the_bytes_of_muon_and_rest_are_those_that_a_plan_counts(noted):
    counted, held = noted[3][-1]
    assert counted == held
    assert counted > 0


def test_metrics_have_the_rates_of_groups_that_differ(noted, place):
    row = losses_of(place / "noted", "learning_rate/rest|*.bias")
    assert set(row.values()) == {0.002}
    assert set(losses_of(place / "noted", "learning_rate/rest").values()) == {0.001}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"groups": {"*.nrom*": {"weight_decay": 0.0}}},
            r'groups."\*.nrom\*": no trained parameter has such a name; change',
        ),
        (
            {"groups": {"*": {"weight_decay": 0.0}, "*.bias": {"weight_decay": 0.1}}},
            r'groups."\*.bias": all parameters of such names are in groups before it; put it first',
        ),
        ({"name": "Muon"}, r"optimizer.name: Muon cannot train .* Give them a second class \(\[optimizer.rest\]"),
        ({"name": "pytorch_optimizer.ScalableShampoo"}, "keeps an object of the class .*; choose one that keeps plain"),
        (
            {"name": "AdamW", "rest": {"parameters": ["*embed*", "*.wieght"]}},
            r'optimizer.rest.parameters: "\*.wieght": no trained parameter has such a name; change the pattern',
        ),
        ({"name": "AdamW", "rest": {"parameters": ["*"]}}, "optimizer.rest: all trained parameters belong to it"),
    ],
)
def test_a_wrong_optimizer_is_refused_before_anything_is_measured(recipe, tmp_path, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        train_here(recipe(tmp_path, optimizer))


@pytest.fixture(scope="module")
def four():
    with crew_of(4) as crew:
        yield crew


COARSE = {"Muon": 2e-2, "SOAP": 1e-2}
"""Limits in float32: Muon orthogonalises in bfloat16, whose last digit is 4e-3 of a number, and SOAP's eigenvectors of
nearly equal eigenvalues turn with the last digit of their matrix."""
CALM = [kind for kind in CLASSES if kind not in ("Lion", "Lion8bit")]
"""Classes whose update is not the sign of a number, which the last digit of a sum over copies can turn around."""


OF_EACH_KIND = ["AdamW8bit", "SOAP", "Muon"]
"""Small states, matrices beside each number, and two classes in one: for the properties that no class changes."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_EACH_KIND)
def test_clipped_runs_differ_from_one_process_by_the_last_digit_of_the_norm(crew, recipe, place, kind):
    clipped = {"training": {"clip_norm": 0.05}}
    assert train_here(recipe(f"{kind}-clipped-alone", CLASSES[kind], **clipped)) == 6
    assert crew.run(train, recipe(f"{kind}-clipped-two", CLASSES[kind], **clipped)) == [6, 6]
    alone, two = (losses_of(place / f"{kind}-clipped-{name}", "gradient_norm") for name in ("alone", "two"))
    assert two == pytest.approx(alone, rel=1e-5)
    assert min(alone.values()) > 0.05
    assert losses_of(place / f"{kind}-clipped-two") == pytest.approx(
        losses_of(place / f"{kind}-clipped-alone"), rel=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision"), [*((kind, "float64") for kind in CALM), *((kind, "float32") for kind in OF_EACH_KIND)]
)
def test_a_run_in_one_process_goes_on_over_two_stages_of_two_copies(four, recipe, alone, place, kind, precision):
    name, options = f"{kind}-{precision}", {"training": {"precision": precision}}
    one_process = alone(kind)  # in float32
    if precision == "float64":
        one_process = place / f"{name}-one"
        assert train_here(recipe(one_process.name, CLASSES[kind], **options)) == 6
    shutil.copytree(one_process, place / f"{name}-four")
    copies = {"pipeline": {"data_parallel": 2, "microbatches": 2, "encode_chunk": 2}}
    assert four.run(train, recipe(f"{name}-four", CLASSES[kind], **options, **copies), "3") == [6] * 4
    before = sorted((one_process / FOLDER).iterdir())[0]
    start = {key: tensor for key, tensor in tensors_of(before).items() if key.startswith("model.")}
    one, other = weights_of(one_process), weights_of(place / f"{name}-four")
    # Attention does not depend on the bias of keys: its gradient is rounding alone, which becomes a full step.
    start = {key: tensor for key, tensor in start.items() if not key.endswith("to_k.bias")}
    update = sum((one[key] - start[key]).double().square().sum() for key in start) ** 0.5
    apart = sum((one[key] - other[key]).double().square().sum() for key in start) ** 0.5
    assert float(apart / update) < (1e-9 if precision == "float64" else COARSE.get(kind, 1e-3))


def weights_of(folder, prefix="model."):
    return {name: tensor for name, tensor in tensors_of(latest(folder)).items() if name.startswith(prefix)}


def distance_between(found, expected):
    """The norm of the difference, relative to the norm of what is expected."""
    assert found.keys() == expected.keys()
    apart = sum((found[name] - tensor).double().square().sum() for name, tensor in expected.items())
    return float((apart / sum(tensor.double().square().sum() for tensor in expected.values())).sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["averaging", "distance"])
def test_sums_over_two_stages_are_those_of_one_process(crew, recipe, place, kind):
    optimizer = {"averaging": AVERAGING, "distance": DISTANCE}[kind]
    assert train_here(recipe(f"{kind}-alone", optimizer)) == 6
    assert crew.run(train, recipe(f"{kind}-two", optimizer)) == [6, 6]
    assert distance_between(weights_of(place / f"{kind}-two"), weights_of(place / f"{kind}-alone")) < 1e-6
    shutil.copytree(place / f"{kind}-two", place / f"{kind}-again")
    assert crew.run(train, recipe(f"{kind}-again", optimizer), "3") == [6, 6]
    assert_same_bits(place / f"{kind}-again", place / f"{kind}-two")
    shutil.rmtree(place / f"{kind}-again" / FOLDER / "step-00000006")
    assert train_here(recipe(f"{kind}-again", optimizer), "3") == 6
    assert distance_between(weights_of(place / f"{kind}-again"), weights_of(place / f"{kind}-alone")) < 1e-6
    if kind == "distance":
        rates = losses_of(place / "distance-two", "learning_rate_times_d")
        assert rates[1] == 1e-3
        assert rates[6] > 1.1e-3
        assert rates == pytest.approx(losses_of(place / "distance-alone", "learning_rate_times_d"), rel=1e-6)


def test_validation_and_export_of_a_schedule_free_run_read_its_average(recipe, place, tmp_path):
    save_pictures(tmp_path / "held-out", count=4, seed=1)
    own = recipe(
        tmp_path / "run",
        AVERAGING,
        data={"validation": str(tmp_path / "held-out")},
        validation={"every": 3, "samples": 4, "timesteps": (0.5,)},
        checkpoint={"every": 6},
    )
    assert train_here(own) == 6
    found = tensors_of(latest(tmp_path / "run"))
    exported = load_file(tmp_path / "run" / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, weight in exported.items():
        trained, z = (found[f"{kind}.transformer.{name}{end}"] for kind, end in (("model", ""), ("optimizer", ".z")))
        average = (trained - (1 - 0.9) * z) / 0.9  # y = (1 - beta) z + beta x
        assert torch.allclose(weight, average, rtol=1e-4, atol=1e-6), name
    assert any(not torch.equal(weight, found[f"model.transformer.{name}"]) for name, weight in exported.items())
    without = recipe(tmp_path / "without", AVERAGING, checkpoint={"every": 6})
    assert train_here(without, exports=False) == 6  # validation in between changes no bit of the training
    assert_same_bits(tmp_path / "run", tmp_path / "without")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learning_rate": {"schedule": "cosine"}}, "learning_rate.schedule: schedulefree.AdamWScheduleFree replaces"),
        (
            {"training": {"ema_decay": 0.9}},
            "training.ema_decay: schedulefree.AdamWScheduleFree has an average",
        ),
        ({"pipeline": {"versions": "newest"}}, "pipeline.versions: .* each stage steps by itself"),
    ],
)
def test_settings_that_a_schedule_free_optimizer_replaces_are_refused(recipe, tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path, AVERAGING, **sections)
