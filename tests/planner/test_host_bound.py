"""Plans for devices whose hosts issue kernels too slowly: predicted as such devices run them."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from kit.asynchronous_device import PlantedQueue
from planner import synthetic

from diffusionpipe.costs import HostTimes
from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.ir import MESSAGE_OPS, Op, Range
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.choosing.explain import compare
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.simulator import simulate

BATCH, KERNELS = 64, 5


def setting_of(ratio, *, num_layers=48, num_ranks=4):
    """Uneven layers, whose hosts take about `ratio` of a device's time for micro-batches of 4 samples."""
    random = Random(7)
    profile = synthetic.chain([random.uniform(0.5e-3, 2e-3) for _ in range(num_layers)], frozen=1e-4)
    layers = []
    for layer in profile.layers:
        times = [ratio * random.uniform(2e-3, 8e-3) if column[0] else 0.0
                 for column in (layer.forward, layer.input_grad, layer.weight_grad)]  # fmt: skip
        layers.append(replace(layer, host=HostTimes(forward=times[0], input_grad=times[1], weight_grad=times[2])))
    profile = replace(profile, layers=tuple(layers))
    return Setting(profile=profile, cluster=synthetic.cluster(num_ranks), workload=synthetic.workload(BATCH))


class Measured:
    """A run of a proposal, layer by layer, kernel by kernel, on four devices that compute what their hosts issue."""

    def __init__(self, setting, proposal):
        self.setting, self.proposal, self.train = setting, proposal, proposal.train
        self.queues = [PlantedQueue() for _ in self.train.orders]
        self.free = defaultdict(float)  # lane -> end of its last transfer
        self.issued = defaultdict(list)  # lane -> its transfers, each with when the device came to it
        self.arrived = {}

    def run(self):
        """When the last device is done."""
        places = [0] * len(self.train.orders)
        while any(place < len(order) for place, order in zip(places, self.train.orders, strict=True)):
            before = list(places)
            for worker, order in enumerate(self.train.orders):
                while places[worker] < len(order) and self.goes_on(worker, order[places[worker]]):
                    places[worker] += 1
            assert places != before
        return max(queue.free for queue in self.queues)

    def goes_on(self, worker, action):
        if action.op in MESSAGE_OPS:
            return self.transfer(worker, action.slot)
        waits = [slot for slot, message in enumerate(self.train.messages) if self.reads(action, message)]
        if not all(slot in self.arrived for slot in waits):
            return False
        queue = self.queues[worker]
        queue.free = max([queue.free, *(self.arrived[slot] for slot in waits)])
        for name in self.layers(action):
            self.compute(queue, name, action)
        return True

    def reads(self, action, message):
        if message.destination != action.stage or action.op in (Op.W, Op.ENCODE):
            return False
        if self.train.placement.is_frozen(message.source):
            first = action.microbatch * BATCH // 16
            return action.op is Op.F and bool(message.samples.intersection(Range(first, first + BATCH // 16)))
        return message.microbatch == action.microbatch and message.is_gradient == (action.op is not Op.F)

    def layers(self, action):
        names = self.proposal.blocks[self.train.placement.stages[action.stage].weights]
        if action.op is Op.ENCODE:
            fill = self.train.fills[action.slot]
            return names[fill.layers.start : fill.layers.stop]
        return names if action.op is Op.F else names[::-1]

    def compute(self, queue, name, action):
        fields = {Op.F: ("forward",), Op.ENCODE: ("forward",), Op.I: ("input_grad",), Op.W: ("weight_grad",)}
        layer, profile = self.setting.profile.layer(name), self.setting.profile
        samples = len(self.train.fills[action.slot].samples) if action.op is Op.ENCODE else BATCH // 16
        for part in fields.get(action.op, ("input_grad", "weight_grad")):
            device, host = getattr(profile, part)(name, samples), getattr(layer.host, part)
            queue.compute([device / KERNELS] * KERNELS, host)

    def transfer(self, worker, slot):
        """Issue one end of it; what has come to the head of the lanes of both ends runs."""
        lanes, heads = self.lanes(slot), [slot]
        self.issued[worker, lanes[0][1]].append((slot, self.queues[worker].free))
        while heads:
            slot, lanes = heads[0], self.lanes(heads.pop(0))
            queued = [self.issued[lane] for lane in lanes]
            if slot in self.arrived or not all(queue and queue[0][0] == slot for queue in queued):
                continue
            start = max(*(queue.pop(0)[1] for queue in queued), *(self.free[lane] for lane in lanes))
            message, costs = self.train.messages[slot], self.proposal.costs
            num_bytes = len(message.samples) * sum(costs.tensor_bytes[name] for name in message.tensors)
            self.arrived[slot] = start + costs.link_between(lanes[0][0], lanes[1][0]).transfer(num_bytes)
            self.free.update(dict.fromkeys(lanes, self.arrived[slot]))
            heads += [queue[0][0] for queue in queued if queue]
        return True

    def lanes(self, slot):
        """Both ends, each with the direction."""
        message, stages = self.train.messages[slot], self.train.placement.stages
        source, destination = stages[message.source].worker, stages[message.destination].worker
        return (source, source < destination), (destination, source < destination)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 3.0])
def test_both_resources_are_simulated_as_devices_with_hosts_beside_them_run(schedule, ratio):
    setting = setting_of(ratio)
    proposal = propose(setting, Layout(batch=BATCH, stages=4, microbatches=16, schedule=schedule))
    measured = Measured(setting, proposal).run()
    assert proposal.iteration == pytest.approx(measured, rel=0.03)
    unhosted = simulate(proposal.train, replace(proposal.costs, host_fills=())).makespan
    assert unhosted <= proposal.iteration


@pytest.mark.parametrize("ratio", [0.0, 20.0])
def test_a_plan_says_that_it_is_host_bound_if_it_is(ratio):
    setting = setting_of(ratio, num_layers=4, num_ranks=2)
    found = compare(setting, search(setting, filler=filler_of(setting)))
    assert ("host-bound" in found.verdict) == (ratio > 0)


def test_a_profile_file_keeps_the_times_of_hosts():
    profile = setting_of(1.0).profile
    assert profile_from_text(profile_to_text(profile)) == profile
