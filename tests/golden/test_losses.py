"""Recorded losses are what today's code gets: every bit on the same kind of machine, else float64 to 1e-12."""

import json
from math import nextafter

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.transformers import transformer_flux
from golden.double import in_double
from golden.folders import KINDS, save_model, save_pictures
from golden.losses import differences, is_same, machine
from golden.plans import FOLDER
from golden.recipes import PRECISIONS, STEPS, TRAININGS
from golden.trainings import run_training
from kit.crew import crew_of
from transformers.models.t5.modeling_t5 import T5LayerNorm

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = json.loads((FOLDER / "losses.json").read_text(encoding="utf-8"))
QUICK = "dit-alone"
"""In every run, in float64, which is compared on every machine; it needs no other process."""
CASES = [
    pytest.param(
        name,
        precision,
        id=f"{name}-{precision}",
        marks=() if (name, precision) == (QUICK, "float64") else pytest.mark.slow,
    )
    for name in sorted(TRAININGS, key=lambda name: TRAININGS[name].ranks)
    for precision in PRECISIONS
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models and data, which are those that were recorded with."""
    folder = tmp_path_factory.mktemp("golden")
    found = {kind: save_model(kind, folder / kind) for kind in KINDS} | {"data": save_pictures(folder / "data")}
    assert found == RECORDED["digests"], "the models or the data differ, so losses say nothing: restore folders.py"
    return folder


@pytest.fixture(scope="module")
def crew_of_size():
    """The ranks of a training; at most one crew is there at a time."""
    open_crews = {}

    def ranks(size):
        if size > 1 and size not in open_crews:
            close()
            context = crew_of(size)
            open_crews[size] = context, context.__enter__()
        return open_crews[size][1] if size > 1 else None

    def close():
        for context, _ in open_crews.values():
            context.__exit__(None, None, None)
        open_crews.clear()

    yield ranks
    close()


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_first_losses_of_a_recipe_are_the_recorded_ones(name, precision, place, crew_of_size):
    here = is_same(RECORDED["machine"], machine())
    if precision == "float32" and not here:
        pytest.skip("another kind of machine, where float32 rounds otherwise: only losses in float64 are compared")
    found = run_training(name, precision, place, crew_of_size(TRAININGS[name].ranks))
    recorded = RECORDED["losses"][name][precision]
    assert differences(recorded, found, precision, is_same_machine=here) == []


def losses(name=QUICK, precision="float64"):
    return [float.fromhex(text) for text in RECORDED["losses"][name][precision]]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("step", range(STEPS))
def test_a_loss_that_differs_by_one_bit_is_noticed_on_the_same_machine(precision, step):
    recorded, found = RECORDED["losses"][QUICK][precision], losses(precision=precision)
    assert differences(recorded, found, precision, is_same_machine=True) == []
    found[step] = nextafter(found[step], 2)
    (line,) = differences(recorded, found, precision, is_same_machine=True)
    assert f"step {step + 1}" in line


@pytest.mark.parametrize("step", range(STEPS))
def test_a_loss_that_is_off_by_1e_10_is_noticed_on_another_machine(step):
    recorded, found = RECORDED["losses"][QUICK]["float64"], losses()
    found[step] *= 1 + 1e-10
    assert len(differences(recorded, found, "float64", is_same_machine=False)) == 1
    found[step] = losses()[step] * (1 + 1e-13)
    assert differences(recorded, found, "float64", is_same_machine=False) == []


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_a_missing_loss_and_one_that_is_no_number_are_noticed(is_same_machine):
    recorded = RECORDED["losses"][QUICK]["float64"]
    assert differences(recorded, losses()[:-1], "float64", is_same_machine=is_same_machine)
    assert differences(recorded, [float("nan"), *losses()[1:]], "float64", is_same_machine=is_same_machine)


def test_another_processor_torch_or_number_of_threads_is_another_machine():
    known = RECORDED["machine"]
    assert is_same(known, json.loads(json.dumps(known)))
    for key, value in {"capability": "AVX512", "torch": "1.0", "threads": 64, "features": ["neon"]}.items():
        assert not is_same(known, {**known, key: value})


def test_ten_trainings_are_recorded_in_both_precisions():
    assert len(RECORDED["losses"]) == 10
    assert all(len(found[precision]) == STEPS for found in RECORDED["losses"].values() for precision in PRECISIONS)


def float64_results():
    """Of the functions that tests/golden/double.py widens, and of those that it rounds, for inputs of float64."""
    numbers = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)
    table = (numbers.float().reshape(1, 8),) * 2
    return {
        "sines": embeddings.Timesteps(8, True, 0)(numbers),
        "rotation": transformer_flux.apply_rotary_emb(numbers.reshape(1, 1, 1, 8), table, sequence_dim=1),
        "norm": T5LayerNorm(8).double()(numbers),
    }


def test_what_is_float32_in_a_float64_model_is_float64_within_in_double():
    plain = float64_results()
    with in_double():
        double = float64_results()
    for name, values in double.items():
        assert values.dtype == torch.float64, name
        off = (values - plain[name].double()).abs().max()
        assert 0 < off < 1e-6, f"{name}: {off}; it is not computed in float32, or not patched"
    for name, values in float64_results().items():
        assert torch.equal(values, plain[name]), name


def test_the_times_of_a_flow_stay_float32_within_in_double():
    time = torch.linspace(0.1, 0.9, 9)
    with in_double():
        found = torch.sigmoid(torch.special.ndtri(time))
    assert found.dtype == torch.float32
    between = torch.special.ndtri(time.double()).float().double()
    assert torch.equal(found, torch.sigmoid(between).float())
