"""One host's part of a run: torch's elastic agent, which starts the ranks, watches them, and starts them again.

The agents meet in a store that the first host holds. Every round of the run (the first, and one after each failure or
change of hosts) has a store of its own for its ranks, held by the first host of the round. Both listen at this host's
address alone: at loopback, where there is one host.
"""

import fcntl
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore # exported, but not said to be
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from shardlib.errors import MeshError

LOST = 75  # the exit code of an agent that cannot reach the others (EX_TEMPFAIL): it may be started again
PATIENCE = 8.0  # seconds for the other ranks to say what they make of one that failed, and then to end
_JOIN = 86400.0  # seconds that an agent waits for enough hosts


@dataclass(frozen=True)
class Plan:
    """What an agent is to do. `command`: the program and its arguments; `hosts`: the least and the greatest number of
    hosts; `master`: where the agents meet; `grace`: seconds from a signal to the end by force; `silence`: seconds after
    which a host that is not heard of has left; `wait`: seconds for further hosts, when there are enough."""

    command: Sequence[str]
    nproc: int
    hosts: tuple[int, int] = (1, 1)
    master: tuple[str, int] = ("127.0.0.1", 0)
    run_id: str = "run"
    restarts: int = 0
    grace: float = 30.0
    silence: float = 15.0
    wait: float = 30.0
    logs: Path | None = None


def run(plan: Plan) -> int:
    """Run this host's ranks to their end; the exit code: 0, the failed rank's, 128 + a signal that came, or LOST."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what fails is told below
    address = _own_address(plan.master)
    os.environ.update(_environment(address, plan.nproc))
    with tempfile.TemporaryDirectory() as temporary:
        logs = Logs(plan.logs or Path(temporary))
        try:
            rounds = Rounds(plan, address)
            spec = WorkerSpec(
                role="rank",
                local_world_size=plan.nproc,
                entrypoint=plan.command[0],
                args=tuple(plan.command[1:]),
                rdzv_handler=rounds,
                max_restarts=plan.restarts,
                monitor_interval=0.1,
                local_addr=address,
            )
            agent = Agent(spec, logs, plan.grace)
            result: RunResult | None = agent.run()  # type: ignore # its decorator hides the type
        except SignalException as e:
            say(f"ended by {e.sigval.name}")
            return 128 + e.sigval
        except (RendezvousError, dist.DistError, ConnectionError, TimeoutError) as e:
            few = isinstance(e, RendezvousTimeoutError)
            lost = "the first host is gone, this one is cut off, or another program has the port"
            why = f"fewer than {plan.hosts[0]} hosts came" if few else lost
            say(f"{socket.gethostname()} does not meet the others at {plan.master[0]}:{plan.master[1]}: {why}")
            return LOST
    with suppress(RendezvousError, dist.DistError):
        rounds.shutdown()
    failures = result.failures if result else agent.failures  # without a result, another host has ended the run
    code = culprit(failures, agent.first)[1].exitcode if failures else 0
    return 128 - code if code < 0 else code


def say(text: str) -> None:
    """A line of the launcher's own."""
    print(f"shardlib run: {text}", file=sys.stderr, flush=True)


def culprit(failures: Mapping[int, ProcessFailure], first: Collection[int] = ()) -> tuple[int, ProcessFailure]:
    """The rank to blame: killed, but not by us; or failed by an error of its own; of several, one of `first`, the ranks
    that failed before we ended any."""

    def order(rank: int) -> tuple[int, bool, int, int]:
        f = failures[rank]
        killed = f.exitcode < 0 and f.exitcode != -signal.SIGTERM and (rank in first or not first)
        message: Any = f.message
        told = isinstance(message, dict) and message["message"].startswith("RankError: rank ")
        return (0 if killed else 2 if told else 1 if f.exitcode > 0 else 3), rank not in first, f.timestamp, rank

    rank = min(failures, key=order)
    return rank, failures[rank]


def report(failures: Mapping[int, ProcessFailure], first: Collection[int] = ()) -> str:
    """What to say of ranks that failed: who is to blame, how it ended, who went with it; its traceback, if there is."""
    rank, f = culprit(failures, first)
    message: Any = f.message
    if f.exitcode < 0:
        more = ": out of memory, or by hand" if -f.exitcode == signal.SIGKILL else ""
        how = f"was killed by {f.signal_name()}{more}"
    else:
        how = f"failed with exit code {f.exitcode}"
    others = ", ".join(str(r) for r in sorted(failures) if r != rank)
    ended = f"; with it ended {others}" if others else ""
    why = f"\n{message['extraInfo']['py_callstack'].rstrip()}" if isinstance(message, dict) else ""
    return f"rank {rank} (pid {f.pid} on {socket.gethostname()}) {how}{ended}{why}"


