"""Rows as lines of text that fit a width, for screens that do not compare plans."""

from collections.abc import Iterator, Sequence


def text_table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Lines of a table with two blanks between columns, from rows of cells; the first row is the head.

    Words of a head are one below the other. The columns "from" and "to" have names, which are cut in their middle to
    fit `width`.
    """
    count = len(rows[0])
    heads = [head.split() for head in rows[0]]
    deep = max(map(len, heads))
    lines = [[_word(head, i - deep) for head in heads] for i in range(deep)]
    body = [list(row) for row in rows[1:]]
    sizes = [max(len(line[i]) for line in (*lines, *body)) for i in range(count)]
    texts = [i for i in range(count) if rows[0][i] in ("from", "to")]
    room = width - sum(size for i, size in enumerate(sizes) if i not in texts) - 2 * (count - 1)
    for i in texts:
        # Names are cut, but to no less than twelve columns.
        sizes[i] = min(sizes[i], max(12, room // len(texts)))
    for line in (*lines, *body):
        cells = [
            _shortened(cell, size).ljust(size) if i in texts else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(line, sizes, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _word(head: Sequence[str], index: int) -> str:
    return head[index] if -index <= len(head) else ""


def _shortened(name: str, size: int) -> str:
    if len(name) <= size:
        return name
    # Ends of names differ more often than their middles.
    return f"{name[: (size - 2) // 2]}..{name[len(name) - (size - 2 - (size - 2) // 2) :]}"
