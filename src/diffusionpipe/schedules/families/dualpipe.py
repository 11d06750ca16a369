"""DualPipe: two directions, backwards in two parts, and forwards paired with backwards of the other direction."""

from collections import Counter
from collections.abc import Iterator, Sequence

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, linear, require_positive, schedule_of


def dualpipe(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Half of the micro-batches run down the workers and half run up; weight gradients fill the bubbles at both ends.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437, section 3.2.1. The paper runs a
    forward and a backward at once, so that each hides the messages of the other. Here the backward (I, W) directly
    follows the forward, because separate streams carry the messages.

    With p stages of equal times W <= I <= F <= I + W, m micro-batches in all, and free communication:

        time                    m (F + I + W) + (p/2 - 1) (F + I - W): 3m + p/2 - 1 where F = I = W = 1
        bubble                  (p - 2) / (6m + p - 2) of it where F = I = W
        activations in flight   p + 1 on every worker, held until W
        weights                 2 copies of the model, on each worker 2 stages

    The paper's bubble is (p/2 - 1) (F&B + B - 3W), where F&B is the time of a pair and B = I + W the time of a whole
    backward. It assumes that all results of a pair come at its end. If a pair takes as long as its parts, that is (p/2
    - 1) (F + 2I - W), larger than ours. With other ratios of times the order is legal, but some waits are longer.

    The number of workers must be even. The number of micro-batches must be even and at least 2p. Stages 0 and 1 run
    down, 2 and 3 up:

    >>> for order in dualpipe(2, 4).orders:
    ...     print(*order)
    0F0 3F0 0F1 3I0 3W0 3F1 0I0 0W0 3I1 3W1 0I1 0W1
    2F0 1F0 2F1 1I0 1W0 1F1 2I0 2W0 1I1 1W1 2I1 2W1

    Raises:
        ConfigError: the workers or the micro-batches are odd, or there are fewer than 2p micro-batches.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    problems = []
    if num_workers % 2:
        problems.append(
            f"{num_workers} workers cannot be shared by two directions; use an even number, such as {num_workers + 1}"
        )
    if num_microbatches % 2 or num_microbatches < 2 * num_workers:
        problems.append(
            f"{num_microbatches} micro-batches do not work: the number must be even and at least 2 x {num_workers} "
            "workers; use "
            f"{max(2 * num_workers, num_microbatches + 1)}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    down, count = linear(num_workers), num_microbatches // 2
    pipes = [Pipe(workers=way, microbatches=(microbatch_size,) * count, ops=SPLIT) for way in (down, down[::-1])]
    half = num_workers // 2
    orders = []
    for worker in range(num_workers):
        stages = worker, 2 * num_workers - 1 - worker  # down, up
        distance = min(worker, num_workers - 1 - worker)
        # `near` is the stage of the pipe that starts on the worker's own side of the row.
        near, far = stages if worker < half else stages[::-1]
        orders.append(list(paired(near, far, distance=distance, depth=half, count=count)))
    return schedule_of("dualpipe", pipes, orders)


def paired(near: int, far: int, *, distance: int, depth: int, count: int) -> Iterator[Action]:
    """The order of a worker with two stages: `near` the start of its pipe, and `far` from the start of its own.

        warm-up     n n n   nf nf            forwards of near (n), then of both (f: far) in turn
                    IWf IWf                  backwards of far, a forward after each
        steady      n IW  f iw  n IW  f iw   a forward of each, paired with a backward of the other (small: of near)
        cool-down   IW  f iw                 the forwards of far come to their end
                    IW iw I i  wi wi  w w    in the second half of the rest the weight gradients fill the waits

    Args:
        near: the stage that is `distance` places after the first of its pipe.
        far: the stage that is as far before the last of its pipe, which in a V is the same pipe.
        distance: from the end of the row of workers where near's pipe starts.
        depth: how many such distances there are: half of the workers, or all of them in a V.
        count: micro-batches of each of the two, at least 2 x depth.
    """
    inner = depth - 1 - distance
    # The warm-up has 2 inner + distance + 1 forwards of near; the steady part has the others.
    steady = count - 2 * depth + distance + 1
    order = [(near, Op.F)] * (2 * inner)
    order += [(near, Op.F), (far, Op.F)] * (distance + 1)
    order += [(far, Op.I), (far, Op.W), (far, Op.F)] * inner
    order += [(near, Op.F), (far, Op.I), (far, Op.W), (far, Op.F), (near, Op.I), (near, Op.W)] * steady
    order += [(far, Op.I), (far, Op.W), (far, Op.F), (near, Op.I), (near, Op.W)] * inner
    order += _cool_down(near, far, distance=distance, inner=inner)
    return _numbered(order)


def _cool_down(near: int, far: int, *, distance: int, inner: int) -> list[tuple[int, Op]]:
    """(stage, op) of the backwards that are left: the first half whole, in the others each W later than its I.

    `distance` as in `paired`; `inner`: the number of greater distances, depth - 1 - distance.
    """
    whole, later = [], []
    for i, stage in enumerate([far, near] * (distance + 1)):
        if i <= distance:
            whole += [(stage, Op.I), (stage, Op.W)]
        else:
            whole.append((stage, Op.I))
            later.append((stage, Op.W))
    for _ in range(inner):
        whole += [later.pop(0), (near, Op.I)]
        later.append((near, Op.W))
    return whole + later


def _numbered(order: Sequence[tuple[int, Op]]) -> Iterator[Action]:
    """The actions for a sequence of (stage, op), each with the next micro-batch of its stage and op."""
    done: Counter[tuple[int, Op]] = Counter()
    for stage, op in order:
        yield compute_action(stage, op, done[stage, op])
        done[stage, op] += 1