class Agent(LocalElasticAgent):
    """torch's agent, which gives ranks time: the others of one that fails to say so, all of them after a signal."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace: float) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=30, log_line_prefix_template="[rank ${rank}] ")
        self.grace = grace
        self.failures: dict[int, ProcessFailure] = {}  # of the last round
        self.first = set[int]()  # the ranks that were the first to fail
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Signals that do not end a run go to its ranks."""
        for worker in self.get_worker_group().workers:
            with suppress(ProcessLookupError, TypeError):  # it has ended, or not begun
                os.kill(worker.id, number)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, int(self.grace))  # torch 2.11's own gives them no other time than 30 s
        super()._shutdown(death_sig)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        workers = worker_group.workers
        self.first = {w.global_rank for w in workers if _failed(w.id)}
        if self.first:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not all(_ended(w.id) for w in workers):
                time.sleep(0.05)
            if self._pcontext:
                self._pcontext.close(signal.SIGTERM, int(min(self.grace, PATIENCE)))  # torch gives them 30 s
        result = super()._monitor_workers(worker_group)  # type: ignore # its decorator hides the arguments
        self.failures = result.failures
        if result.state == WorkerState.FAILED:
            time.sleep(0.2)  # what the ranks wrote comes first
            say(report(result.failures, self.first))
        return result


def _ended(pid: int) -> Any:
    """How a child ended, which stays to be asked again; None while it runs."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return True  # it has been waited for


def _failed(pid: int) -> bool:
    end = _ended(pid)
    return end not in (None, True) and not (end.si_code == os.CLD_EXITED and end.si_status == 0)


class Rounds(RendezvousHandler):
    """torch's rendezvous, with a store for each round that listens at this host's address only."""

    def __init__(self, plan: Plan, address: str) -> None:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else it makes one that listens everywhere
        patience = timedelta(seconds=max(5.0, plan.silence))
        host, port = plan.master
        self.held = _listening(host, port)
        self.store = self.held or TCPStore(host, port, is_master=False, timeout=patience)
        times = RendezvousTimeout(*(timedelta(seconds=s) for s in (_JOIN, plan.wait, 30, plan.silence)))
        self.inner = DynamicRendezvousHandler.from_backend(
            plan.run_id,
            self.store,
            C10dRendezvousBackend(self.store, plan.run_id),
            *plan.hosts,
            local_addr=address,
            timeout=times,
            keep_alive_interval=max(1, round(plan.silence / 3)),
            keep_alive_max_attempt=3,
        )
        self.address, self.round, self.ranks = address, 0, None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the hosts of the next round."""
        info = self.inner.next_rendezvous()
        if info.rank == 0:
            self.ranks = _listening(self.address, 0)
            assert self.ranks is not None, "an address of this host"
            info.store.set("shardlib", f"{self.address} {self.ranks.port}")
        address, port = info.store.get("shardlib").decode().split()
        self.round += 1
        if self.round > 1 or info.world_size > 1:
            say(f"round {self.round}: {socket.gethostname()} is host {info.rank + 1} of {info.world_size}")
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    @property
    def use_agent_store(self) -> bool:
        """Ranks find a store, and make none."""
        return True

    def get_backend(self) -> str:
        """torch's name of it."""
        return self.inner.get_backend()

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self.inner.is_closed()

    def set_closed(self) -> None:
        """The run has ended."""
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Hosts that came too late for this round."""
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The name of the run."""
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        """End it for all."""
        return self.inner.shutdown()


class Logs(LogsSpecs):
    """`rank3.out` and `rank3.err` in a folder, all of them shown too; where those of an earlier round stand already,
    in `round2`, and so on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of a round."""
        names = {local: f"rank{env['RANK']}" for local, env in envs.items()}
        folders = (self.folder / (f"round{n}" if n > 1 else "") for n in count(1))
        here = next(f for f in folders if not any((f / f"{name}.out").exists() for name in names.values()))
        here.mkdir(parents=True, exist_ok=True)
        out, err, told = (
            {local: str(here / f"{name}.{end}") for local, name in names.items()}
            for end in ("out", "err", "error.json")
        )
        for local, env in envs.items():
            Path(told[local]).unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = told[local]
        return LogsDest(out, err, dict(out), dict(err), told)


# ---- addresses


def _listening(address: str, port: int) -> TCPStore | None:
    """A store at an address of this host and no other; None where it is not of this host, or the port is taken."""
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError:
            return None
        listener.listen(4096)
        port, handle = listener.getsockname()[1], listener.detach()
    return TCPStore(address, port, is_master=True, master_listen_fd=handle, wait_for_workers=False)


def _own_address(master: tuple[str, int]) -> str:
    """This host's address towards the others. Raises `MeshError` where the first host's name does not lead there."""
    host = master[0]
    try:
        found = socket.gethostbyname(host)
    except OSError as e:
        raise MeshError(f"--master {host}: {e}; give an address of the first host") from None
    if found.startswith("127.") and not host.startswith("127.") and host != "localhost":
        raise MeshError(f"`{host}` is {found} here, where no other host comes: give --master an address of it")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master[0], master[1] or 1))  # sends nothing
        return probe.getsockname()[0]


def _interface(address: str) -> str:
    """The network interface with that address, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                asked = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(asked[20:24]) == address:
                    return name
    return ""


def _environment(address: str, nproc: int) -> dict[str, str]:
    """What ranks find in their environment, where the user has not said otherwise."""
    found = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), "PYTHONUNBUFFERED": "1"}
    if name := _interface(address):
        found |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {k: v for k, v in found.items() if k not in os.environ}
