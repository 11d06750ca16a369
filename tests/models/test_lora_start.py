"""Files that adapters start from: which file a folder means, its scales, and other ranks."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names import Adapter
from diffusionpipe.models.parameters.lora_read import adapter_file, read_adapters
from diffusionpipe.models.parameters.lora_start import resized

TENSORS = {"unet.mid.to_q.lora_A.weight": torch.ones(2, 3)}


def _save(path, **header):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, path, metadata=header or None)
    return path


def test_a_folder_means_the_file_of_diffusers_or_of_peft_in_it_or_in_the_export_of_a_run(tmp_path):
    alone = _save(tmp_path / "alone" / "any-name.safetensors")
    assert adapter_file(alone) == adapter_file(alone.parent) == alone
    peft = _save(tmp_path / "peft" / "adapter_model.safetensors")
    _save(tmp_path / "peft" / "other.safetensors")
    assert adapter_file(peft.parent) == peft
    of_run = _save(tmp_path / "run" / "export" / "pytorch_lora_weights.safetensors")
    assert adapter_file(tmp_path / "run") == of_run
    _save(tmp_path / "alone" / "second.safetensors")
    with pytest.raises(ModelError, match=r"any-name.safetensors, second.safetensors.; give the file itself"):
        adapter_file(alone.parent)
    with pytest.raises(ModelError, match=r"there is no file or folder .*nowhere; give a file of adapters"):
        adapter_file(tmp_path / "nowhere")


def test_a_scale_is_that_of_the_header_or_of_the_configuration_beside_the_file(tmp_path):
    assert read_adapters(_save(tmp_path / "plain.safetensors")).scale("unet", "mid.to_q", 2) == 1.0
    settings = {"unet.lora_alpha": 6, "unet.alpha_pattern": {"mid.to_k": 8}, "text_encoder.lora_alpha": 1}
    stored = read_adapters(_save(tmp_path / "header.safetensors", lora_adapter_metadata=json.dumps(settings)))
    assert [stored.scale("unet", layer, 2) for layer in ("mid.to_q", "mid.to_k", "other.mid.to_k")] == [3.0, 4.0, 4.0]
    assert stored.scale("text_encoder", "mid.to_k", 2) == 0.5
    config = tmp_path / "peft" / "adapter_config.json"
    file = _save(config.with_name("adapter_model.safetensors"))
    config.write_text(json.dumps({"lora_alpha": 6, "use_rslora": True}))
    assert read_adapters(file).scale("unet", "mid.to_q", 4) == 3.0
    config.write_text("[")
    with pytest.raises(ModelError, match=r"the settings of .*adapter_model.safetensors cannot be read"):
        read_adapters(file)


@pytest.mark.parametrize("kernel", [(), (3, 2)])
def test_a_smaller_rank_is_the_best_there_is(kernel):
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(4, 6, *kernel, generator=generator)
    up = torch.randn(5, 4, *([1] * len(kernel)), generator=generator)
    found, lost, total = resized(Adapter(down=down, up=up, scale=0.5), 2)
    assert found.scale == 0.5
    assert (found.down.shape, found.up.shape) == ((2, *down.shape[1:]), (5, 2, *up.shape[2:]))
    whole, cut = (
        0.5 * one.up.flatten(1).numpy() @ one.down.flatten(1).numpy() for one in (Adapter(down=down, up=up), found)
    )
    values = np.linalg.svd(whole.astype(np.float64), compute_uv=False)
    assert np.square(whole - cut).sum() == pytest.approx(np.square(values[2:]).sum(), rel=1e-5)
    assert lost == pytest.approx(np.square(values[2:]).sum(), rel=1e-5)
    assert total == pytest.approx(np.square(values).sum(), rel=1e-5)
