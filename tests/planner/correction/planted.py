"""Settings whose profile is wrong in one place, and what is true of them."""

from dataclasses import replace

from planner.correction.recordings import with_layer
from planner.synthetic import chain, cluster, workload

from diffusionpipe.costs import AllReduce, Link
from diffusionpipe.planner import Given, Setting

FORWARD = (0.006, 0.002, 0.003, 0.004, 0.004)
"""Of one sample. Two stages are balanced behind the first three layers."""
LINK = Link(1e-4, 1e9)
PIPELINES = Given(data_parallel=1, schedule="1f1b")


def setting_of(*, link=LINK, parameters=20_000_000, elements=100, given=PIPELINES, bus=1e9):
    profile = chain(FORWARD, parameters=(parameters,) * len(FORWARD), elements=elements, frozen=0.002)
    reduce = AllReduce(latency=1e-4, bandwidth=bus)
    devices = replace(cluster(2), intra=link, inter=link, intra_reduce=reduce, inter_reduce=reduce)
    return Setting(profile=profile, cluster=devices, workload=workload(16), given=given)


def layer_doubled():
    """(what is true, what the profile says): the planner cuts too early."""
    true = setting_of()
    return true, replace(true, profile=with_layer(true.profile, "layer0", 2.0))


def link_too_fast():
    """(what is true, what the cluster says): the planner makes a pipeline, whose messages take too long."""
    true = setting_of(link=Link(1e-4, 1e8), elements=600_000, given=Given(schedule="1f1b"), bus=1.2e9)
    return true, replace(true, cluster=replace(true.cluster, intra=LINK, inter=LINK))
