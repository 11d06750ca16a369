"""What tests of families measure: times with equal stages."""

from diffusionpipe.simulator import simulate, uniform_costs


def counts_up_to_64(workers):
    """Micro-batches until a schedule has met every case of its start and end, then every seventh number, and 64.

    >>> counts_up_to_64(2)
    [1, 2, 3, 4, 5, 6, 13, 20, 27, 34, 41, 48, 55, 62, 64]
    """
    return sorted({*range(1, 2 * workers + 3), *range(2 * workers + 2, 65, 7), 64})


def makespan(schedule, **times):
    """Simulated time with F = I = W = 1, B = 2 and free communication, or the given times."""
    return simulate(schedule, uniform_costs(schedule, **times)).makespan


def window(schedule, **times):
    """The longest time from a worker's first start to its last end."""
    timeline = simulate(schedule, uniform_costs(schedule, **times))
    return max(timeline.window(worker) for worker in range(schedule.num_workers))


def samples_held(schedule):
    """For each worker the most samples that it holds activations of at a time; {F, B} over one stage on each worker."""
    sizes = schedule.placement.pipelines[0].microbatches
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            held += sizes[action.microbatch] if action.op == "F" else -sizes[action.microbatch]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
