"""Random instances, and an evaluation of orders that shares no code with the search."""

from hypothesis import strategies as st

from diffusionpipe.ordering import Answer, Goal, HalfStage, Instance, Placing

PLACINGS = (Placing.LINEAR, Placing.V, Placing.LOOP)


@st.composite
def half_stages(draw: st.DrawFn) -> HalfStage:
    activation = draw(st.integers(1, 4))
    return HalfStage(
        forward=draw(st.integers(1, 9)),
        input_grad=draw(st.integers(1, 9)),
        weight_grad=draw(st.integers(0, 9)),
        activation=activation,
        kept_after_input_grad=draw(st.integers(0, activation)),
    )


@st.composite
def instances(draw: st.DrawFn, *, max_ranks: int = 3, max_microbatches: int = 5) -> Instance:
    """With limits from exactly what one micro-batch needs up to more than all need, or none."""
    ranks = draw(st.integers(1, max_ranks))
    microbatches = draw(st.integers(1, max_microbatches))
    stages = tuple(draw(st.lists(half_stages(), min_size=2 * ranks, max_size=2 * ranks)))
    placing = draw(st.sampled_from(PLACINGS))
    needs = least_memory(stages, placing, ranks)
    limits = tuple(need + draw(st.integers(0, microbatches * need)) for need in needs)
    return Instance(
        ranks=ranks,
        microbatches=microbatches,
        placement=placing,
        stages=stages,
        comm=draw(st.integers(0, 3)),
        memory_limit=draw(st.sampled_from([limits, None])),
        objective=draw(st.sampled_from(Goal)),
        seconds=0.01,
    )


def ranks_of_halves(placing: Placing, ranks: int) -> list[int]:
    """The rank of every half-stage."""
    if placing is Placing.LINEAR:
        return [half // 2 for half in range(2 * ranks)]
    back = reversed(range(ranks)) if placing is Placing.V else range(ranks)
    return [*range(ranks), *back]


def least_memory(stages: tuple[HalfStage, ...], placing: Placing, ranks: int) -> list[int]:
    """What each rank holds of one micro-batch."""
    needs = [0] * ranks
    for stage, rank in zip(stages, ranks_of_halves(placing, ranks), strict=True):
        needs[rank] += stage.activation
    return needs


def value_of(instance: Instance, answer: Answer) -> float:
    return answer.window if instance.objective is Goal.WINDOW else answer.makespan


def recounted_peaks(instance: Instance, answer: Answer) -> list[float]:
    """What the orders hold, micro-batch by micro-batch."""
    if answer.placement is Placing.LINEAR:
        pairs = zip(instance.stages[::2], instance.stages[1::2], strict=True)
        amounts = [(a.activation + b.activation, a.kept_after_input_grad + b.kept_after_input_grad) for a, b in pairs]
    else:
        amounts = [(stage.activation, stage.kept_after_input_grad) for stage in instance.stages]
    peaks = []
    for order in answer.orders:
        held: dict[tuple[int, int], float] = {}
        peak = 0.0
        for action in order:
            assert action.microbatch is not None
            key = action.stage, action.microbatch
            activation, kept = amounts[action.stage]
            if action.op == "F":
                held[key] = activation
            peak = max(peak, sum(held.values()))
            if action.op == "I":
                held[key] = kept
            elif action.op == "W":
                del held[key]
        assert not held
        peaks.append(peak)
    return peaks
