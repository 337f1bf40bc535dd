"""Two hosts on one machine: network namespaces joined by a link of a given rate. Needs root, `ip` and `tc`."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A namespace, the interface of the link in it, and its address."""

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]


# named by this process: another may have two of its own
HOSTS = tuple(Host(f"shardlib-{os.getpid()}-{i}", f"sl{os.getpid()}v{i}", f"10.99.7.{i}") for i in (1, 2))


def _run(command: str, check: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()} (root, and a kernel with veth and tbf, are needed)")


@contextmanager
def two_hosts(rate: str, burst: str = "1mb") -> Iterator[tuple[Host, Host]]:
    """The hosts, while inside; each sends at most `rate` (`1gbit`), shaped by a token bucket: after it has sent nothing
    for a while, `burst` at once."""
    a, b = HOSTS
    for left in Path("/run/netns").glob("shardlib-*"):  # of processes that were killed
        named = re.fullmatch(r"shardlib-(\d+)-[12]", left.name)
        if named and not Path("/proc", named[1]).exists():
            _run(f"ip netns del {left.name}", check=False)
    try:
        for host in HOSTS:
            _run(f"ip netns add {host.namespace}")
        _run(f"ip link add {a.interface} netns {a.namespace} type veth peer name {b.interface} netns {b.namespace}")
        for host in HOSTS:
            inside = f"ip -n {host.namespace}"
            _run(f"{inside} addr add {host.address}/24 dev {host.interface}")
            _run(f"{inside} link set lo up")
            _run(f"{inside} link set {host.interface} up")
            shape = f"tc qdisc replace dev {host.interface} root tbf rate {rate} burst {burst} latency 50ms"
            _run(f"{' '.join(host.prefix)} {shape}")
        yield a, b
    finally:
        for host in HOSTS:
            _run(f"ip netns del {host.namespace}", check=False)
