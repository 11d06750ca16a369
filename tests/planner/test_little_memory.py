"""Where pipelines fit only if they hold little, each place of the encoders' weights is searched without a limit."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.planner.choosing.best import GAIN, best_choice
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting


def setting_of(seed: int) -> Setting:
    """A model on four devices that have room for few activations beside the encoders' weights."""
    random, sketch = Random(seed), synthetic.Sketch(inputs=("raw",))
    hidden, frozen = sketch.tensor("raw", 10), random.choice((2, 5, 10)) * 10**7
    for number in range(random.randint(3, 6)):
        written = sketch.tensor(f"text{number}", 10)
        name = f"encode{number}"
        sketch.layer(name, "text_encoder", [hidden], [written], seconds=1e-3, parameters=frozen, trained=False, kept=0)
        hidden = written
    layers, elements = random.choice((4, 6, 8)), random.choice((10, 10**6, 10**7))
    for number in range(layers):
        last = number == layers - 1
        written = sketch.tensor("loss" if last else f"h{number}", elements, grad=True, dtype="float32")
        kept = 5 * 10**7 / elements
        sketch.layer(
            f"layer{number}",
            "unet",
            [hidden],
            [written],
            seconds=0.1,
            parameters=10**6,
            kept=kept,
            input_grad=number > 0,
        )
        hidden = written
    cluster = synthetic.cluster(4, memory=random.uniform(0.25, 1.2), intra_gb=100)
    devices = tuple(replace(device, host_bandwidth=10 * synthetic.GB) for device in cluster.devices)
    return Setting(
        profile=sketch.profile(),
        cluster=replace(cluster, devices=devices),
        workload=synthetic.workload(4, checkpointed=random.choice(((), ("*",)))),
    )


@pytest.mark.parametrize("seed", [13, 37])
def test_a_free_choice_is_as_fast_as_the_best_with_the_encoders_in_one_place(seed):
    """On the device only one micro-batch at a time fits, and from the host the model is up to twice as fast."""
    setting = setting_of(seed)
    found = best_choice(setting)
    alone = [best_choice(replace(setting, given=Given(encoders=place))) for place in ("device", "host")]
    slow, fast = (one.fastest.step for one in alone)
    assert slow > 1.3 * fast
    assert found.fastest.step <= fast * (1 + GAIN)
    assert found.search.is_tight or alone[0].search.is_tight
