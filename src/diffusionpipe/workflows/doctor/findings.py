"""The findings of `diffusionpipe doctor`: one line each, ok, warn or fail, with the remedy."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.costs.cluster import slow_pairs
from diffusionpipe.ir.words import bytes_in_words
from diffusionpipe.runtime.job.interfaces import GLOO, unknown_interface
from diffusionpipe.runtime.job.loopback import is_loopback
from diffusionpipe.units import Bytes
from diffusionpipe.workflows.doctor.facts import Facts

LEAST_SHARED: Bytes = 2**28
"""Least bytes of /dev/shm for each rank: NCCL and the data workers pass buffers through it. Docker gives 64 MiB."""
LEAST_MEMORY: Bytes = 2**31
"""Least bytes of host memory for each rank."""
LEAST_DISK: Bytes = 10 * 2**30
LEAST_FILES = 1024
OLDEST_NCCL = (2, 19)
SLOWEST = 1e8
"""The bytes a second below which a link is called slow in any case: less than Gigabit Ethernet has."""


class Status(StrEnum):
    """How bad a finding is: fine, a warning, or a fault that stops a job."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report: a name, its status, a text, and a remedy."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def findings_of(facts: Sequence[Facts]) -> tuple[Finding, ...]:
    """The findings from the facts of all ranks, in the order of the report."""
    return (
        _versions(facts),
        _optimizers(facts),
        _devices(facts),
        _names(facts),
        _interfaces(facts),
        _per_rank(facts, [one.shared_memory for one in facts], _SHARED),
        _per_rank(facts, [one.host_memory for one in facts], _MEMORY),
        _disk(facts),
        _files(facts),
    )


def _finding(name: str, text: str, *problems: tuple[Status, str, str]) -> Finding:
    """The finding of this name: the first of the problems (status, text, remedy); without problems `text`, as ok."""
    for status, problem, remedy in problems:
        return Finding(name=name, status=status, text=problem, remedy=remedy)
    return Finding(name=name, status=Status.OK, text=text)


def _versions(facts: Sequence[Facts]) -> Finding:
    names = {name: None for one in facts for name, _ in one.versions}
    by_rank = {name: [version for one in facts for own, version in one.versions if own == name] for name in names}
    problems = list(_differences(by_rank, Status.FAIL))
    nccl = dict(facts[0].versions).get("NCCL", "")
    if nccl and tuple(map(int, nccl.split(".")[:2])) < OLDEST_NCCL:
        problems.append((Status.WARN, f"NCCL {nccl} is old", "install a torch with NCCL 2.19 or newer"))
    return _finding("versions", ", ".join(" ".join(pair) for pair in facts[0].versions), *problems)


def _optimizers(facts: Sequence[Facts]) -> Finding:
    """The finding about the installed packages of optimizers: a warning where ranks have several versions of one.

    A package may be missing on all ranks: a run needs only the package that its recipe names.
    """
    names = sorted({name for one in facts for name, _ in one.optimizers})
    by_rank = {name: [dict(one.optimizers).get(name, "none") for one in facts] for name in names}
    own = ", ".join(" ".join(pair) for pair in facts[0].optimizers)
    none = "torch's alone; pip install 'diffusionpipe[optimizers]' adds others"
    return _finding("optimizers", own or none, *_differences(by_rank, Status.WARN))


def _differences(by_rank: Mapping[str, Sequence[str]], status: Status) -> Iterator[tuple[Status, str, str]]:
    """(status, problem, remedy) for each package of which ranks have several versions.

    `by_rank`: package -> the version of each rank. `status`: the status of these problems.
    """
    for name, versions in by_rank.items():
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, version in enumerate(versions):
            ranks[version].append(rank)
        if len(ranks) > 1:
            which = ", ".join(f"{version} on {listed(some)}" for version, some in ranks.items())
            yield status, f"{name} differs: {which}", f"install one {name} on all machines"


def _devices(facts: Sequence[Facts]) -> Finding:
    problems = []
    for kind in ("cpu", "cuda"):
        asked = [rank for rank, one in enumerate(facts) if one.asked == kind]
        if asked and len(asked) < len(facts):
            others = "and the others did not"
            problems.append((Status.FAIL, f"{listed(asked)} asked for {kind} {others}", "give all ranks one --device"))
    on_cpu = [rank for rank, one in enumerate(facts) if one.device == "cpu" and one.asked != "cpu"]
    if len(on_cpu) < len(facts) and on_cpu:
        remedy = "start at most one rank per GPU, or use --device cpu"
        problems.append((Status.FAIL, f"{listed(on_cpu)} would compute on CPUs and the others on GPUs", remedy))
    elif on_cpu and facts[0].asked == "cuda":
        remedy = "check the driver and CUDA_VISIBLE_DEVICES, or use --device cpu"
        problems.append((Status.FAIL, "no rank finds a CUDA device", remedy))
    sharing: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, one in enumerate(facts):
        if one.device_id:
            sharing[one.host, one.host_id, one.device_id].append(rank)
    for (host, *_), ranks in sharing.items():
        if len(ranks) > 1:
            remedy = "start at most one rank per GPU, and give every task a GPU of its own"
            problems.append((Status.FAIL, f"{listed(ranks)} share a GPU of {host}", remedy))
    places: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(facts):
        memory = f" with {one.device_free / 2**30:.1f} GiB free" if one.device_free else ""
        places[f"{one.device}{memory} on {one.host}"].append(rank)
    return _finding("devices", "; ".join(f"{listed(ranks)}: {place}" for place, ranks in places.items()), *problems)


