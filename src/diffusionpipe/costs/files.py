"""Files of profiles and clusters: the same JSON as schedules and plans (see `diffusionpipe.ir.files`).

A number that reading accepts is one that planning can use: no time is negative, and none is 0 where work is done.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from diffusionpipe.costs.cluster import Cluster
from diffusionpipe.costs.graph import BYTES_OF_DTYPE, BYTES_OF_STORED, LayerSpec, ModelGraph, ParameterSpec, TensorSpec
from diffusionpipe.costs.profile import Profile
from diffusionpipe.errors import FileFormatError
from diffusionpipe.files.versions import Document
from diffusionpipe.ir.files import MAX_PROBLEMS, Format, from_text, read_file, to_text, write_file


def _backbones_of(profile: Document) -> Document:
    """The profile of version 1 as one of version 2: the graph's names of loss and prediction move to a backbone."""
    graph = profile.get("graph")
    if isinstance(graph, dict):
        names = {new: graph.pop(old) for old, new in (("output", "loss"), ("prediction", "prediction")) if old in graph}
        graph.setdefault("backbones", [names])
    return profile


def _without_kept(profile: Document) -> Document:
    """The profile of version 2, unchanged; it does not say what a split backward keeps (see `Profile.counts_kept`)."""
    return profile


PROFILE = Format("diffusionpipe-profile", Profile, (_backbones_of, _without_kept))
CLUSTER = Format("diffusionpipe-cluster", Cluster)

LEAST_TIME, MOST_TIME = 1e-12, 1e9
"""The least and the largest time of a layer that does work, in seconds: a thousandth of a nanosecond and 30 years. With
these limits a sum or a quotient of times is finite."""
MOST_COUNT = 2**60
"""The most bytes of a layer, samples of a batch, or elements of a tensor in a profile."""

_Named = LayerSpec | TensorSpec | ParameterSpec
ANY_CPU = "CPU"
"""A cluster may give its devices this name: a profile of any CPU is then accepted."""


def profile_to_text(profile: Profile) -> str:
    """The JSON text of a profile file that holds `profile`."""
    return to_text(profile, PROFILE)


def profile_from_text(text: str, *, source: str = "profile") -> Profile:
    """The profile in the JSON text of a profile file; `source` names the text in errors.

    Raises:
        FileFormatError: the text is not a profile file, or a value in it cannot be planned with: a missing or negative
            time, a time of 0 where work is done, an unknown name; layer and field are named.
    """
    profile = from_text(text, PROFILE, source=source)
    _check(profile, source)
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile to `path` as a JSON file, which is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
        ValueError: a number is NaN or infinite.
    """
    write_file(profile, path, PROFILE)


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file.

    Raises:
        FileFormatError: as `profile_from_text`, or the file cannot be read.
    """
    profile = read_file(path, PROFILE)
    _check(profile, str(path))
    return profile


