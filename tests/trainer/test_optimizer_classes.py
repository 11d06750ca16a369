"""Classes of other packages: found by their paths, restored exactly, and refused with the reason."""

import logging
import sys
import warnings

import pytest
import torch
from torch import nn

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.trainer.checkpoints.checkpoint import resolve, save
from diffusionpipe.trainer.checkpoints.training_state import TrainingState, load_training, training_tensors
from diffusionpipe.trainer.optim.classes import check_arguments, optimizer_class, quiet
from diffusionpipe.trainer.optim.optimizer import build_optimizer, problem_of_step
from diffusionpipe.trainer.optim.undo import Backup

CLASSES = {
    "bitsandbytes.optim.AdamW8bit": "step:int",
    "bitsandbytes.optim.Lion8bit": "absmax1",
    "bitsandbytes.optim.PagedAdamW8bit": "step:int",
    "pytorch_optimizer.Lion": "group.step:int",
    "pytorch_optimizer.CAME": "RMS",
    "pytorch_optimizer.Adan": "group.step:int",
    "pytorch_optimizer.SOAP": "GG[1]",
    "pytorch_optimizer.AdaFactor": "RMS:float",
    "prodigyopt.Prodigy": "group.d:float",
    "schedulefree.AdamWScheduleFree": "group.weight_sum:float",
    "Adafactor": "step",
}
"""Path of a class -> one of the values that it keeps."""
QUICK = ("bitsandbytes.optim.AdamW8bit", "pytorch_optimizer.SOAP", "prodigyopt.Prodigy")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]
SHAPES = {"norm.weight": (10,), "a.weight": (96, 64), "b.weight": (96, 64), "conv.weight": (6, 4, 3, 3)}


def parameters(names=tuple(SHAPES), seed=0):
    made = {}
    for index, name in enumerate(names):
        generator = torch.Generator().manual_seed(100 * seed + index)
        made[name] = nn.Parameter(torch.randn(SHAPES[name], generator=generator))
    return made


def state_of(held, name, **arguments):
    return TrainingState(model=held, trainable=held, optimizer=build_optimizer(name, held, 1e-2, arguments), ema=None)


def train(state, steps):
    for step in steps:
        for index, (name, parameter) in enumerate(state.trainable.items()):
            generator = torch.Generator().manual_seed(1000 * step + len(name) + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.optimizer.step()


@pytest.mark.parametrize("name", ALL)
def test_a_class_goes_on_bit_for_bit_from_its_checkpoint(tmp_path, name):
    straight, first, resumed = (state_of(parameters(seed=seed), name) for seed in (0, 0, 1))
    train(straight, range(6))
    train(first, range(3))
    save(tmp_path, 3, training_tensors(first), {}, keep=1)
    load_training(resolve(tmp_path, "latest"), resumed)
    train(resumed, range(3, 6))
    assert all(torch.equal(p, straight.trainable[key]) for key, p in resumed.trainable.items())
    held, expected = training_tensors(resumed), training_tensors(straight)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ALL)
def test_a_value_that_is_deleted_from_a_checkpoint_is_missed(tmp_path, name):
    state = state_of(parameters(), name)
    train(state, range(2))
    tensors, value = training_tensors(state), CLASSES[name]
    key = f"optimizer_group..{value[6:]}" if value.startswith("group.") else f"optimizer.a.weight.{value}"
    del tensors[key]
    save(tmp_path, 2, tensors, {}, keep=1)
    with pytest.raises(CheckpointError, match=r"does not hold the state|lacks"):
        load_training(resolve(tmp_path, "latest"), state_of(parameters(seed=1), name))


def test_the_code_tables_of_8_bit_states_are_one_storage_after_resuming_too(tmp_path):
    state = state_of(parameters(), "bitsandbytes.optim.AdamW8bit")
    train(state, range(1))
    save(tmp_path, 1, training_tensors(state), {}, keep=1)
    resumed = state_of(parameters(seed=1), "bitsandbytes.optim.AdamW8bit")
    load_training(resolve(tmp_path, "latest"), resumed)
    for held in (state, resumed):
        maps = [held.optimizer.state_of(held.trainable[name])["qmap1"] for name in ("a.weight", "b.weight")]
        assert maps[0].data_ptr() == maps[1].data_ptr()


def test_a_rank_with_some_of_the_parameters_reads_its_own_state(tmp_path):
    state = state_of(parameters(), "bitsandbytes.optim.AdamW8bit")
    train(state, range(2))
    save(tmp_path, 2, training_tensors(state), {}, keep=1)
    part = state_of(parameters(("b.weight",), seed=1), "bitsandbytes.optim.AdamW8bit")
    load_training(resolve(tmp_path, "latest"), part)
    own, whole = (held.optimizer.state_of(held.trainable["b.weight"]) for held in (part, state))
    assert own["step"] == 2
    assert torch.equal(own["state1"], whole["state1"])