def _names(facts: Sequence[Facts]) -> Finding:
    problems = []
    hosts = dict.fromkeys(one.host for one in facts)
    for one in facts:
        if len(hosts) > 1 and is_loopback(one.listens) and GLOO not in dict(one.named):
            found = ", ".join(one.addresses) or "nothing"
            remedy = f"give {one.host} its network address in /etc/hosts, or set {GLOO} to its network interface"
            problems.append((Status.FAIL, f"{one.host} resolves to {found}, which other machines cannot reach", remedy))
    text = "one machine" if len(hosts) == 1 else f"{len(hosts)} machines, each with an address that others can reach"
    return _finding("names", text, *problems)


def _interfaces(facts: Sequence[Facts]) -> Finding:
    problems = []
    is_one_machine = len({one.host for one in facts}) == 1
    for one in facts:
        for variable, value in one.named:
            what, wrong = f"{variable}={value} names", unknown_interface(variable, value, one.interfaces)
            remedy = f"set {variable} to an interface that `ip address` shows with an address, or unset it"
            if wrong:
                problems.append((Status.FAIL, f"{what} no interface of {one.host}: {wrong}", remedy))
            elif variable == GLOO and not one.listens:
                problems.append((Status.FAIL, f"{what} an interface of {one.host} without an address", remedy))
            elif variable == GLOO and is_loopback(one.listens) and not is_one_machine:
                remedy = f"set {variable} to the interface that joins the machines"
                wrong = "an interface that other machines cannot reach"
                problems.append((Status.FAIL, f"{what} the loopback of {one.host}, {wrong}", remedy))
    named = dict.fromkeys(f"{name}={value}" for one in facts for name, value in one.named)
    return _finding("interfaces", ", ".join(named) or "gloo and NCCL choose", *problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    name: str
    """The name of the resource in findings, such as "host memory"."""
    least: Bytes
    """The least that each rank needs, in bytes."""
    remedy: str


_SHARED = _Need(
    name="/dev/shm",
    least=LEAST_SHARED,
    remedy=f"give it {LEAST_SHARED / 2**20:.0f} MiB for each rank: docker run --shm-size, or a volume of kind Memory",
)
_MEMORY = _Need(
    name="host memory",
    least=LEAST_MEMORY,
    remedy=f"a rank needs {LEAST_MEMORY / 2**30:.0f} GiB at least: end other programs, or start fewer ranks there",
)


def _per_rank(facts: Sequence[Facts], sizes: Sequence[Bytes], need: _Need) -> Finding:
    """The finding about a resource that the ranks of a machine share, each of which needs a part.

    `sizes`: bytes of the resource that each rank sees; 0: the machine does not say.
    """
    hosts = [one.host for one in facts]
    least: dict[str, Bytes] = {}  # ranks of a machine may be in containers, each with its own
    for host, size in zip(hosts, sizes, strict=True):
        least[host] = min(size, least.get(host, size))
    # Only machines that say how much there is.
    parts = [(host, size // hosts.count(host)) for host, size in least.items() if size]
    problems = [
        (Status.FAIL, f"{host} has {bytes_in_words(part)} of {need.name} for each rank", need.remedy)
        for host, part in parts
        if part < need.least
    ]
    text = f"{bytes_in_words(min(part for _, part in parts))} for each rank" if parts else "unknown"
    return _finding(need.name, text, *problems)


def _disk(facts: Sequence[Facts]) -> Finding:
    host, least = min(((one.host, one.disk) for one in facts), key=lambda pair: pair[1])
    text = f"{least / 2**30:.0f} GiB free in the folder"
    remedy = "checkpoints need about 16 bytes for each trained parameter: free disk space, or choose another --folder"
    return _finding("disk", text, *[(Status.WARN, f"{text} on {host}", remedy)] * (least < LEAST_DISK))


def _files(facts: Sequence[Facts]) -> Finding:
    host, least = min(((one.host, one.open_files) for one in facts), key=lambda pair: pair[1])
    text = f"{least:,} open files allowed"
    return _finding(
        "open files", text, *[(Status.WARN, f"{text} on {host}", "run `ulimit -n 65536`")] * (least < LEAST_FILES)
    )


NEEDED = ("versions", "devices", "names", "interfaces", "connections")
"""Names of the findings whose faults end the examination: ranks would wait for each other for minutes."""


def links_finding(rates: Mapping[tuple[int, int], float], hosts: Sequence[str]) -> Finding:
    """The finding about slow connections between pairs of ranks.

    `rates`: pair of ranks -> measured bytes a second. `hosts`: the name of each rank's machine.
    """
    if not rates:
        return Finding(name="links", status=Status.OK, text="one rank has none")
    relative = slow_pairs(rates, hosts)
    slow = {pair: rate for pair, rate in rates.items() if rate < SLOWEST or pair in relative}
    problems = []
    if slow:
        which = ", ".join(f"{one}-{other} with {_rate(rate)}" for (one, other), rate in sorted(slow.items()))
        remedy = "look at the cables, at `nvidia-smi topo -m`, and at the interface that NCCL_SOCKET_IFNAME names"
        problems.append((Status.WARN, f"slow between ranks {which}", remedy))
    text = f"{_rate(min(rates.values()))} to {_rate(max(rates.values()))} between any two ranks"
    return _finding("links", text, *problems)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= SLOWEST else f"{rate / 1e6:.1f} MB/s"


def listed(ranks: Sequence[int]) -> str:
    """The ranks in words: "rank 1", or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