def cluster_from_text(text: str, *, source: str = "cluster") -> Cluster:
    """The cluster in the JSON text of a cluster file; `source` names the text in errors.

    Raises:
        FileFormatError: the text is not a cluster file, or a latency, bandwidth, memory or speed is outside its range.
    """
    return from_text(text, CLUSTER, source=source)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster to `path` as a JSON file, which is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
        ValueError: a number is NaN or infinite.
    """
    write_file(cluster, path, CLUSTER)


def check_model(profile: Profile, model: ModelGraph, *, source: str) -> None:
    """Check that the profile was made for this model; `source` names the profile in errors.

    Raises:
        FileFormatError: the profile belongs to another model; the message has the first difference.
    """
    if profile.graph != model:
        raise FileFormatError(
            f"{source}: this profile was made for another model: {_difference(profile.graph, model)}\n"
            "Profile this recipe: diffusionpipe profile RECIPE --out FILE"
        )


def check_kept(profile: Profile, *, source: str) -> None:
    """Check that the profile counts the bytes that a split backward keeps for its weight gradients.

    Raises:
        FileFormatError: it does not, as files of earlier versions; the message has the command that makes it again.
    """
    if not profile.counts_kept:
        raise FileFormatError(f"{_without_what_is_kept(source)}; make it again: {_made_anew(source)}")


def kept_warning(profile: Profile, *, source: str) -> str:
    """A warning that no schedule with split backwards is tried, as the profile does not count the bytes that they keep.

    It has the command that makes the profile again. "" where the profile counts them.
    """
    if profile.counts_kept:
        return ""
    return (
        f"{_without_what_is_kept(source)}. So no schedule that splits the backward is tried, though one may be faster. "
        f"To try them, make the profile again: {_made_anew(source)}"
    )


def _without_what_is_kept(source: str) -> str:
    return (
        f"{source}: this profile was made by an earlier version, which did not count what a split backward keeps in "
        "memory"
    )


def _made_anew(source: str) -> str:
    return f"diffusionpipe profile RECIPE --out {source}"


def has_device(cluster: Cluster, name: str, device_type: str) -> bool:
    """Whether a device of the cluster has this name, or is called "CPU" while `device_type` is "cpu"."""
    names = {device.name for device in cluster.devices}
    return name in names or (device_type == "cpu" and ANY_CPU in names)


def check_device(profile: Profile, cluster: Cluster, *, source: str) -> None:
    """Check that the cluster has the device that was profiled, to which speeds are relative.

    Raises:
        FileFormatError: it does not have it.
    """
    if not has_device(cluster, profile.device, profile.device_type):
        names = ", ".join(sorted({device.name for device in cluster.devices}))
        raise FileFormatError(
            f"{source}: this profile was made on {profile.device}, but the cluster {cluster.name} has {names}\n"
            "Profile on that device, or compute a profile with diffusionpipe profile --analytic; or name the profiled "
            "device in the cluster file and give the others their speed relative to it."
        )


def _check(profile: Profile, source: str) -> None:
    _refuse(list(_graph_problems(profile.graph)), source)
    _refuse([*_zero_times(profile), *_extremes(profile)], source)


def _refuse(problems: list[str], source: str) -> None:
    if problems:
        rest = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise FileFormatError("\n  ".join([f"{source}: not a valid {PROFILE.name}", *problems[:MAX_PROBLEMS], *rest]))


def _graph_problems(graph: ModelGraph) -> Iterator[str]:
    """A sentence for each fault: names that nothing has or two things have, unknown dtypes, negative sides."""
    named: tuple[tuple[str, Sequence[_Named]], ...] = (
        ("layer", graph.layers),
        ("tensor", graph.tensors),
        ("parameter", graph.parameters),
    )
    for kind, things in named:
        counts = Counter(thing.name for thing in things)
        yield from (f"{kind} {name} occurs {count} times" for name, count in counts.items() if count > 1)
    specs: tuple[TensorSpec | ParameterSpec, ...] = (*graph.tensors, *graph.parameters)
    for spec in specs:
        known = (*BYTES_OF_DTYPE, *BYTES_OF_STORED) if isinstance(spec, ParameterSpec) else tuple(BYTES_OF_DTYPE)
        if spec.dtype not in known:
            yield f"{spec.name}: dtype is {spec.dtype!r}; known are {', '.join(known)}"
        if any(side < 0 for side in spec.shape):
            yield f"{spec.name}: the shape {spec.shape} has a negative side"
    tensors, parameters = {spec.name for spec in graph.tensors}, {spec.name for spec in graph.parameters}
    # An estimate comes from the pass before, so a layer may read it that runs before the one that writes it.
    written = {*graph.inputs, *graph.estimates}
    losses = [backbone.loss for backbone in graph.backbones]
    for place, names in (("graph.inputs", graph.inputs), ("graph.backbones", losses)):
        yield from (f"{place}: there is no tensor {name}" for name in names if name not in tensors)
    for layer in graph.layers:
        lost = [name for name in layer.parameters if name not in parameters]
        yield from (f"{layer.name}: there is no parameter {name}" for name in lost)
        yield from (f"{layer.name}: there is no tensor {name}" for name in layer.writes if name not in tensors)
        # A file may name tensors that it does not describe.
        unknown = [name for name in layer.reads if name not in tensors or name not in written]
        yield from (f"{layer.name} reads {name}, which no layer before it writes" for name in unknown)
        written.update(layer.writes)


def _zero_times(profile: Profile) -> Iterator[str]:
    """A sentence for each time of 0 where a layer does work."""
    graph = profile.graph
    trained = {parameter.name for parameter in graph.parameters if parameter.is_trainable}
    for spec, layer in zip(graph.layers, profile.layers, strict=True):
        is_backward = any(graph.tensor(name).needs_gradient for name in spec.writes)
        has_input_grad = is_backward and any(graph.tensor(name).needs_gradient for name in spec.reads)
        has_weight_grad = is_backward and not trained.isdisjoint(spec.parameters)
        columns = (
            ("forward", layer.forward, True),
            ("forward_only", layer.forward_only, True),
            ("input_grad", layer.input_grad, has_input_grad),
            ("weight_grad", layer.weight_grad, has_weight_grad),
        )
        for field, values, is_work in columns:
            # Times that were not measured are an empty tuple.
            for batch, value in zip(profile.batch_sizes, values, strict=bool(values)):
                if is_work and value == 0:
                    yield f"{layer.name}: {field} is 0 for {batch} samples; it must be positive: profile again"


def _extremes(profile: Profile) -> Iterator[str]:
    """A sentence for each number that is too small or too large to plan with; no machine has measured it."""
    if profile.batch_sizes[-1] > MOST_COUNT:
        yield f"batch_sizes: {profile.batch_sizes[-1]:.3g} samples are more than 2^60"
    for layer in profile.layers:
        times = {
            "forward": layer.forward,
            "forward_only": layer.forward_only,
            "input_grad": layer.input_grad,
            "weight_grad": layer.weight_grad,
            "cast": (layer.cast,),
            "host": (layer.host.forward, layer.host.input_grad, layer.host.weight_grad),
        }
        for field, values in times.items():
            for value in values:
                if value and not LEAST_TIME <= value <= MOST_TIME:
                    yield f"{layer.name}: {field} holds {value:.3g} s; a time is {LEAST_TIME:g} to {MOST_TIME:g} s"
        sizes = {
            "activation": layer.activation,
            "workspace": layer.workspace,
            "drawing": layer.drawing,
            "copies": (layer.copies,),
        }
        for field, counts in sizes.items():
            if max(counts, default=0) > MOST_COUNT:
                yield f"{layer.name}: {field} holds more than 2^60 bytes"
    specs: tuple[TensorSpec | ParameterSpec, ...] = (*profile.graph.tensors, *profile.graph.parameters)
    for spec in specs:
        if prod(spec.shape) > MOST_COUNT:
            yield f"{spec.name}: a tensor of the shape {spec.shape} has more than 2^60 elements"
    if profile.update > 1:
        yield f"update is {profile.update:.3g} s for each trained parameter; it is at most 1 s: profile again"


def _difference(profiled: ModelGraph, model: ModelGraph) -> str:
    """The first difference between the profiled graph and the model's graph, in words for an error."""
    names = [layer.name for layer in profiled.layers], [layer.name for layer in model.layers]
    if names[0] != names[1]:
        only = [[n for n in mine if n not in set(other)] for mine, other in (names, names[::-1])]
        extra = "; ".join(f"{who} has {n[0]}" for who, n in zip(("only it", "only the model"), only, strict=True) if n)
        return f"it has {len(names[0])} layers, the model {len(names[1])}{'; ' + extra if extra else ''}"
    kinds: tuple[tuple[str, Sequence[_Named], Sequence[_Named]], ...] = (
        ("layer", profiled.layers, model.layers),
        ("tensor", profiled.tensors, model.tensors),
        ("parameter", profiled.parameters, model.parameters),
    )
    for kind, mine, others in kinds:
        for one, other in zip(mine, others, strict=False):
            if one != other:
                return f"{kind} {one.name} was {one}, and is {other}"
        if len(mine) != len(others):
            return f"it has {len(mine)} {kind}s, the model {len(others)}"
    return "its inputs or outputs have other names"
