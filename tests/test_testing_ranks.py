"""sl.testing.ranks: real processes, forked, or by the server of ranks where torch is built for GPUs."""

import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from shardlib.testing.server import served


def one_rank_off(x: Tensor) -> Tensor:
    return x + 1e-9 * (sl.axis_index("dp") == 1)


# ---- ranks


@sl.testing.ranks(2)
def test_a_test_on_real_ranks() -> None:
    """Everything here works on real ranks, too, and all of them fail together."""
    with sl.make_mesh(dp=2) as mesh:
        sl.testing.check(
            lambda x: sl.psum(x, "dp"),
            lambda x: x.unflatten(0, (2, -1)).sum(0),
            mesh=mesh,
            in_specs="m/dp n",
            out_specs="m n",
        )
        with pytest.raises(AssertionError, match=r"at .*, held by rank 1: "):
            sl.testing.check(one_rank_off, torch.clone, mesh=mesh, in_specs="m/dp n", out_specs="m/dp n")


def test_ranks_give_results_in_order_and_every_traceback() -> None:
    assert sl.testing.ranks(3)(lambda x, y: (dist.get_rank(), x + y))(1, y=2) == [(0, 3), (1, 3), (2, 3)]

    @sl.testing.ranks(3)
    def fails() -> None:
        if dist.get_rank():
            raise KeyError(f"lost {dist.get_rank()}")

    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3 raised.*KeyError: 'lost 1'.*rank 2.*KeyError: 'lost 2'"):
        fails()


def test_forks_compile_in_their_own_process() -> None:
    """Workers of Inductor that the parent had started before a fork answer to the parent alone: a rank that asked them
    waited for ever."""
    config: Any = importlib.import_module("torch._inductor.config")

    def threads() -> int:
        config: Any = importlib.import_module("torch._inductor.config")
        return config.compile_threads

    with config.patch(compile_threads=2):
        assert sl.testing.ranks(1)(threads)() == [1] and threads() == 2


# ---- the server of ranks, which `ranks` asks where torch is built for GPUs


def over_server(n: int, body: Callable[[int], Any], seconds: float = 60) -> list[Any]:
    return [pickle.loads(result) for result in served(n, body, seconds)]


class Told(NamedTuple):
    """A class of this module, which no `sys.path` needs to find."""

    gradient: list[float]
    setting: tuple[Any, ...]


def told(line: Any) -> Told:
    """The gradient of a sum of powers, and what ranks see of the process that asked for them."""
    gradient = torch.func.grad(lambda t: (t.w**t.power).sum())(line)
    return Told(gradient.w.tolist(), (os.getcwd(), os.environ["SERVED"], torch.rand(3).tolist()))


def test_the_server_runs_what_forks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closures, local `@pytree` classes, autograd although it ran here; twice, each time with what was set here."""

    @sl.pytree
    class Line:
        w: Tensor = sl.spec("m/dp")
        power: int = sl.static(default=2)

    def body(rank: int) -> Any:
        with pytest.raises(TypeError, match="missing 1 required"):
            Line()  # type: ignore[call-arg]
        assert type(line) is Line and str(sl.specs(Line).w) == "m/dp"
        return rank, told(line)

    line = Line(w=torch.tensor([3.0, 5.0], dtype=torch.float64))
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        monkeypatch.setenv("SERVED", str(seed))
        torch.manual_seed(seed)
        found, here = over_server(3, body), told(line)
        assert found == [(rank, here) for rank in range(3)] and here.gradient == [6.0, 10.0]
        assert type(found[0][1]) is Told


def test_the_server_ends_with_its_parent_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is that of its parent, which is killed: both are gone when the output ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, where there are threads
        parent = os.fork()  # which has imported all it needs
    if not parent:
        os.dup2(theirs, 1)
        os.close(ours)
        os.close(theirs)
        try:
            served(1, lambda rank: print("ran", flush=True), 60)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(theirs)
    with os.fdopen(ours) as output:
        assert output.read() == "ran\n"
    assert os.waitpid(parent, 0)[1] == signal.SIGKILL
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor_")]  # torch makes that one


def test_what_cannot_be_sent_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"(?s)cannot be sent to their processes: .*lock.*make inside of it what cannot"
    ):
        served(1, lambda rank: lock, 60)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="built for GPUs need cloudpickle: pip install cloudpickle"):
        served(1, abs, 60)


def test_the_server_outlives_its_ranks_and_is_replaced(tmp_path: Path) -> None:
    def fails(rank: int) -> None:
        if rank == 2:
            raise KeyError("lost")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def hangs(rank: int) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(here, signal.SIGUSR1)
        time.sleep(600)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3 died with exit code -9\n.*rank 2 .*KeyError: 'lost'"):
        over_server(3, fails)
    with pytest.raises(AssertionError, match=r"rank 0 of 1 was not done after 0\.1 s"):
        over_server(1, lambda rank: time.sleep(60), seconds=0.1)
    server, here = over_server(1, lambda rank: os.getppid()), os.getpid()
    assert server == over_server(1, lambda rank: os.getppid()) != [here]

    before = signal.signal(signal.SIGUSR1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        over_server(1, hangs, seconds=600)
    signal.signal(signal.SIGUSR1, before)
    assert over_server(1, lambda rank: os.getppid()) != server  # nor the answer that is not wanted any more
    end, status = time.monotonic() + 60, Path("/proc", (tmp_path / "pid").read_text(), "status")
    while time.monotonic() < end and status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.1)
    assert time.monotonic() < end
    with pytest.raises(RuntimeError, match="the process that forks the ranks has died; the next call starts another"):
        over_server(1, lambda rank: os.kill(os.getppid(), signal.SIGKILL))