def test_numbers_below_the_threshold_of_8_bits_may_be_stored_under_other_keys_than_large_ones(tmp_path):
    state = state_of(parameters(), "bitsandbytes.optim.AdamW8bit")
    train(state, range(1))
    keys = {name: set(state.optimizer.state_of(parameter)) for name, parameter in state.trainable.items()}
    assert keys["a.weight"] - keys["norm.weight"] == {"qmap1", "qmap2", "absmax1", "absmax2"}
    save(tmp_path, 1, training_tensors(state), {}, keep=1)
    load_training(resolve(tmp_path, "latest"), state_of(parameters(seed=1), "bitsandbytes.optim.AdamW8bit"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bitsandbytes.optim.AdamW8bits", "did you mean bitsandbytes.optim.AdamW8bit?"),
        ("torchao.optim.AdamW8bit", "tensors of its own classes"),
        ("no_such_package.Adam", "cannot be imported: No module named 'no_such_package'; install its package"),
        ("torch.optim.LBFGS", "several times"),
        ("pytorch_optimizer.load_optimizer", "has no optimizer load_optimizer"),
        ("a..b", "not the path of a class"),
    ],
)
def test_a_path_without_a_usable_class_is_refused(name, message):
    with pytest.raises(RecipeError, match=message):
        optimizer_class(name)


def test_a_missing_package_of_the_extra_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(RecipeError, match=r"schedulefree is not installed; run pip install 'diffusionpipe\[optim"):
        optimizer_class("schedulefree.AdamWScheduleFree")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "pytorch_optimizer.ScalableShampoo",
            {},
            "keeps an object of the class pytorch_optimizer.optimizer.utils.preconditioner.PreConditioner under 'pre_",
        ),
        ("pytorch_optimizer.AliG", {}, "it wants a closure"),
    ],
)
def test_a_class_that_cannot_be_stepped_or_saved_is_refused_by_a_trial(name, arguments, message):
    problem = problem_of_step(name, 2, arguments, "cpu")
    assert problem is not None
    assert message in problem


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("pytorch_optimizer.SAM", {}, "evaluates the loss of the batch twice (a closure)"),
        ("pytorch_optimizer.SAM", {"rho": 0.1}, "evaluates the loss of the batch twice (a closure)"),
        ("pytorch_optimizer.LOMO", {}, "takes model in place of parameters"),
        ("pytorch_optimizer.GSAM", {}, "takes a whole model, of which each rank has a part"),
        ("pytorch_optimizer.Ranger21", {}, "it needs num_iterations"),
        ("AdamW", {"beta": 1}, "beta is unknown; did you mean betas? (options: betas, eps, weight_decay,"),
        ("AdamW", {"betas": 1}, "(betas=1): betas (by default [0.9, 0.999]) is of a wrong kind"),
        ("AdamW", {"eps": -1.0}, "refuses its arguments (eps=-1.0): Invalid epsilon value"),
    ],
)
def test_a_refusal_names_the_argument_or_the_reason_and_nothing_of_python(name, arguments, message):
    with pytest.raises(RecipeError) as caught:
        build_optimizer(name, parameters(), 1e-3, arguments)
    assert message in str(caught.value)
    assert not any(word in str(caught.value) for word in ("__init__", "fused=True", "fused = True", "subscriptable"))


class _OfOptions(torch.optim.SGD):
    def __init__(self, params, momentum=0.0, **options):
        super().__init__(params, momentum=momentum, **options)


class _OfArguments(torch.optim.SGD):
    def __init__(self, params, kwargs, lr=1e-3):
        super().__init__(params, lr)


def test_what_takes_further_arguments_is_seen_by_its_kind_and_not_by_its_name():
    check_arguments("it", _OfOptions, {"momentum": 0.9})
    with pytest.raises(RecipeError, match=r"moment is unknown; did you mean momentum\? \(options: momentum\)"):
        check_arguments("it", _OfOptions, {"moment": 0.9})
    with pytest.raises(RecipeError, match="it needs kwargs; add them"):
        check_arguments("it", _OfArguments, {})


@pytest.mark.parametrize("name", ["pytorch_optimizer.SOAP", "prodigyopt.Prodigy"])
def test_a_step_is_taken_back_with_lists_numbers_and_groups(name):
    state = state_of(parameters(), name)
    held = list(state.trainable.values())
    train(state, range(3))
    backup = Backup(held, state.optimizer)
    backup.keep()
    before = {key: tensor.clone() for key, tensor in training_tensors(state).items()}
    train(state, range(3, 5))
    assert any(not torch.equal(tensor, before[key]) for key, tensor in training_tensors(state).items())
    backup.restore()
    after = training_tensors(state)
    assert after.keys() == before.keys()
    assert [key for key in before if not torch.equal(after[key], before[key])] == []


def test_threads_that_try_optimizers_at_once_leave_the_process_as_it_was(capsys, caplog):
    """In any order: a thread that enters first may leave first."""
    before, first, second = sys.stdout, quiet(), quiet()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        sys.stdout.write("hidden")
        logging.getLogger("a.library").warning("hidden")
        warnings.warn("hidden", stacklevel=1)
        second.__exit__(None, None, None)
        assert sys.stdout is before
        sys.stdout.write("shown")
        logging.getLogger("a.library").warning("shown")
        warnings.warn("shown", stacklevel=1)
    assert capsys.readouterr().out == "shown"
    assert caplog.messages == ["shown"]
    assert [str(one.message) for one in found] == ["shown"]
