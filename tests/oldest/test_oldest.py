"""The least versions that `make oldest` installs."""

from oldest.__main__ import NEWEST, constraints, least_versions
from packaging.version import Version


def test_every_package_of_a_user_is_tried_in_its_least_version_but_torch():
    least, lines = least_versions(), list(constraints())
    assert {"diffusers", "transformers", "peft", "av", "pillow", "numpy", "safetensors", "torch"} <= set(least)
    assert {f"{name}=={version}" for name, version in least.items() if name not in NEWEST} <= set(lines)
    torch = [line for line in lines if line.startswith("torch==")]
    assert len(torch) == 1
    assert Version(torch[0].partition("==")[2]) >= Version(least["torch"])


def test_no_package_is_pinned_twice():
    names = [line.partition("==")[0] for line in constraints()]
    assert len(names) == len(set(names))
