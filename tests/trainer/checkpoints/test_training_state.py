import pytest
import torch
from torch import nn

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints.checkpoint import resolve, save
from diffusionpipe.trainer.checkpoints.training_state import TrainingState, load_training, training_tensors
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.optimizer import build_optimizer


def fresh(seed, optimizer, arguments, *, ema=True, dtype=torch.float32):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    trainable = {name: parameter for name, parameter in module.named_parameters() if not name.startswith("1.")}
    state = TrainingState(
        model=module.state_dict(),
        trainable=trainable,
        optimizer=build_optimizer(optimizer, trainable, 1e-2, arguments),
        ema=Ema(trainable, dict.fromkeys(trainable, 0.99)) if ema else None,
    )
    return module, state


def train(module, state, steps):
    for step in steps:
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(next(module.parameters()).dtype)
        module(inputs).square().mean().backward()
        state.optimizer.step()
        module.zero_grad()
        state.ema.update(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "arguments"), [("AdamW", {}), ("SGD", {"momentum": 0.9, "dampening": 0.1}), ("Adafactor", {})]
)
def test_three_and_three_steps_are_six_steps_bit_for_bit(tmp_path, optimizer, arguments, dtype):
    straight, straight_state = fresh(0, optimizer, arguments, dtype=dtype)
    train(straight, straight_state, range(6))

    first, first_state = fresh(0, optimizer, arguments, dtype=dtype)
    train(first, first_state, range(3))
    save(tmp_path, 3, training_tensors(first_state), {"step": 3}, keep=1)
    resumed, resumed_state = fresh(1, optimizer, arguments, dtype=dtype)
    assert load_training(resolve(tmp_path, "latest"), resumed_state) == {"step": 3}
    train(resumed, resumed_state, range(3, 6))

    expected, found = training_tensors(straight_state), training_tensors(resumed_state)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_from_before_the_first_step_resumes_with_a_fresh_optimizer(tmp_path):
    module, state = fresh(0, "AdamW", {})
    save(tmp_path, 0, training_tensors(state), {}, keep=1)
    resumed, resumed_state = fresh(1, "AdamW", {})
    load_training(resolve(tmp_path, 0), resumed_state)
    train(module, state, range(2))
    train(resumed, resumed_state, range(2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))


def test_a_state_that_was_used_before_is_replaced_whole(tmp_path):
    module, state = fresh(0, "AdamW", {})
    save(tmp_path, 0, training_tensors(state), {}, keep=1)
    train(module, state, range(2))
    load_training(resolve(tmp_path, 0), state)
    assert not any(name.startswith("optimizer.") for name in training_tensors(state))


def test_one_parameter_of_many_can_be_loaded_as_by_a_rank_with_fewer_layers(tmp_path):
    module, state = fresh(0, "AdamW", {})
    train(module, state, range(2))
    save(tmp_path, 2, training_tensors(state), {}, keep=1)
    alone = {"2.weight": nn.Parameter(torch.zeros(2, 4))}
    part = TrainingState(model=alone, trainable=alone, optimizer=build_optimizer("AdamW", alone, 1e-2, {}), ema=None)
    load_training(resolve(tmp_path, "latest"), part)
    assert torch.equal(alone["2.weight"], module[2].weight)
    assert training_tensors(part)["optimizer.2.weight.step"] == 2


def test_another_optimizer_and_a_missing_average_are_refused(tmp_path):
    module, state = fresh(0, "AdamW", {})
    train(module, state, range(1))
    tensors = {name: tensor for name, tensor in training_tensors(state).items() if not name.startswith("ema.")}
    save(tmp_path, 1, tensors, {}, keep=1)
    path = resolve(tmp_path, 1)
    _, other = fresh(0, "SGD", {"momentum": 0.9}, ema=False)
    with pytest.raises(CheckpointError, match="does not hold the state of SGD"):
        load_training(path, other)
    _, averaged = fresh(0, "AdamW", {})
    with pytest.raises(CheckpointError, match=r"no tensors ema\."):
        load_training(path, averaged)
