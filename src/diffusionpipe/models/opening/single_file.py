"""A model in one file, as a diffusers folder of links: the rest of the code reads folders alone.

    model_index.json      -> CONFIG/model_index.json
    tokenizer             -> CONFIG/tokenizer
    unet/config.json      -> CONFIG/unet/config.json
    unet/single_file.json    names the file; see `single_file.reading`
    text_encoder_3        -> CONFIG/text_encoder_3      a component that the file lacks

The folder lies among the assets of the Hugging Face cache, and its name is a hash of what it links, so that it never
changes. It may be deleted at any time.
"""

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from diffusionpipe.errors import ModelError
from diffusionpipe.files.output_file import draft_of
from diffusionpipe.models.base.family import Family
from diffusionpipe.models.parameters.single_file.layout import PIPELINES, parts_of
from diffusionpipe.models.parameters.single_file.reading import POINTER, found_in, pointer_text, shapes_in

_STEM = 60
"""The number of letters of the file's name that the name of the folder has."""
_NOT_LINKED = (".safetensors", ".bin", ".index.json", ".msgpack", ".ckpt")


def parts_in(file: Path, pipeline: str, family: Family, configs: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Name -> class of each component that a model's single file holds.

    `pipeline`: the class of the pipeline. `configs`: component -> its configuration.

    Raises:
        ModelError: the file is damaged, has no denoiser, or single files of the pipeline cannot be read.
    """
    if pipeline not in PIPELINES:
        raise ModelError(f"{file}: a {pipeline} is not read from one file; these are: {', '.join(PIPELINES)}")
    shapes = shapes_in(file)
    kinds = {name: family.components[name] for name in parts_of(pipeline)}
    found = {name: kind for name, kind in kinds.items() if found_in(file, shapes, kind, configs[name]) is not None}
    if family.trainable[0] not in found:
        shown = ", ".join(sorted(shapes)[:3])
        raise ModelError(
            f"{file} holds no {family.trainable[0]} under the names of its authors (it has {shown}, ...); give the "
            "whole model in one file, or a diffusers folder"
        )
    return found


def linked_folder(file: Path, config: Path, found: Mapping[str, str]) -> Path:
    """The path of a folder that links to a model's single file and, for all else, to the folder `config`.

    It is made in the hub's cache if it is not there. `found`: name -> class of the components in the file.

    Raises:
        ModelError: the folder cannot be written.
    """
    from huggingface_hub import cached_assets_path

    file, config = file.resolve(), config.resolve()
    contents: dict[str, str] = {}
    for path in sorted(config.iterdir()):
        if path.name not in found:
            contents[path.name] = f"-> {path}"
            continue
        links = {f"{path.name}/{one.name}": f"-> {one}" for one in sorted(path.iterdir()) if _is_linked(one)}
        contents |= links | {f"{path.name}/{POINTER}": pointer_text(file, found[path.name])}
    digest = sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]
    try:
        folder = cached_assets_path("diffusionpipe", "single_files", "links") / f"{digest}-{file.stem[:_STEM]}"
        if not folder.exists():
            _write(contents, folder)
    except OSError as error:
        raise ModelError(
            f"the links for {file} cannot be written: {error}; let HF_HOME name a place that can be"
        ) from error
    return folder


def _is_linked(path: Path) -> bool:
    return path.is_file() and not path.name.endswith(_NOT_LINKED)


def _write(contents: Mapping[str, str], folder: Path) -> None:
    """Write the folder with these contents, path in it -> text or "-> target of a link".

    It is made under another name first, because ranks may make it at the same time.
    """
    temporary = draft_of(folder)
    for name, text in contents.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        else:
            path.write_text(text, encoding="utf-8")
    try:
        temporary.rename(folder)
    # Another rank was faster. Its folder has the same contents.
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.exists():
            raise
