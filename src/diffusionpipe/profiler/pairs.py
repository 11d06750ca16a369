"""The rounds of pairs of ranks that are measured together.

Every pair is measured once, in rounds of disjoint pairs, so that all ranks send at once, as in a pipeline whose stages
all send. First the pairs within nodes, all nodes at once; then those between nodes, so that no round mixes both.

    4 ranks of a node     01 23 | 02 13 | 03 12       p - 1 rounds, as in a tournament (the circle method: E. Lucas,
                                                      Récréations mathématiques II, 1883)
    2 nodes of 2          01 23 | 02 13 | 03 12       the first round within the nodes, two between them
"""

from collections.abc import Iterator, Sequence

Pair = tuple[int, int]
Round = tuple[Pair, ...]

MOST_RANKS = 64
"""The largest job of which all pairs are measured; of larger jobs only neighbours are, and the first ranks of the first
two nodes."""


def rounds_inside(nodes: Sequence[int]) -> list[Round]:
    """Rounds of all pairs of ranks within nodes; no rank is twice in a round.

    With more than `MOST_RANKS` ranks only pairs of neighbours. `nodes`: the node of each rank.
    """
    ranks = _ranks_of(nodes)
    if len(nodes) > MOST_RANKS:
        neighbours = [(one, one + 1) for one in range(len(nodes) - 1) if nodes[one] == nodes[one + 1]]
        # Pairs that begin at even ranks, then at odd ones: no rank is in two.
        return [rounds for start in (0, 1) if (rounds := tuple(pair for pair in neighbours if pair[0] % 2 == start))]
    tournaments = [[[(own[a], own[b]) for a, b in one] for one in _tournament(len(own))] for own in ranks]
    longest = max(map(len, tournaments))
    return [tuple(pair for own in tournaments if turn < len(own) for pair in own[turn]) for turn in range(longest)]


def rounds_across(nodes: Sequence[int]) -> list[Round]:
    """Rounds of all pairs of ranks on different nodes; no rank is twice in a round.

    With more than `MOST_RANKS` ranks only one round between the first two nodes. `nodes`: the node of each rank.
    """
    ranks = _ranks_of(nodes)
    if len(nodes) > MOST_RANKS:
        return [tuple(zip(ranks[0], ranks[1], strict=False))] if len(ranks) > 1 else []
    rounds: list[Round] = []
    for meeting in _tournament(len(ranks)):
        both = [(ranks[a], ranks[b]) for a, b in meeting]
        sizes = [max(len(one), len(other)) for one, other in both]
        for shift in range(max(sizes)):
            met = [nodes for nodes, size in zip(both, sizes, strict=True) if shift < size]
            rounds.append(tuple(pair for one, other in met for pair in _shifted(one, other, shift)))
    return rounds


def _ranks_of(nodes: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, node in enumerate(nodes) if node == wanted] for wanted in range(nodes[-1] + 1)]


def _tournament(count: int) -> list[list[Pair]]:
    """Rounds of pairs in which each of the numbers 0 to `count` - 1 meets each other one once.

    One number stays at its place, the others move around a circle.
    """
    # One more than there are if the count is odd: the rank that meets it pauses.
    players = list(range(count + count % 2))
    rounds = []
    for _ in players[1:] if count > 1 else ():
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(sorted((min(pair), max(pair)) for pair in met if max(pair) < count))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _shifted(one: Sequence[int], other: Sequence[int], shift: int) -> Iterator[Pair]:
    """A pair for each rank of the smaller node: with the rank of the larger node whose index is `shift` higher.

    After the last index comes the first. `one`, `other`: the ranks of the two nodes.
    """
    few, many = sorted((one, other), key=len)
    for place, rank in enumerate(few):
        partner = many[(place + shift) % len(many)]
        yield min(rank, partner), max(rank, partner)
