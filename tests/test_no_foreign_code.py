"""Nothing that a peer or a file sends is run: the source has no door for it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
READER = "diffusionpipe/trainer/checkpoints/distcp_files.py"
"""The one module that may unpickle: the table of an old checkpoint, by a reader that accepts such tables alone."""

EXCHANGES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
PICKLES = {"cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
ALLOWED = {"Unpickler", "UnpicklingError"}
"""Of pickle, in the reader: what it is derived from, and what it raises."""
TOKENIZER = "getattr(transformers, kind).from_pretrained"
"""Of a class that `trainer/inference/conditions.py` allows; it has no weights."""
CHECKPOINT = "torch.distributed.checkpoint"
DRIVERS = {"async_save", "load", "load_state_dict", "save", "save_state_dict"}
"""DCP's own way of saving and loading: its ranks exchange objects, and its table is unpickled freely."""

UNCAREFUL = {"read_metadata", "load_bytes"}
"""Methods of DCP's readers that unpickle freely."""


def doors(source: str, name: str) -> list[str]:
    """The places where code from outside could come in, as "line: word"."""
    return [f"{line}: {word}" for node in ast.walk(ast.parse(source)) for line, word in _doors_of(node, name)]


def _doors_of(node: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    is_reader = name == READER
    match node:
        case ast.Import(names=names):
            found = [one.name for one in names if one.name.partition(".")[0] in PICKLES]
            yield from ((node.lineno, f"import {one}") for one in found if not (is_reader and one == "pickle"))
        case ast.ImportFrom(module=str(module), names=names):
            imported = {one.name for one in names}
            wrong = EXCHANGES | (DRIVERS if module.startswith(CHECKPOINT) else set())
            if module.partition(".")[0] in PICKLES:
                wrong = imported
            wrong |= PICKLES | ({"load"} if module == "torch" else set())
            yield from ((node.lineno, f"from {module} import {one}") for one in sorted(imported & wrong))
        case ast.Attribute(attr=attr) if attr in EXCHANGES | UNCAREFUL:
            yield node.lineno, attr
        case ast.Attribute(value=ast.Name(id="pickle"), attr=attr) if not (is_reader and attr in ALLOWED):
            yield node.lineno, f"pickle.{attr}"
        case ast.Name(id=word) if word in EXCHANGES:
            yield node.lineno, word
        case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__" as word)):
            yield node.lineno, word
        case ast.Call(func=function, keywords=keywords):
            yield from ((node.lineno, word) for word in _doors_of_call(ast.unparse(function), keywords))


def _doors_of_call(function: str, keywords: list[ast.keyword]) -> Iterator[str]:
    given = {one.arg: ast.unparse(one.value) for one in keywords}
    if function == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if function in {f"{CHECKPOINT}.{driver}" for driver in DRIVERS} or function in {f"dcp.{one}" for one in DRIVERS}:
        yield function
    is_of_weights = function.endswith(".from_pretrained") and function != TOKENIZER
    if is_of_weights and given.get("use_safetensors") != "True":
        yield "from_pretrained without use_safetensors=True"
    if given.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if given.get("trust_remote_code", "False") != "False":
        yield "trust_remote_code"
    if function in ("torch.hub.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle", "pd.read_pickle"):
        yield function


def test_the_source_has_no_door_for_foreign_code():
    files = sorted(SOURCE.rglob("*.py"))
    assert any(path.relative_to(SOURCE).as_posix() == READER for path in files)
    found = {
        name: places
        for path in files
        if (places := doors(path.read_text(encoding="utf-8"), name := path.relative_to(SOURCE).as_posix()))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(found, 1)",
        "from torch.distributed import broadcast_object_list",
        "gather = dist.gather_object",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=is_safe)",
        "from torch import load",
        "import pickle",
        "import dill as d",
        "from pickle import loads",
        "from torch.serialization import pickle",
        "import multiprocessing\nimport marshal",
        "from torch.distributed.checkpoint import async_save",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "torch.distributed.checkpoint.save({}, checkpoint_id=path)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "FileSystemReader(folder).read_metadata()",
        "AutoencoderKL.from_pretrained(folder)",
        "eval(text)",
    ],
)
def test_each_kind_of_door_is_found(source: str):
    assert doors(source, "diffusionpipe/x.py")


@pytest.mark.parametrize("source", ["pickle.load(file)", "x = pickle.loads", "import marshal", "torch.load(path)"])
def test_the_reader_itself_may_do_no_more_than_read_its_table(source: str):
    assert doors(source, READER)
    assert not doors("import pickle\nclass R(pickle.Unpickler):\n    pass", READER)


@pytest.mark.parametrize("source", ["torch.load(path, weights_only=True)", "vae.eval()", "json.load(file)"])
def test_harmless_calls_are_none(source: str):
    assert not doors(source, "diffusionpipe/x.py")
