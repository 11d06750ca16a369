"""Whatever numbers a profile has: it is refused when it is read, or planned with."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.errors import ConfigError, FileFormatError
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.setting import Setting

TIMES = (0.0, 5e-324, 1e-300, 1e-12, 1e-3, 1.0, 1e9, 1e300, 1.7e308)
BYTES = (0, 1, 10**6, 10**13, 2**63, 10**30, 10**400)


@given(
    sizes=st.sampled_from(((1,), (7,), (1, 2), (3, 1000), (1, 2**40), (10**400,))),
    times=st.lists(st.sampled_from(TIMES), min_size=8, max_size=8),
    held=st.lists(st.sampled_from(BYTES), min_size=4, max_size=4),
    num_ranks=st.sampled_from((1, 2)),
    source=st.sampled_from(("measured", "analytic")),
)
@example(sizes=(1,), times=[5e-324] * 8, held=[0] * 4, num_ranks=1, source="analytic")
@example(sizes=(1, 2), times=[1.7e308] * 8, held=[0] * 4, num_ranks=2, source="analytic")
@settings(max_examples=25, deadline=None)
def test_a_profile_is_refused_when_it_is_read_or_planned_with(sizes, times, held, num_ranks, source):
    known = synthetic.chain([1.0] * 3, frozen=0.1)

    def column(values, first):
        return tuple(values[(first + i) % len(values)] for i in range(len(sizes)))

    try:
        layers = tuple(
            replace(
                layer,
                forward=column(times, i),
                input_grad=column(times, i + 2) if any(layer.input_grad) else (0.0,) * len(sizes),
                weight_grad=column(times, i + 4) if any(layer.weight_grad) else (0.0,) * len(sizes),
                activation=column(held, i),
                workspace=column(held, i + 1),
                cast=times[i],
                copies=held[i % 4],
            )
            for i, layer in enumerate(known.layers)
        )
        profile = replace(known, batch_sizes=sizes, layers=layers, update=times[0], source=source)
        profile = profile_from_text(profile_to_text(profile))
    except (ValueError, FileFormatError):
        return
    setting = Setting(profile=profile, cluster=synthetic.cluster(num_ranks), workload=synthetic.workload(8))
    with suppress(ConfigError):
        choice = choose(setting)
        choice.comparison()
        choice.plan()


def test_a_profile_without_trained_layers_is_refused_as_such_whatever_the_batch():
    known = synthetic.chain([1.0] * 3, frozen=0.1)
    kept = len(known.graph.frozen_layers)
    graph = replace(known.graph, layers=known.graph.layers[:kept])
    profile = replace(known, graph=graph, layers=known.layers[:kept])
    setting = Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(64))
    with pytest.raises(ConfigError, match="no trained layers"):
        choose(setting)
