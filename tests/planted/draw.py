"""Draws faults by a seed over all packages: a comparison turned, a constant changed, a statement or argument dropped.

    PYTHONPATH=tests python -m planted.draw --seed 0 --count 40

Each is printed as an entry of faults/*.toml without its sentence and tests. Seed and source decide what is drawn.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planted.faults import SOURCE

TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Bytes `start` to `end` of a module become `new`."""

    kind: str
    start: int
    end: int
    new: str


class Source:
    """The text of a module by line and column, as ast counts them."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but types, decorators, documentation and the texts of errors: to change these changes no behaviour."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                yield child
                yield from running_nodes(child)


def changes(text: str) -> list[Change]:
    """All changes that may be drawn in a module."""
    source, found = Source(text), []
    for node in running_nodes(ast.parse(text)):
        found += [
            *_comparison(node, source),
            *_constant(node, source),
            *_statement(node, source),
            *_argument(node, source),
        ]
    return found


def _comparison(node: ast.AST, source: Source) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        start, end = source.end(node.left), source.start(node.comparators[0])
        between = source.data[start:end].decode()
        if "(" not in between and ")" not in between:
            yield Change(kind="a comparison turned", start=start, end=end, new=f" {TURNED[type(node.ops[0])]} ")


def _constant(node: ast.AST, source: Source) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
        yield Change(kind="a constant changed", start=source.start(node), end=source.end(node), new=repr(new))


def _statement(node: ast.AST, source: Source) -> Iterator[Change]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    is_way_out = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return | ast.Continue)
    if is_call or is_stored or is_way_out or isinstance(node, ast.AugAssign):
        assert isinstance(node, ast.stmt)
        yield Change(kind="a statement dropped", start=source.start(node), end=source.end(node), new="pass")


def _argument(node: ast.AST, source: Source) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    before = [*node.args, *node.keywords]
    for keyword in node.keywords:
        number = before.index(keyword)
        if keyword.arg is not None and number > 0:
            start = source.end(before[number - 1])
            if b")" not in source.data[start : source.start(keyword)]:
                yield Change(kind="an argument dropped", start=start, end=source.end(keyword), new="")


def unique_lines(text: str, change: Change) -> tuple[str, str]:
    """The lines with the change before and after it, and so many lines before them that the module has them once."""
    data = text.encode()
    start = data.rfind(b"\n", 0, change.start) + 1
    end = data.find(b"\n", change.end) + 1 or len(data)
    while data.count(data[start:end]) > 1:
        start = data.rfind(b"\n", 0, start - 1) + 1
    return data[start:end].decode(), (
        data[start : change.start] + change.new.encode() + data[change.end : end]
    ).decode()


def entry(module: str, kind: str, old: str, new: str) -> str:
    """A fault as TOML."""
    return (
        f'[[fault]]  # {kind}\nmodule = "{module}"\ndrawn = true\nwrong = ""\ntests = [""]\n'
        f"old = '''\n{old}'''\nnew = '''\n{new}'''\n"
    )


def draw(seed: int, count: int, source: Path = SOURCE) -> Iterator[str]:
    """Entries of faults: a package, then one of its modules, then a kind, then a place, each with the same chance."""
    random_of_seed = random.Random(seed)
    package = next(path.parent for path in source.glob("*/__init__.py"))
    packages = sorted(path for path in package.iterdir() if (path / "__init__.py").exists())
    drawn: set[str] = set()
    while len(drawn) < count:
        found: list[Change] = []
        while not found:
            path = random_of_seed.choice(sorted(random_of_seed.choice(packages).rglob("*.py")))
            found = changes(path.read_text(encoding="utf-8"))
        kind = random_of_seed.choice(sorted({change.kind for change in found}))
        change = random_of_seed.choice([change for change in found if change.kind == kind])
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        text = entry(module, kind, *unique_lines(path.read_text(encoding="utf-8"), change))
        if text not in drawn:
            drawn.add(text)
            yield text


def main() -> None:
    """Print the drawn faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    arguments = parser.parse_args()
    print("\n".join(draw(arguments.seed, arguments.count)))


if __name__ == "__main__":
    main()
