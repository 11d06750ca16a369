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
"""The most micro-batches of a candidate: with more, some pipelines of hundreds of layers wait less, but searches take
longer."""
WIDTH = 6
"""The partitions that the dynamic program keeps for a question: more cost estimates, fewer miss cuts that queues
favour."""
NUM_IMPROVED = 8
"""The numbers of best candidates and of best places that are improved: more cost estimates; fewer trust the first cut
more."""
NUM_ORDERED = 3
"""The number of best places for which orders are searched: each costs the effort of `ORDER_SECONDS`."""
ORDER_SECONDS: Seconds = 0.15
"""The effort of an order search: a larger one finds shorter orders and delays every plan; a smaller one leaves more
waits."""
NUM_FINALISTS = 6
"""The number of candidates that are made into plans and simulated in full: each costs a filled plan; fewer trust the
estimate of filling more."""
NUM_SIBLINGS = 4
"""The number of other cuts of the best layout that are simulated too, if frozen work fills bubbles: each costs a filled
plan; fewer trust the estimate of filling more."""
MAX_ATTEMPTS = 4
"""The most candidates of sharded copies with two backbones that are simulated in full until one fits in memory: fewer
may miss a plan that fits."""
MAX_AGAIN = 2
"""The number of searches that follow if the best candidates do not fit, or are slower than estimated: more take longer,
fewer may miss a plan that fits."""

# Size: what is too large to be tried.
MOST_DEALT = 20_000
"""The most ways to give layers to units that a lower bound looks at: more cost time, fewer give a looser bound."""
MAX_UNEQUAL_UNITS = 8
"""The most ranks of a pipeline with unequal replicas, and the most stages of two backbones that are cut at once: the
time of the dynamic programs grows with its cube."""
BUCKETS = (2, 4, 8, 16, 32)
"""The numbers of buckets of a stage that are tried: each costs an estimate; larger ones gain as far as latency
allows."""
MAX_BUCKETED_FORWARDS = 1024
"""The most stages x buckets x micro-batches of a candidate in buckets: larger ones cost time and gain least."""
MAX_SHARDED_FORWARDS = 2048
"""The most blocks x micro-batches of sharded copies: larger ones take seconds to simulate, and gather too often to
win."""
MAX_ACTIONS = 8192
"""The most forwards and backwards of an order that is searched: in the effort of a search larger ones hardly
improve."""
TICK: Seconds = 1e-7
"""The unit of time of the order search, which counts whole ticks: coarser ones round short stages away, finer ones gain
nothing."""

# Trust: when enough is known.
SLACK = 1.3
"""The longest stage that a question allows at first, in even shares of the work: more makes the dynamic program slower,
with less it is asked more often."""
GROWTH = 2.0
"""The factor from one limit of chains to the next while no candidate fits: with a larger one the dynamic program is
asked less often for more."""
NUM_PAIRS = 5
"""How many pairs of numbers of micro-batches of two backbones are looked at for each kind and arrangement: more cost
estimates."""
NUM_OF_ARRANGEMENT = 2
"""The number of candidates of each kind and arrangement of ranks that get buckets before the best are improved: more
cost estimates; with none, candidates whose gradient sums take long are left out."""
NUM_OF_KIND = 4
"""The number of arrangements of each kind that are improved too: more cost estimates; with fewer a kind is compared at
worse sizes."""
SLACKS = (0, 2)
"""The numbers of micro-batches beyond 1F1B's that stages of two backbones may hold: each costs an estimate, the second
gains if there are many workers and memory."""
NUM_THOROUGH = 2
"""The number of best places of two backbones over the same devices that are searched longer, with replicas: each takes
seconds."""
PAIR_ACTIONS = 1024
"""The most stages x micro-batches of both backbones: larger ones take seconds to order and to simulate, and gain
little."""
PAIR_SLACK = 1.03
"""The largest load of a device that a question about two backbones allows at first, in even shares of the work: compare
`SLACK`."""
CAP_STEP = 1.06
"""The factor by which the largest load grows until some pair is found; the factor grows too. A larger one makes
questions slower, a smaller one makes them more."""
FEW_LAYERS = 20
"""The least number of layers of each of two backbones between which a quick question cuts: more are slower, fewer give
worse pairs."""
FEW_STATES = 160
"""The least number of layers times devices of a quick question, so that questions about few devices cut between more
layers."""
MORE_LAYERS = 32
"""The most layers of a question that prepares a thorough one: too many or too few make the thorough one slower."""
EFFORT = 700_000
"""The most states that a search of pairs of partitions looks at before it gives up: more take seconds, fewer leave
pairs with coarser cuts."""
QUICK_EFFORT = 200_000
"""The most states until the first pair of partitions of all layers is found, twice the number that is needed if memory
is ample. More take seconds a pair if memory is tight, fewer leave pairs with coarser cuts."""
NEAR = 1.01
"""Pairs of partitions up to this factor worse than the best are estimated too: more are slower, fewer trust their
values more."""
ESTIMATE_TOLERANCE = 1.02
"""An estimate this factor above the best full simulation ends the full simulations: a larger factor costs plans, a
smaller one misses a plan that fills better than estimated."""
CLOSE = 1.0005
"""A sharded estimate must be below the best full simulation by this factor to be simulated: a larger factor is faster
and loses up to that."""
ENOUGH = 5e-3
"""A plan longer than the time without any wait by at most this part gets no other orders: a larger part is faster and
loses up to that."""
BETTER = 1 - 1e-9
"""A change must bring the time below this part of the time before: more than rounding, or moves would repeat for
ever."""
SIDE_BY_SIDE = 0.015
"""The least part of the layers' time beside the longest way through them for which branches are looked at: with less,
models are searched for hardly more than a near-tie."""
HEAVY = 1 / 32
"""Encoders that take at least this part of a device's memory may be kept off some ranks: with less it is tried for
small ones in vain."""
GAINED = 1.1
"""Candidates up to this factor worse than the best are judged with other schedules, if they are 1F1B, or with moved
cuts, if they have several stages on a worker: a larger factor costs estimates, a smaller one misses candidates that
gain most from that. 1F1B of few micro-batches may be worse, up to `HOPELESS`."""
HOPELESS = 1.25
"""Candidates worse than the best, or than the limit of a search, by more than this factor get no moved cuts and no
searched orders: a larger factor costs estimates, a smaller one may miss a good candidate. As 1F1B they get no other
schedule either, unless their waits at both ends are a larger part."""
PROMISING = 1.05
"""Other schedules worse than the best so far by more than this factor are left out: a larger factor costs estimates of
losses that moved cuts and buckets rarely make up for. An estimate that the simulation exceeds by this factor is
corrected."""
LEAST_RAMP = 0.25
"""The least part of the waits at both ends of a pipeline that several stages on a worker and split backwards leave:
with less, more places are looked at; with more, a good one may be left out."""
TABLE_CUTOFF = 2.0
"""Candidates up to this factor slower than the best are still listed for the user: it changes no plan."""
