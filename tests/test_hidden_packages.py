"""Packages that diffusers and peft would import stay out of a process, until somebody who needs them asks."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from diffusionpipe import cli, hidden_packages
from diffusionpipe.hidden_packages import hidden, reveal

SCRIPT = """
import sys
from diffusionpipe.hidden_packages import hidden
with hidden():
    import diffusers.models.modeling_utils, peft, torch
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=8
    )
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))
    print(any(name.startswith("bitsandbytes.") for name in sys.modules))
    from diffusionpipe.trainer.optim.classes import optimizer_class
    print(optimizer_class("bitsandbytes.optim.AdamW8bit").__name__)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "wanted_by_others.py").write_text("answer = 42\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hidden_packages, "PACKAGES", ("wanted_by_others",))
    yield "wanted_by_others"
    sys.modules.pop("wanted_by_others", None)


def test_a_hidden_package_is_neither_found_nor_imported_until_it_is_revealed(package):
    with hidden():
        assert find_spec(package) is None
        with pytest.raises(ImportError):
            import_module(package)
        reveal()
        assert import_module(package).answer == 42
    assert import_module(package).answer == 42


def test_it_can_be_imported_after_the_command(package):
    with hidden():
        pass
    assert find_spec(package) is not None


def test_one_that_is_there_already_stays(package):
    before = import_module(package)
    with hidden():
        assert import_module(package) is before
    assert import_module(package) is before


def test_the_command_hides_them(package, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "app", lambda **_: seen.append(find_spec(package)))
    cli.main(["doctor"])
    assert seen == [None]
    assert find_spec(package) is not None


@pytest.mark.slow
def test_diffusers_and_peft_add_adapters_without_bitsandbytes_and_its_optimizers_are_there_when_named():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "AdamW8bit"]
