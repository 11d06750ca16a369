"""The gradient noise scale of a run, and the batches that it recommends: the trainer measures it, the planner reads it.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162, section 2: to
one loss a run takes

    steps      S(B) = S_min (1 + B_noise / B)      fewer with larger batches
    samples    E(B) = E_min (1 + B / B_noise)      more with larger batches,  E_min = S_min B_noise
"""

from collections.abc import Iterable, Mapping, Sequence

SQUARE, TRACE, SCALE = "noise/gradient_square", "noise/trace", "noise_scale"
"""The names in a run's metrics of |G|² and tr S of one measurement, and of their quotient, averaged over the last ones.
"""
LEAST_MEASUREMENTS = 20
"""The least number of measurements that make an estimate."""
MOST_MEASUREMENTS = 400
"""The number of a run's last measurements that count; earlier ones belong to other weights."""


def noise_scale(measured: Sequence[tuple[float, float]]) -> float | None:
    """The gradient noise scale in samples, from pairs (|G|², tr S): mean tr S / mean |G|², over the last 400 pairs.

    None where there are fewer than 20 pairs, or a mean is not above 0.

    >>> noise_scale([(1.0, 10.0), (3.0, 30.0)] * 10), noise_scale([(1.0, 10.0)] * 19), noise_scale([(-1.0, 10.0)] * 40)
    (10.0, None, None)
    """
    last = measured[-MOST_MEASUREMENTS:]
    square, trace = (sum(pair[i] for pair in last) for i in (0, 1))
    return trace / square if len(last) >= LEAST_MEASUREMENTS and square > 0 and trace > 0 else None


def measurements_of(rows: Iterable[Mapping[str, float | None]]) -> list[tuple[float, float]]:
    """The pairs (|G|², tr S) in the rows of a run's metrics, in order; rows without both are left out."""
    found = []
    for row in rows:
        square, trace = row.get(SQUARE), row.get(TRACE)
        if square is not None and trace is not None:
            found.append((square, trace))
    return found


def steps_with(batch: float, scale: float) -> float:
    """The steps to a loss with batches of `batch` samples, as a multiple of the steps with endless batches.

    S(B) / S_min = 1 + `scale` / B, where `scale` is the gradient noise scale in samples.
    """
    return 1 + scale / batch


def samples_with(batch: float, scale: float) -> float:
    """The samples to a loss with batches of `batch` samples, as a multiple of the samples with the smallest batch.

    E(B) / E_min = 1 + B / `scale`, where `scale` is the gradient noise scale in samples.
    """
    return 1 + batch / scale


def switch_batch(scale: float, num_stages: int, speedup: float) -> float | None:
    """The batch in samples from which on copies of a pipeline reach a loss before as many devices in copies alone.

    Copies of one device each take M times the batch, M = `num_stages`, because each device has the samples of one copy.
    `speedup` is the pipelines' samples a second over theirs, r. E(B) / r < E(M B) from

        B = B_noise (1 - r) / (r M - 1)

    on. 0: always, r >= 1. None: never, r M <= 1. After Pal et al., "Optimizing Multi-GPU Parallelization Strategies for
    Deep Learning Training", 2019, https://arxiv.org/abs/1907.13257.

    >>> switch_batch(100, 2, 0.75), switch_batch(100, 2, 1.1), switch_batch(100, 2, 0.5)
    (50.0, 0.0, None)
    """
    if speedup >= 1:
        return 0.0
    return scale * (1 - speedup) / (speedup * num_stages - 1) if speedup * num_stages > 1 else None
