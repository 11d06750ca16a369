from dataclasses import replace
from math import prod

from planner import synthetic

from benchmarks.rivals.quantised import base_of, quantised
from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.planner.pricing.setting import Setting

LAYERS = (2, 3)  # of the trained part; 10 million weights each


def setting_of(*, is_frozen):
    profile = synthetic.chain([1.0, 2.0, 3.0, 4.0], parameters=[10**7] * 4, frozen=0.5)
    graph = profile.graph
    names = graph.parameters_of([graph.backbone_layers[index] for index in LAYERS])
    parameters = tuple(
        replace(p, shape=(1000, prod(p.shape) // 1000), dtype="bfloat16", is_trainable=False)
        if is_frozen and p.name in names
        else p
        for p in graph.parameters
    )
    profile = replace(profile, graph=replace(graph, parameters=parameters))
    return Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(8))


def bytes_of(setting):
    return Ledger(graph=setting.graph, workload=Workload(batch=8)).frozen_of(setting.graph.backbone_layers)


def test_only_frozen_matrices_of_the_trained_part_are_stored_in_fewer_bytes():
    setting = setting_of(is_frozen=True)
    assert len(base_of(setting)) == len(LAYERS)
    assert bytes_of(setting) == 2 * 2 * 10**7
    assert bytes_of(quantised(setting, 1.0)) == 2 * 10**7
    assert bytes_of(quantised(setting, 0.516)) == 2 * 5_160_000
    encoders = [(p.name, p.num_bytes) for p in setting.graph.parameters if p.name not in base_of(setting)]
    assert encoders == [
        (p.name, p.num_bytes) for p in quantised(setting, 0.5).graph.parameters if p.name not in base_of(setting)
    ]
    assert quantised(setting, 0.5).profile.layers == setting.profile.layers


def test_a_model_that_is_trained_as_a_whole_has_no_base():
    assert not base_of(setting_of(is_frozen=False))
