"""The faults: each is planted around a real run, and doctor has to name it."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from doctor_faults.runs import NotAllowedError, Seen, as_tasks, machines, on_one_machine, on_two_machines

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to plant one of the ten faults."""

    name: str
    how: str
    run: Callable[[Path], Seen]
    finding: str
    """The name of doctor's line."""
    words: str
    """A regular expression that its text holds."""
    status: str = "fail"
    short: str = ""
    """The same for the JSON, where it holds no names."""

    def problems(self, seen: Seen) -> list[str]:
        """What is wrong with doctor's answer."""
        found = []
        if seen.status is None:
            found.append("it did not end in time")
        elif (seen.status == 0) is (self.status == "fail"):
            found.append(f"its exit status is {seen.status}")
        lines = seen.output.splitlines()
        pattern = rf"{self.status}\s+{re.escape(self.finding)}\s.*{self.words}"
        at = [number for number, line in enumerate(lines) if re.match(pattern, line)]
        if not at:
            found.append("no line names the fault")
        elif not re.match(r"\s{6,}\S", lines[at[0] + 1]):
            found.append("the line has no remedy below it")
        others = [
            line for line in seen.lines("fail", "warn") if not re.match(pattern, line) and "not tried" not in line
        ]
        if others:
            found.append(f"another line is wrong: {others[0]}")
        if "Traceback" in seen.output and "torch/distributed/run.py" not in seen.output:  # torchrun shows its own
            found.append("it shows a traceback")
        return found + self._problems_of_json(seen)

    def _problems_of_json(self, seen: Seen) -> list[str]:
        wrong = [one for one in seen.findings if one["status"] != "ok" and "not tried" not in one["text"]]
        if not seen.findings:
            return ["there is no JSON"]
        if [(one["name"], one["status"]) for one in wrong] != [(self.finding, self.status)]:
            return [f"the JSON names {', '.join(one['name'] for one in wrong) or 'nothing'}"]
        if not re.search(self.short or self.words, wrong[0]["text"]) or not wrong[0]["remedy"]:
            return [f"the JSON says: {wrong[0]['text']}"]
        return []

    def line(self, seen: Seen) -> str:
        """Doctor's line."""
        return next(iter(seen.lines(self.status)), "")


# Interfaces and names.


def unknown_interface(folder: Path) -> Seen:
    return on_one_machine(folder, "--device", "cpu", added={"GLOO_SOCKET_IFNAME": "nonesuch"})


def unknown_interface_there(folder: Path) -> Seen:
    with machines(folder) as nodes:
        return on_two_machines(folder, nodes, added=({}, {"GLOO_SOCKET_IFNAME": "nonesuch"}))


def interface_that_leads_nowhere(folder: Path) -> Seen:
    """node-1 has a second network card, whose cable ends nowhere."""
    with machines(folder) as nodes:
        nodes[1].run(
            "ip link add name eth1 type veth peer name loose; ip addr add 10.99.0.1/24 dev eth1; ip link set eth1 up"
        )
        return on_two_machines(folder, nodes, added=({}, {"GLOO_SOCKET_IFNAME": "eth1"}))


def interface_without_address(folder: Path) -> Seen:
    with machines(folder) as nodes:
        nodes[1].run("ip link add name eth1 type veth peer name loose")
        return on_two_machines(folder, nodes, added=({}, {"GLOO_SOCKET_IFNAME": "eth1"}))


def loopback_of_two(folder: Path) -> Seen:
    with machines(folder) as nodes:
        return on_two_machines(folder, nodes, added=({"GLOO_SOCKET_IFNAME": "lo"},) * 2)


def name_at_127_0_1_1(folder: Path, *, beside: bool = False) -> Seen:
    """node-1 has its own /etc/hosts, as Debian writes it; `beside`: with the right line below."""
    with machines(folder) as nodes:
        own = folder / "hosts-of-node-1"
        right = "10.77.0.2 node-1\n" if beside else ""
        own.write_text(f"127.0.0.1 localhost\n127.0.1.1 node-1\n10.77.0.1 node-0\n{right}")
        nodes[1].run(f"umount /etc/hosts; mount --bind '{own}' /etc/hosts")
        return on_two_machines(folder, nodes)


# Devices and versions.


def planted(folder: Path, what: str, ranks: str, device: str = "auto") -> Seen:
    added = {"PLANTED": what, "PLANTED_RANKS": ranks}
    return on_one_machine(folder, "--device", device, added=added)


