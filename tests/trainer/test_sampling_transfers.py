"""The order in which workers bring predictions to those that hold latents."""

from collections import Counter
from itertools import product

from diffusionpipe.trainer.inference.transfers import transfers


def stuck(programs):
    """Workers that never end where each transfer blocks its worker until the other end is there."""
    left = {worker: list(program) for worker, program in programs.items()}
    while True:
        heads = Counter(program[0] for program in left.values() if program)
        ready = [transfer for transfer, ends in heads.items() if ends == 2]
        if not ready:
            return sorted(worker for worker, program in left.items() if program)
        for program in left.values():
            if program and program[0] in ready:
                del program[0]


def programs_of(order, num_workers):
    return {worker: [one for one in order(worker) if worker in one[:2]] for worker in range(num_workers)}


def cases():
    for num_workers, writing, holding in product((2, 3, 4, 6), (1, 2, 3), (1, 2, 3)):
        spans = {worker: [(worker, worker + 1), (worker + 9, worker + 10)] for worker in range(0, num_workers, writing)}
        yield num_workers, spans, range(0, num_workers, holding)


def test_nobody_waits_in_a_circle_where_transfers_block():
    for num_workers, writers, holders in cases():
        order = transfers(writers, holders)
        assert len(order) == sum(len(spans) * len(set(holders) - {worker}) for worker, spans in writers.items())
        assert stuck(programs_of(lambda worker, order=order: order, num_workers)) == []


def test_three_workers_that_all_send_first_are_stuck():
    order = transfers({worker: [(worker, worker + 1)] for worker in range(3)}, range(3))
    sends_first = {worker: sorted(order, key=lambda one, me=worker: (one[0] != me, one)) for worker in range(3)}
    assert stuck(programs_of(lambda worker: sends_first[worker], 3)) == [0, 1, 2]
