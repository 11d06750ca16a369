"""lora.start: a run goes on from adapters of other programs, where diffusers or peft would be with them."""

import logging

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from kit.tiers import quick_and_slow
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train, train_here
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names import Adapter
from diffusionpipe.models.parameters.lora_start import resized
from diffusionpipe.planner.unequal.cutting import cutting_of
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.setup.planning import Planning
from diffusionpipe.trainer.setup.session import open_session
from diffusionpipe.workflows.training.run_plan import make_plan

pytestmark = pytest.mark.usefixtures("one_thread")
TARGETS = {"unet": ["to_q", "to_k", "to_v", "to_out.0"], "text_encoder": ["q_proj", "k_proj", "v_proj", "out_proj"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("started")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=8)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of one step of adapters of rank 2 on denoiser and text encoder."""

    def make(name, kind="sd", **sections):
        base = {
            "model": {"train": ("unet", "text_encoder")},
            "lora": {"rank": 2, "alpha": 5.0},
            "training": {"steps": 1, "ema_decay": "none"},
            "data": {"caption_dropout": 0.0},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


@pytest.fixture(scope="module")
def first_loss(place):
    """The loss of the first step that the whole model has, which is read from a folder."""

    def find(pipeline, name, kind="sd"):
        pipeline.save_pretrained(place / name)
        made = recipe_of(
            place / name,
            place / "data",
            place / f"{name}-run",
            training={"steps": 1, "ema_decay": "none"},
            data={"caption_dropout": 0.0},
        )
        assert train_here(made) == 1
        return losses_of(made.run.folder)[1]

    return find


def randomise(module, seed):
    """Gives adapters random values, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def adapted(pipeline, rank=2, components=("unet", "text_encoder"), **settings):
    """Random adapters of peft on a pipeline; returns the states of the components and their settings."""
    states, configs = {}, {}
    for seed, name in enumerate(components):
        module = getattr(pipeline, name)
        config = LoraConfig(r=rank, target_modules=TARGETS[name], **{"lora_alpha": rank} | settings)
        module.add_adapter(config, "mine")
        randomise(module, seed)
        states[name] = get_peft_model_state_dict(module, adapter_name="mine")
        configs[name] = config.to_dict()
    return states, configs


def sd(place):
    return diffusers.StableDiffusionPipeline.from_pretrained(place / "sd", safety_checker=None)


def by_diffusers(place, file):
    """The pipeline with the adapters in its weights, as diffusers reads them."""
    pipeline = sd(place)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    return pipeline


def save_diffusers(place, folder, **settings):
    states, configs = adapted(sd(place), **settings)
    # transformers' reader of encoders finds no norms without this end, which peft leaves out.
    states["text_encoder"] = {
        f"{key}.weight" if key.endswith("magnitude_vector") else key: t for key, t in states["text_encoder"].items()
    }
    configs = {name: {k: v for k, v in config.items() if v is not None} for name, config in configs.items()}
    sd(place).save_lora_weights(
        folder,
        unet_lora_layers=states["unet"],
        text_encoder_lora_layers=states["text_encoder"],
        unet_lora_adapter_metadata=configs["unet"],
        text_encoder_lora_adapter_metadata=configs["text_encoder"],
    )
    return folder / "pytorch_lora_weights.safetensors"


def save_kohya(place, folder):
    """By diffusers' own writer; the alphas are not the rank, but all the same, else its reader overlooks some."""
    states, _ = adapted(sd(place))
    tensors = {f"{name}.{key}": t for name, state in states.items() for key, t in state.items()}
    tensors = {key.replace("text_encoder.", "text_encoder.text_model.", 1): t for key, t in tensors.items()}
    written = {key: t.contiguous() for key, t in convert_state_dict_to_kohya(tensors).items()}
    for key in (key for key in written if key.endswith(".alpha")):
        written[key] = torch.tensor(3.0)
    folder.mkdir(parents=True)
    save_file(written, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


def save_peft(place, folder):
    """By peft's own writer, a folder for each component."""
    pipeline = sd(place)
    for seed, (name, targets) in enumerate(TARGETS.items()):
        config = LoraConfig(r=2, lora_alpha=3, target_modules=targets, alpha_pattern={"to_k": 7}, use_rslora=True)
        module = get_peft_model(getattr(pipeline, name), config)
        randomise(module, seed)
        module.save_pretrained(folder / name)
    return folder


def by_peft(place, folder):
    """The pipeline with the adapters in its weights, as peft reads them."""
    pipeline = sd(place)
    for name in TARGETS:
        module = PeftModel.from_pretrained(getattr(pipeline, name), folder / name).merge_and_unload()
        setattr(pipeline, name, module)
    return pipeline


FORMATS = {
    "diffusers": lambda place, folder: save_diffusers(place, folder, lora_alpha=3.0),
    "diffusers, stabilised": lambda place, folder: save_diffusers(place, folder, lora_alpha=3.0, use_rslora=True),
    "kohya": save_kohya,
    "peft": save_peft,
    "DoRA": lambda place, folder: save_diffusers(place, folder, use_dora=True),
}


@pytest.mark.parametrize("kind", quick_and_slow(FORMATS, quick=["kohya"]))
def test_the_first_loss_is_that_of_the_model_with_the_adapters_loaded_by_diffusers(kind, place, recipe, first_loss):
    file = FORMATS[kind](place, place / f"file-{kind}")
    loaded = by_peft(place, file) if kind == "peft" else by_diffusers(place, file)
    expected = first_loss(loaded, f"fused-{kind}")
    made = recipe(f"started-{kind}", lora={"start": str(file), "dora": kind == "DoRA"})
    assert train_here(made, saves=False) == 1
    assert losses_of(made.run.folder)[1] == pytest.approx(expected, rel=1e-6)
    unstarted = recipe(f"plain-{kind}")
    assert train_here(unstarted, saves=False) == 1
    assert losses_of(unstarted.run.folder)[1] != pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def of_rank_3(place):
    return save_diffusers(place, place / "rank-3", rank=3)


@pytest.mark.slow
@pytest.mark.parametrize(("dora", "rank"), [(False, 5), (True, 3)])
def test_more_ranks_and_norms_beside_plain_adapters_change_no_product(dora, rank, of_rank_3, place, recipe, first_loss):
    expected = first_loss(by_diffusers(place, of_rank_3), f"fused-{rank}")
    lora = {"start": str(of_rank_3), "rank": rank, "resize": rank != 3, "dora": dora}
    made = recipe(f"started-{rank}", lora=lora)
    assert train_here(made) == 1
    assert losses_of(made.run.folder)[1] == pytest.approx(expected, rel=1e-6)


def test_adapters_of_a_higher_rank_are_cut_to_the_nearest_product_and_the_loss_is_said(of_rank_3, recipe, caplog):
    made = recipe("cut", lora={"start": str(of_rank_3), "resize": True, "alpha": 4.0})
    with caplog.at_level(logging.WARNING), joined(membership({}), device="cpu") as job:
        session = open_session(made, job, Planning(make_plan=make_plan, make_cutting=cutting_of))
        found = {name: parameter.detach().double().numpy() for name, parameter in session.worker.parameters.items()}
    stored = {name: tensor.double().numpy() for name, tensor in load_file(of_rank_3).items()}
    lost = total = 0.0
    downs = [name for name in found if ".lora_A." in name]
    for name in downs:
        layer = name.partition(".lora_A.")[0]
        old = next(key for key in stored if key.startswith(f"{layer}.lora_A"))
        whole = stored[old.replace("lora_A", "lora_B")] @ stored[old]
        cut = 2 * found[name.replace("lora_A", "lora_B")] @ found[name]
        values = np.linalg.svd(whole, compute_uv=False)
        assert found[name].shape[0] == 2
        assert np.linalg.norm(whole - cut) == pytest.approx(np.linalg.norm(values[2:]), rel=1e-5)
        lost, total = lost + (values[2:] ** 2).sum(), total + (values**2).sum()
    assert len(downs) == len(stored) / 2
    assert f"took {(lost / total) ** 0.5:.2%} of the norm" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_in_16_bits_are_cut_without_another_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((4, 9), (8, 4)))
    found, _, _ = resized(Adapter(down=down, up=up), 2)
    left, values, right = np.linalg.svd(up.double().numpy() @ down.double().numpy())
    nearest = left[:, :2] * values[:2] @ right[:2]
    assert np.abs((found.up.double() @ found.down.double()).numpy() - nearest).max() < 1e-6 * np.abs(nearest).max()


class NeverMeasured:
    """Profiles of a run that ends before any layer is measured."""

    def find(self, measurement):
        raise AssertionError("a layer would have been measured")


def another_base(place, folder):
    """Adapters of the text encoder of a wider model."""
    file = save_kohya(place, folder)
    tensors = {name: torch.cat([t, t], 1) if name.endswith("q_proj.lora_down.weight") else t
               for name, t in load_file(file).items()}  # fmt: skip
    save_file(tensors, file)
    return file


def deeper(place, folder):
    """Adapters of a deeper model."""
    file = save_kohya(place, folder)
    tensors = load_file(file)
    save_file({**tensors, **{n.replace("layers_1", "layers_7"): t.clone() for n, t in tensors.items()}}, file)
    return file


def nothing(place, folder):
    return folder / "nowhere"


def ruined(place, folder):
    file = save_kohya(place, folder)
    tensors = load_file(file)
    tensors[next(name for name in tensors if name.endswith("lora_down.weight"))][:] = float("nan")
    save_file(tensors, file)
    return file


def cut_short(place, folder):
    file = save_kohya(place, folder)
    file.write_bytes(file.read_bytes()[:100])
    return file


def of_another_kind(place, folder):
    file = save_kohya(place, folder)
    save_file({name.replace(".lora_down.weight", ".hada_w1_a"): t for name, t in load_file(file).items()}, file)
    return file


def of_other_layers(place, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "unet", [*TARGETS["unet"], "ff.net.2"])
        return save_diffusers(place, folder)


@pytest.mark.parametrize(
    ("save", "sections", "message"),
    [
        (nothing, {}, "there is no file or folder .*nowhere; give a file of adapters"),
        (
            another_base,
            {},
            r"does not fit the model: 2 of 40 adapters .*q_proj \(8, 16\), here \(8, 8\), .*trained ",
        ),
        (
            deeper,
            {},
            r"names are of no layer of StableDiffusionPipeline .*layers_7.* and \d+ more; was it trained from",
        ),
        (save_kohya, {"lora": {"rank": 4}}, r"have another rank \(.*: 2, here 4\); set lora.rank = 2, or lora.resize"),
        (
            save_kohya,
            {"model": {"train": ("unet",)}},
            "has adapters of text_encoder, for which this run trains none; add them to",
        ),
        (
            of_other_layers,
            {},
            r"adapters of \d+ layers that have none here \(unet.*ff.net.2, .*name them in lora.target",
        ),
        (ruined, {}, r"lora.start: 1 of \d+ tensors of .* hold numbers that are not finite \(lora_.*give another"),
        (cut_short, {}, "lora.start: .*cannot be read as adapters .*get them again, as .safetensors"),
        (of_another_kind, {}, r"it holds adapters of LoHa \(.*hada_w1_a\); only adapters of two matrices"),
        (FORMATS["DoRA"], {}, "holds adapters of DoRA; set lora.dora = true"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_measured(save, sections, message, place, recipe):
    file = save(place, place / f"refused-{save.__name__}-{len(message)}")
    own = {**sections, "lora": {"start": str(file), **sections.get("lora", {})}}
    made = recipe("refused", pipeline={"plan": "auto", "microbatches": "none", "encode_chunk": "none"}, **own)
    with pytest.raises(ModelError, match=message) as error:
        train_here(made, profiles=NeverMeasured())
    assert str(error.value).count("\n") <= 2
    assert not made.run.folder.joinpath("metrics.jsonl").exists()


@pytest.mark.slow
def test_two_ranks_start_and_go_on_as_one_process(of_rank_3, recipe, crew):
    sections = {
        "lora": {"start": str(of_rank_3), "rank": 3},
        "training": {"steps": 2, "precision": "float64"},
        "optimizer": {"name": "SGD"},
        "checkpoint": {"every": 1, "keep": 3},
    }
    one, two, again = (recipe(f"ranks-{name}", **sections) for name in ("one", "two", "again"))
    assert train_here(one) == 2
    assert crew.run(train, two) == [2, 2]
    assert losses_of(two.run.folder) == pytest.approx(losses_of(one.run.folder), rel=1e-12)
    of_rank_3.rename(of_rank_3.with_name("moved"))  # a checkpoint has the adapters
    assert train_here(again, str(two.run.folder / "checkpoints" / "step-00000001")) == 2
    of_rank_3.with_name("moved").rename(of_rank_3)
    expected = tensors_of(latest(one.run.folder))
    found = tensors_of(latest(again.run.folder))
    assert all(torch.allclose(found[name], tensor, rtol=1e-10) for name, tensor in expected.items())


@pytest.mark.slow
def test_both_encoders_of_sdxl_start_from_a_file_of_kohya(place, recipe, first_loss):
    pipeline = PIPELINES["sdxl"]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(place / "sdxl")
    components = ("unet", "text_encoder", "text_encoder_2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "text_encoder_2", TARGETS["text_encoder"])
        states, _ = adapted(pipeline, components=components)
    tensors = {f"{name}.{key}": t for name, state in states.items() for key, t in state.items()}
    tensors = {key.replace("text_encoder.", "text_encoder.text_model.", 1): t for key, t in tensors.items()}
    file = place / "sdxl.safetensors"
    save_file({key: t.contiguous() for key, t in convert_state_dict_to_kohya(tensors).items()}, file)
    loaded = diffusers.StableDiffusionXLPipeline.from_pretrained(place / "sdxl")
    loaded.load_lora_weights(place, weight_name=file.name)
    loaded.fuse_lora()
    loaded.unload_lora_weights()
    expected = first_loss(loaded, "fused-sdxl", "sdxl")
    made = recipe("started-sdxl", kind="sdxl", model={"train": components}, lora={"start": str(file)})
    assert train_here(made) == 1
    assert losses_of(made.run.folder)[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_a_run_continues_from_its_file_for_comfyui_as_from_the_one_for_diffusers(kind, place, recipe):
    """Joined q, k, v and all encoders, T5 too; diffusers does not read these files of SD3, nor of a narrow FLUX.1."""
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(place / kind)
    t5 = "text_encoder_3" if kind == "sd3" else "text_encoder_2"
    model = {"train": ("transformer", *sorted({"text_encoder", "text_encoder_2", t5}))}
    lora = {"formats": ("diffusers", "comfy"), "rank_pattern": {"to_q": 1, "q": 3}}
    first = recipe(f"first-{kind}", kind=kind, model=model, lora=lora, training={"steps": 2})
    assert train_here(first) == 2
    export = first.run.folder / "export"
    (comfy,) = set(export.glob("*.safetensors")) - {export / "pytorch_lora_weights.safetensors"}
    assert any(name.startswith("lora_te3_encoder_block_0_") for name in load_file(comfy))
    losses = []
    for file in (export / "pytorch_lora_weights.safetensors", comfy):
        made = recipe(f"next-{kind}-{file.stem}", kind=kind, model=model, lora=lora | {"start": str(file)})
        assert train_here(made) == 1
        losses.append(losses_of(made.run.folder)[1])
    unstarted = recipe(f"unstarted-{kind}", kind=kind, model=model, lora=lora)
    assert train_here(unstarted) == 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0] != pytest.approx(losses_of(unstarted.run.folder)[1], rel=1e-4)