def other_version_there(folder: Path) -> Seen:
    with machines(folder) as nodes:
        return on_two_machines(folder, nodes, added=({}, {"PLANTED": "torch=2.9.0", "PLANTED_RANKS": "0,1"}))


# Ports.


@contextmanager
def listener(port: int, before: tuple[str, ...] = ()) -> Iterator[None]:
    """A program that listens on the port and says nothing."""
    script = f"import socket, sys; s = socket.create_server(('', {port})); print('here', flush=True); sys.stdin.read()"
    command = [*before, sys.executable, "-S", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield
    finally:
        process.communicate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def port_in_use(folder: Path) -> Seen:
    port = free_port()
    with listener(port):
        return on_one_machine(folder, "--device", "cpu", "--port", str(port))


def port_of_tasks(folder: Path) -> Seen:
    with machines(folder) as nodes, listener(29500, tuple(nodes[0].command())):
        return as_tasks(folder, [node.command() for node in nodes], {"MASTER_ADDR": "node-0"})


# Links, memory and disks.


def slow_link(folder: Path, rate: str) -> Seen:
    """A token bucket on both ends of the cable."""
    with machines(folder) as nodes:
        for node in nodes:
            try:
                node.run(f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 400ms")
            except subprocess.CalledProcessError as error:
                raise NotAllowedError(f"tc: {error.stderr.strip()}") from error
        return on_two_machines(folder, nodes)


def unshared_folder(folder: Path) -> Seen:
    (folder / "runs").mkdir()
    with machines(folder) as nodes:
        nodes[1].hide(folder / "runs")
        return on_two_machines(folder, nodes)


def mounting(script: str) -> tuple[str, ...]:
    """Words before a command that runs where the script has mounted something.

    Raises:
        NotAllowedError: it may not.
    """
    words = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh")
    done = subprocess.run([*words, "true"], capture_output=True, text=True)
    if done.returncode:
        raise NotAllowedError(f"mounting: {done.stderr.strip()}")
    return words


def small_shared_memory(folder: Path) -> Seen:
    """As much as Docker gives."""
    before = mounting("mount -t tmpfs -o size=64m none /dev/shm")
    return on_one_machine(folder, "--device", "cpu", before=before)


def little_memory(folder: Path) -> Seen:
    """The system says that programs can still use 3 GiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    said = [f"MemAvailable: {3 * 2**20} kB" if line.startswith("MemAvailable:") else line for line in lines]
    (folder / "meminfo").write_text("\n".join(said) + "\n")
    before = mounting(f"mount --bind '{folder / 'meminfo'}' /proc/meminfo")
    return on_one_machine(folder, "--device", "cpu", before=before)


def small_control_group(folder: Path) -> Seen:
    """A control group of 3 GiB, as Slurm and Docker make them, of either version; the machine itself has more."""
    with control_group(3 * GIB) as group:
        join = ("sh", "-ec", f"echo $$ > '{group}/cgroup.procs'; exec \"$@\"", "sh")
        return on_one_machine(folder, "--device", "cpu", before=join)


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    mounts = [(Path("/sys/fs/cgroup"), "memory.max"), (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")]
    for root, name in mounts:
        group = root / f"doctor-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / name).exists():  # no folder of control groups, or one without those of memory
                raise OSError
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with suppress(OSError):
                group.rmdir()
        return
    raise NotAllowedError("control groups cannot be made")


FAULTS = (
    Fault(
        name="wrong interface",
        how="GLOO_SOCKET_IFNAME of no card, one machine",
        run=unknown_interface,
        finding="interfaces",
        words="GLOO_SOCKET_IFNAME=nonesuch names no interface of this machine",
    ),
    Fault(
        name="wrong interface",
        how="the same on node-1 of two",
        run=unknown_interface_there,
        finding="interfaces",
        words="GLOO_SOCKET_IFNAME=nonesuch names no interface of node-1",
        short="GLOO_SOCKET_IFNAME=other names no interface of host-1",
    ),
    Fault(
        name="wrong interface",
        how="a card of node-1 that leads nowhere",
        run=interface_that_leads_nowhere,
        finding="connections",
        words="rank 0: cannot connect to rank 1: node-0 gets to node-1 at 10.99.0.1",
        short="rank 0: cannot connect to rank 1",
    ),
    Fault(
        name="wrong interface",
        how="a card of node-1 without address",
        run=interface_without_address,
        finding="interfaces",
        words="GLOO_SOCKET_IFNAME=eth1 names an interface of node-1 without an address",
        short="GLOO_SOCKET_IFNAME=interface-\\d+ names an interface of host-1 without an address",
    ),
    Fault(
        name="wrong interface",
        how="lo on both of two machines",
        run=loopback_of_two,
        finding="interfaces",
        words="GLOO_SOCKET_IFNAME=lo names the loopback of node-0",
        short="GLOO_SOCKET_IFNAME=interface-\\d+ names the loopback of host-0",
    ),
    Fault(
        name="name at 127.0.1.1",
        how="node-1's own /etc/hosts",
        run=name_at_127_0_1_1,
        finding="names",
        words="node-1 resolves to 127.0.1.1, which other machines cannot reach",
        short="host-1 resolves to 127.0.1.1",
    ),
    Fault(
        name="name at 127.0.1.1",
        how="the right line stands below it",
        run=partial(name_at_127_0_1_1, beside=True),
        finding="names",
        words="node-1 resolves to 127.0.1.1",
        short="host-1 resolves to 127.0.1.1",
    ),
    Fault(
        name="no shared file system",
        how="a tmpfs of node-1 over the folder",
        run=unshared_folder,
        finding="shared folder",
        words="is not the same folder for all ranks: node-1 \\(ranks 1\\) does not share it",
        short="rank 0: CheckpointError",
    ),
    Fault(
        name="two ranks on one device",
        how="both ranks have the same card",
        run=partial(planted, what="gpu=GPU-0f3c", ranks="0,1"),
        finding="devices",
        words="ranks 0, 1 share a GPU",
    ),
    Fault(
        name="mixed CUDA and CPU",
        how="rank 0 has a card, rank 1 none",
        run=partial(planted, what="gpu=GPU-0f3c", ranks="0"),
        finding="devices",
        words="rank 1 would compute on CPUs and the others on GPUs",
    ),
    Fault(
        name="mixed CUDA and CPU",
        how="the same with --device cuda",
        run=partial(planted, what="gpu=GPU-0f3c", ranks="1", device="cuda"),
        finding="devices",
        words="rank 0 would compute on CPUs and the others on GPUs",
    ),
    Fault(
        name="torch versions differ",
        how="rank 1 says 2.9.0",
        run=partial(planted, what="torch=2.9.0", ranks="1"),
        finding="versions",
        words="torch differs: .* on rank 0, 2.9.0 on rank 1",
    ),
    Fault(
        name="torch versions differ",
        how="node-1 of two says 2.9.0",
        run=other_version_there,
        finding="versions",
        words="torch differs: .* on rank 0, 2.9.0 on rank 1",
    ),
    Fault(
        name="port in use",
        how="a listener on --port",
        run=port_in_use,
        finding="port",
        words="port \\d+ cannot be used: address already in use$",
        short="port \\d+ cannot be used: address already in use",
    ),
    Fault(
        name="port in use",
        how="a listener on MASTER_PORT, tasks of Slurm",
        run=port_of_tasks,
        finding="start",
        words="port 29500 on node-0 is in use",
        short="port 29500",
    ),
    Fault(
        name="slow link",
        how="100 Mbit/s",
        run=partial(slow_link, rate="100mbit"),
        finding="links",
        words="slow between ranks 0-1 with 1\\d\\.\\d MB/s",
        status="warn",
    ),
    Fault(
        name="slow link",
        how="10 Mbit/s",
        run=partial(slow_link, rate="10mbit"),
        finding="links",
        words="slow between ranks 0-1 with [12]\\.\\d MB/s",
        status="warn",
    ),
    Fault(
        name="too little /dev/shm",
        how="a tmpfs of 64 MiB",
        run=small_shared_memory,
        finding="/dev/shm",
        words="has 32 MiB of /dev/shm for each rank",
    ),
    Fault(
        name="too little host memory",
        how="3 GiB in /proc/meminfo",
        run=little_memory,
        finding="host memory",
        words="has 1.5 GiB of host memory for each rank",
    ),
    Fault(
        name="too little host memory",
        how="a control group of 3 GiB",
        run=small_control_group,
        finding="host memory",
        words="has 1\\.\\d GiB of host memory for each rank",
    ),
)
