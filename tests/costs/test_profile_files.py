import json
import subprocess
import sys
from dataclasses import replace

import pytest

from diffusionpipe.costs import (
    AllReduce,
    Backbone,
    LayerProfile,
    LayerSpec,
    Link,
    ModelGraph,
    ParameterSpec,
    Profile,
    TensorSpec,
)
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import check_device, check_model, profile_from_text, profile_to_text, read_profile
from diffusionpipe.errors import FileFormatError

MODEL = ModelGraph(
    layers=(
        LayerSpec(name="encode", component="vae", reads=("pixels",), writes=("latents",), parameters=("vae.w",)),
        LayerSpec(name="first", component="unet", reads=("latents",), writes=("hidden",), parameters=("unet.w",)),
        LayerSpec(name="loss", component="objective", reads=("hidden",), writes=("loss",)),
    ),
    tensors=(
        TensorSpec(name="pixels", shape=(3,)),
        TensorSpec(name="latents", shape=(2,)),
        TensorSpec(name="hidden", shape=(2,), needs_gradient=True),
        TensorSpec(name="loss", shape=(), needs_gradient=True),
    ),
    parameters=(
        ParameterSpec(name="vae.w", shape=(3, 2), is_trainable=False),
        ParameterSpec(name="unet.w", shape=(2, 2)),
    ),
    inputs=("pixels",),
    backbones=(Backbone(prediction="hidden"),),
)
TIMES = {
    "encode": ((1e-3, 2e-3), (0.0, 0.0), (0.0, 0.0)),
    "first": ((1e-3, 2e-3), (0.0, 0.0), (2e-3, 3e-3)),
    "loss": ((1e-5, 1e-5), (2e-5, 2e-5), (0.0, 0.0)),
}
PROFILE = Profile(
    graph=MODEL,
    batch_sizes=(1, 4),
    layers=tuple(
        LayerProfile(name=n, forward=f, input_grad=i, weight_grad=w, activation=(8, 32), workspace=(0, 0))
        for n, (f, i, w) in TIMES.items()
    ),
    device="NVIDIA A100-SXM4-80GB",
    device_type="cuda",
    precision="bfloat16",
    source="analytic",
    versions=(("torch", "2.13"), ("diffusers", "0.42")),
)


def test_a_profile_is_read_as_it_was_written():
    assert profile_from_text(profile_to_text(PROFILE)) == PROFILE


def test_links_and_update_are_kept_and_a_file_without_them_is_read():
    known = replace(
        PROFILE,
        link=Link(1e-4, 2e9, 5e-5, 2e-10),
        reduce=AllReduce(latency=3e-4, bandwidth=1e9),
        update=3e-9,
    )
    text = profile_to_text(known)
    assert profile_from_text(text) == known
    data = json.loads(text)
    for name in ("link", "reduce", "update"):
        del data[name]
    assert profile_from_text(json.dumps(data)) == PROFILE


def with_forward_only(*times):
    return replace(
        PROFILE, layers=(PROFILE.layers[0], replace(PROFILE.layers[1], forward_only=times), PROFILE.layers[2])
    )


def test_forwards_without_gradients_are_kept_and_a_file_without_them_takes_those_with_gradients():
    known = with_forward_only(5e-4, 1e-3)
    text = profile_to_text(known)
    assert profile_from_text(text) == known
    assert (known.forward_only("first", 1), known.forward_only("encode", 1)) == (5e-4, 1e-3)
    data = json.loads(text)
    for layer in data["layers"]:
        del layer["forward_only"]
    old = profile_from_text(json.dumps(data))
    assert old == PROFILE
    assert [old.forward_only("first", batch) for batch in (1, 3, 8)] == [old.forward("first", b) for b in (1, 3, 8)]


def test_forwards_without_gradients_that_take_no_time_or_lack_a_size_are_refused():
    with pytest.raises(FileFormatError, match="first: forward_only is 0 for 4 samples"):
        profile_from_text(profile_to_text(with_forward_only(1e-3, 0.0)))
    with pytest.raises(ValueError, match="first: forward_only has 1 entries for 2 sizes"):
        with_forward_only(1e-3)


def test_casts_are_kept_and_a_file_without_them_counts_them_in_the_forwards():
    known = replace(PROFILE, layers=(*PROFILE.layers[:2], replace(PROFILE.layers[2], cast=2e-4, copies=8)))
    text = profile_to_text(known)
    assert profile_from_text(text) == known
    data = json.loads(text)
    for layer in data["layers"]:
        del layer["cast"], layer["copies"]
    assert profile_from_text(json.dumps(data)) == PROFILE


