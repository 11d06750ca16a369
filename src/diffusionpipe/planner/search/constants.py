"""How far the search goes. Each constant says what it trades, and what happens if it is larger or smaller."""

from diffusionpipe.units import Seconds

# Families of schedules; `schedules.traits` says what makes them fit for this.
CHAIN = "1f1b"
"""Cuts are judged with this family first: one that holds more activations would refuse cuts that fit."""
LOW_MEMORY_SCHEDULE = "sequential"
"""The schedule for models that fit with no other one: it holds one micro-batch at a time. One that holds more would fit
less often."""
DEPTH_FIRST = "1f1b"
"""The schedule of sharded copies with activations of one micro-batch, where each block is gathered for each of them."""
BREADTH_FIRST = "gpipe"
"""The schedule of sharded copies that gathers each block twice in all, with activations of all micro-batches. Without
one of both some models do not fit, or gather far too often."""

# Breadth: how many are looked at.
MAX_MICROBATCHES = 128
"""Time against more cuts of the batch: with more, some pipelines of hundreds of layers wait less."""
WIDTH = 6
"""Partitions of a question to the dynamic program: more cost estimates, fewer miss cuts that queues favour."""
NUM_IMPROVED = 8
"""The number of best candidates, and of best places, that are improved: more cost estimates; fewer trust the first cut
more."""
NUM_ORDERED = 2
"""The number of best places for which orders are searched, each with the effort of `ORDER_SECONDS`: more cost that
each."""
ORDER_SECONDS: Seconds = 0.15
"""Effort of an order search: larger finds shorter orders and delays every plan; smaller leaves more waits."""
NUM_FINALISTS = 6
"""The candidates that are made into plans and simulated in full: more cost a filled plan each; fewer trust the estimate
of filling more."""
NUM_SIBLINGS = 4
"""The other cuts of the best layout that are simulated too where work is filled in: more cost a filled plan each; fewer
trust the estimate of filling more."""
MAX_ATTEMPTS = 4
"""The most candidates of sharded copies with two backbones that are simulated in full until one fits in memory: fewer
may miss a plan that fits."""
MAX_AGAIN = 2
"""The number of searches that follow where the best do not fit, or are slower than estimated: more take longer, fewer
may miss a plan that fits."""

# Size: what is too large to be tried.
MOST_DEALT = 20_000
"""Ways to deal out layers to units that a lower bound looks at: more costs time, fewer gives a looser bound."""
MAX_UNEQUAL_UNITS = 8
"""The most ranks of a pipeline with unequal replicas, and the most stages of two backbones that are cut at once: the
time of the dynamic programs grows with its cube."""
BUCKETS = (2, 4, 8, 16, 32)
"""Parts of a stage whose gradients are summed apart: more parts cost estimates, and gain what latency allows."""
MAX_BUCKETED_FORWARDS = 1024
"""Stages x buckets x micro-batches of what is tried in buckets: more cost time where buckets gain least."""
MAX_SHARDED_FORWARDS = 2048
"""Blocks x micro-batches of sharded copies: larger ones take seconds to simulate, and gather too often to win."""
MAX_ACTIONS = 8192
"""Forwards and backwards of an order that is searched: in the effort of a search larger ones hardly improve."""
TICK: Seconds = 1e-7
"""The order search counts whole ticks: coarser ones round short stages away, finer ones gain nothing."""

# Trust: when enough is known.
SLACK = 1.3
"""The dearest stage that a question allows, in even shares: more makes the dynamic program slower, less asks again."""
GROWTH = 2.0
"""The factor from one limit to the next, below which chains are asked for while nothing is known that fits: more asks
less often for more."""
NUM_PAIRS = 5
"""Numbers of micro-batches of two backbones that are looked at for each kind and arrangement: more cost estimates."""
NUM_OF_ARRANGEMENT = 2
"""The number of candidates of each kind and arrangement of ranks that get buckets before the best are improved: more
cost estimates, with none those whose sums take long are left out."""
NUM_OF_KIND = 4
"""The number of arrangements of each kind that are improved too: more cost estimates; with fewer a kind is compared at
worse sizes."""
SLACKS = (0, 2)
"""Micro-batches that stages of such orders hold beyond 1F1B's: each costs an estimate, the second gains where p is
large and there is memory."""
NUM_THOROUGH = 2
"""The best places of opposite directions that are asked about without narrow caps and with replicas: each takes
seconds."""
PAIR_ACTIONS = 1024
"""Stages x micro-batches of both backbones: larger ones take seconds to order and to simulate, and gain little."""
PAIR_SLACK = 1.03
"""The largest load of a device that a question about two backbones allows at first, in even shares: as `SLACK`."""
CAP_STEP = 1.06
"""The factor by which `PAIR_SLACK` grows, itself growing: larger finds more slowly, smaller asks more often."""
FEW_LAYERS = 20
"""Layers of each of two backbones between which a quick question cuts, at least: more is slower, fewer gives worse
pairs."""
FEW_STATES = 160
"""Layers times devices of a quick question, at least, so that questions about few devices cut between more layers."""
MORE_LAYERS = 32
"""The most layers of a question that prepares a thorough one: too many or too few make that one slower."""
EFFORT = 700_000
"""States of pairs of partitions that one search looks at, or it is given up: more takes seconds, fewer leaves pairs at
coarser places to cut."""
QUICK_EFFORT = 200_000
"""States until the first pair of partitions of all layers, at most: twice what is needed where memory is ample. More
takes seconds a pair where it is tight, fewer leaves pairs at coarser places to cut."""
NEAR = 1.01
"""Pairs of partitions this many times worse than the best are estimated too: more is slower, less trusts their values
more."""
ESTIMATE_TOLERANCE = 1.02
"""An estimate this factor above the best full simulation ends the finals: more cost plans; fewer miss a plan that fills
better than estimated."""
CLOSE = 1.0005
"""A sharded estimate so near the best full simulation is not looked into: larger is faster and loses up to that."""
ENOUGH = 5e-3
"""A plan that is this near to the time without any wait gets no other orders: larger is faster and loses up to that."""
BETTER = 1 - 1e-9
"""A change must gain more than rounding, or moves would go round in circles."""
SIDE_BY_SIDE = 0.015
"""The least part of the layers' time beside the longest way through them for which branches are looked at: less
searches models for hardly more than a near-tie."""
HEAVY = 1 / 32
"""Encoders of this part of a device's memory may be kept off some ranks: less tries it for small ones in vain."""
GAINED = 1.1
"""What is this many times worse than the best is judged with other schedules, if it is 1F1B, or with moved cuts, if it
has several stages on a worker: more cost estimates, fewer miss what gains most from that. 1F1B of few micro-batches may
be worse, up to `HOPELESS`."""
HOPELESS = 1.25
"""What is this many times worse than the best, or than what a search has to beat, gets no moved cuts and no searched
orders: more cost estimates, fewer may miss a good one. As 1F1B it gets no other schedule either, unless its waits at
both ends are a larger part."""
PROMISING = 1.05
"""Other schedules this many times worse than the best so far are left out: more cost estimates of what moved cuts and
buckets rarely make up for. An estimate that the simulation exceeds by this factor is corrected."""
LEAST_RAMP = 0.25
"""The least part of the waits at both ends of a pipeline that several stages on a worker and split backwards leave:
less looks at more places, more may leave out a good one."""
TABLE_CUTOFF = 2.0
"""Candidates this many times slower than the best are still listed for the user: it changes no plan."""
