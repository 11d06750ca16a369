"""Where processes listen, and who can reach them: for tests of jobs of one machine."""

import ipaddress
import socket

import psutil


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens; None: this one."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def beyond_loopback(pid: int | None = None) -> set[tuple[str, int]]:
    """Those that another machine could reach."""
    return {place for place in listening(pid) if not ipaddress.ip_address(place[0]).is_loopback}


def own_addresses() -> list[str]:
    """This machine's addresses but loopback and those of one link only."""
    found = (one.address for card in psutil.net_if_addrs().values() for one in card if one.family in _FAMILIES)
    numbers = [ipaddress.ip_address(address.partition("%")[0]) for address in found]
    return [str(number) for number in numbers if not number.is_loopback and not number.is_link_local]


def can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def places_of_rank(job: object) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Where a rank listens, and of that where others could reach it; every rank of the job calls it."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1), group=dist.new_group())  # groups that are made later count too
    return listening(), beyond_loopback()


_FAMILIES = (socket.AF_INET, socket.AF_INET6)