@pytest.mark.parametrize(
    ("layer", "field", "value", "words"),
    [
        (1, "forward", [0.0, 1e-3], ("first", "forward", "1 samples", "positive")),
        (1, "forward", [0.0, 0.0], ("first", "forward time is 0")),
        (1, "weight_grad", [1e-3, 0.0], ("first", "weight_grad", "4 samples")),
        (2, "input_grad", [0.0, 1e-3], ("loss", "input_grad")),
        (0, "forward", [-1e-3, 1e-3], ("encode", "forward", "negative")),
        (0, "forward", [1e-3], ("encode", "forward", "1 entries for 2")),
        (0, "forward", [1e-3, None], ("layers[0].forward[1]", "finite number")),
        (0, "workspace", [-1, 0], ("encode", "workspace", "negative")),
        (1, "cast", -1e-3, ("first", "cast", "negative")),
        (2, "forward", ..., ("layers[2].forward", "is missing")),
    ],
)
def test_a_wrong_or_missing_cost_is_refused_with_layer_and_field(layer, field, value, words):
    data = json.loads(profile_to_text(PROFILE))
    if value is ...:
        del data["layers"][layer][field]
    else:
        data["layers"][layer][field] = value
    with pytest.raises(FileFormatError) as caught:
        profile_from_text(json.dumps(data), source="mine.json")
    assert all(word in str(caught.value) for word in ("mine.json", *words))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda graph: graph["tensors"].pop(1), ("encode", "there is no tensor latents")),
        (lambda graph: graph["parameters"].pop(0), ("encode", "there is no parameter vae.w")),
        (lambda graph: graph["tensors"].append(graph["tensors"][0]), ("tensor pixels occurs 2 times",)),
        (lambda graph: graph["tensors"][0].update(dtype="float8"), ("pixels", "dtype is 'float8'")),
        (lambda graph: graph["parameters"][0].update(dtype="fp4"), ("vae.w", "bool, float8, int8, nf4")),
        (lambda graph: graph["tensors"][0].update(shape=[-3]), ("pixels", "negative side")),
        (lambda graph: graph.update(inputs=["pixels", "sound"]), ("graph.inputs: there is no tensor sound",)),
        (lambda graph: graph["backbones"][0].update(loss="profit"), ("graph.backbones: there is no tensor profit",)),
        (lambda graph: graph["layers"][0].update(reads=["hidden"]), ("encode reads hidden, which no layer before it",)),
        (lambda graph: graph["tensors"][0].update(shape=[10**400]), ("tensors[0].shape[0]", "below 2^62")),
        (lambda graph: graph["layers"][0].update(flops=-(10**5000)), ("not valid JSON",)),
    ],
    ids=range(11),
)
def test_a_model_that_does_not_fit_together_is_refused_with_the_name(change, words):
    data = json.loads(profile_to_text(PROFILE))
    change(data["graph"])
    sys.set_int_max_str_digits(0)
    try:
        text = json.dumps(data)
    finally:
        sys.set_int_max_str_digits(4300)
    with pytest.raises(FileFormatError) as caught:
        profile_from_text(text, source="mine.json")
    assert all(word in str(caught.value) for word in ("mine.json", *words))


def test_zero_gradients_are_accepted_where_no_gradient_is_needed():
    assert profile_from_text(profile_to_text(PROFILE)).layer("encode").weight_grad == (0.0, 0.0)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileFormatError, match=r"none\.json"):
        read_profile(tmp_path / "none.json")


OTHERS = {
    "another layer": (replace(MODEL, layers=MODEL.layers[:-1]), "2.*loss"),
    "another shape": (
        replace(MODEL, tensors=(replace(MODEL.tensors[0], shape=(5,)), *MODEL.tensors[1:])),
        "tensor pixels",
    ),
    "trained otherwise": (
        replace(MODEL, parameters=(MODEL.parameters[0], replace(MODEL.parameters[1], is_trainable=False))),
        r"parameter unet\.w",
    ),
    "another prediction": (replace(MODEL, backbones=(Backbone(prediction=None),)), "inputs or outputs"),
}


@pytest.mark.parametrize(("other", "words"), OTHERS.values(), ids=OTHERS)
def test_a_profile_of_another_model_is_refused_with_the_first_difference(other, words):
    check_model(PROFILE, MODEL, source="p")
    with pytest.raises(FileFormatError, match=words):
        check_model(PROFILE, other, source="p")


def test_a_profile_of_a_device_that_the_cluster_has_not_is_refused():
    check_device(PROFILE, load_cluster("a100-80x8"), source="p")
    with pytest.raises(FileFormatError, match=r"A100-SXM4-80GB.*H100"):
        check_device(PROFILE, load_cluster("h100x8"), source="p")


def test_any_cpu_profile_fits_the_cluster_of_cpus():
    check_device(replace(PROFILE, device="some CPU", device_type="cpu"), load_cluster("cpux2"), source="p")
    with pytest.raises(FileFormatError):
        check_device(PROFILE, load_cluster("cpux2"), source="p")


def test_reading_a_profile_imports_no_torch(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile_to_text(PROFILE), encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from diffusionpipe.costs.files import read_profile; "
        "from diffusionpipe.costs.clusters import load_cluster; load_cluster('a100-80x8:2'); "
        f"read_profile(Path({str(path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
