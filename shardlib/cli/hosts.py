"""Hostfiles, in DeepSpeed's syntax and with its rules for `--include` and `--exclude`.

worker-0 slots=4
worker-1 slots=4    # comments and empty lines do not count
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from shardlib.errors import MeshError, listing, nearest

_PASSED = ("PYTHON", "TORCH", "NCCL", "GLOO", "OMP_", "CUDA", "SHARDLIB", "LD_LIBRARY_PATH")  # starts of names
Slots = dict[str, list[int]]  # by host, in the order of the file: the numbers of its slots (GPUs) that are used


def parsed(text: str) -> Slots:
    """The hosts of a hostfile. Raises `MeshError` with the line for any that cannot be read, or names a host twice."""
    hosts: Slots = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split("#")[0].strip()
        if not said:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=(\d+)", said)
        if not found or int(found[2]) < 1:
            raise MeshError(f"line {number} of the hostfile is `{line.strip()}`; write `worker-0 slots=4`")
        if found[1] in hosts:
            raise MeshError(f"line {number} of the hostfile names `{found[1]}` again; give all its slots on one line")
        hosts[found[1]] = list(range(int(found[2])))
    if not hosts:
        raise MeshError("the hostfile names no hosts; write lines such as `worker-0 slots=4`")
    return hosts


def chosen(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """Of `hosts`, those that `include` names, or all but those that `exclude` names.

    Each is `worker-0@worker-1:0,2`: hosts joined by `@`, each with all its slots or with those after the colon. Raises
    `MeshError` for both at once, for an unknown host or slot, one named twice, and where nothing is left.
    """
    if include and exclude:
        raise MeshError("--include and --exclude exclude each other: give one of them")
    named = _named(include or exclude, hosts)
    if include:
        return {host: named[host] for host in hosts if host in named}
    left = {host: [s for s in slots if s not in named.get(host, ())] for host, slots in hosts.items()}
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise MeshError(f"--exclude {exclude} leaves no slot of {listing(hosts)}")
    return left


def _named(text: str, hosts: Mapping[str, list[int]]) -> Slots:
    out: Slots = {}
    for part in filter(None, text.split("@")):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise MeshError(f"`{host}` is not in the hostfile{nearest(host, hosts)}; it names {listing(hosts)}")
        if host in out:
            raise MeshError(f"`{text}` names `{host}` twice; write its slots together: `{host}:0,2`")
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise MeshError(f"`{part}`: slots are numbers with commas between them, as in `{host}:0,2`")
        slots = [int(n) for n in numbers.split(",")] if colon else hosts[host]
        if unknown := [s for s in slots if s not in hosts[host]]:
            raise MeshError(f"`{host}` has slots 0 to {len(hosts[host]) - 1}, not {listing(unknown)}")
        out[host] = sorted(set(slots))
    return out


def there(command: Sequence[str]) -> str:
    """For the shell of another host: run `command` in this folder, with what matters of this environment."""
    passed = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(_PASSED)]
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*passed, *command])}"
