"""Forks of a server, a second Python that runs nothing but them: for where this process's own cannot run autograd.

torch refuses autograd in a fork of a process whose autograd has started a thread for each device. Builds for GPUs do so
at the first backward, without a GPU too where something was traced before it.
"""

import atexit
import contextlib
import functools
import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from shardlib.testing.forks import forks
from shardlib.tree import is_pytree_class, registered

_START = "import sys; sys.path[:] = {path!r}; from shardlib.testing.server import serve; serve({fd})"


def served(n: int, body: Callable[[int], Any], seconds: float) -> list[bytes]:
    """`forks(n, body, seconds)` on forks of the server, which the first call starts; it ends with this process.

    `body` travels by cloudpickle: functions and classes of modules by name, others by value. Raises as `forks` does,
    ImportError without cloudpickle, and TypeError where `body` holds what cannot be pickled.
    """
    sent = _pickled(body)
    pipe, server = _server(os.getpid())
    try:
        pipe.send((n, sent, seconds))
        error, results = pipe.recv()
    except BaseException as error:
        pipe.close()  # the answer to this call would be taken for that to the next
        server.send_signal(signal.SIGINT)
        _server.cache_clear()
        if isinstance(error, (EOFError, OSError)):
            raise RuntimeError("the process that forks the ranks has died; the next call starts another") from error
        raise
    if error is not None:
        raise AssertionError(error)
    return results


@functools.lru_cache(1)
def _server(pid: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """The server of this process, whose id is `pid` (its forks have their own); it ends when its pipe is closed."""
    ours, theirs = Pipe()
    fd = theirs.fileno()
    server = subprocess.Popen([sys.executable, "-c", _START.format(path=sys.path, fd=fd)], pass_fds=[fd])
    theirs.close()

    def end() -> None:
        if os.getpid() == pid:
            ours.close()
            server.wait()

    atexit.register(end)
    return ours, server


def serve(fd: int) -> None:
    """The server: runs what comes through the pipe `fd`, one function after the other, while its parent lives."""
    parent = Connection(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts tests in the background has it ignored
    torch.compile(serve)  # compiles nothing, but imports what torch.func needs: seconds, which each rank would take

    def body(rank: int) -> Any:
        parent.close()  # only so does the parent see it when the server dies
        return _unpickled(sent)(rank)

    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):  # the parent is gone, or wants no answer
        while True:
            n, sent, seconds = parent.recv()
            try:
                answer = None, forks(n, body, seconds)
            except AssertionError as error:
                answer = str(error), None
            parent.send(answer)


# ---- functions on their way


def _pickled(body: Callable[[int], Any]) -> bytes:
    """`body`, and what else of this process a fork of it would see and tests rely on."""
    try:
        import cloudpickle
    except ImportError as error:
        hint = "ranks on a torch built for GPUs need cloudpickle: pip install cloudpickle"
        raise ImportError(hint) from error

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is MISSING:
                return "MISSING"  # of dataclasses, by name: it is compared by identity
            reduced: Any = super().reducer_override(obj)
            if is_pytree_class(obj) and isinstance(reduced, tuple):  # by value; the last item sets its attributes
                return *reduced[:-1], functools.partial(_set_and_register, reduced[-1])
            return reduced

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(body)
    except Exception as error:
        raise TypeError(
            f"what the ranks run cannot be sent to their processes: {type(error).__name__}: {error}\n"
            "  this torch is built for GPUs, so they are no forks of this process, and cloudpickle takes the function\n"
            "  with the variables that it uses: make inside of it what cannot be pickled, or move it into a module"
        ) from error
    state = sys.path, os.getcwd(), dict(os.environ), torch.get_default_dtype(), torch.get_rng_state()
    return pickle.dumps((_modules(), state, buffer.getvalue()))


def _unpickled(sent: bytes) -> Callable[[int], Any]:
    modules, (sys.path[:], directory, environment, dtype, generator), function = pickle.loads(sent)
    sys.meta_path.insert(0, _Found(modules))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    body = pickle.loads(function)  # imports modules, which may draw numbers
    torch.set_default_dtype(dtype)
    torch.set_rng_state(generator)
    return body


def _set_and_register(set_: Callable[[type, Any], Any], cls: type, state: Any) -> None:
    set_(cls, state)
    registered(cls)


def _modules() -> dict[str, tuple[str | None, Sequence[str]]]:
    """The Python files of this process's modules, and the folders of its packages: pytest imports tests whose names no
    `sys.path` finds."""
    found = {}
    for name, module in list(sys.modules.items()):
        said = getattr(module, "__dict__", {})  # no attributes: some objects here make up any
        file = said.get("__file__")
        if file and file.endswith(".py") and name != "__main__":
            found[name] = file, list(said.get("__path__", ()))
    for name in list(found):
        while name := name.rpartition(".")[0]:  # packages without a file
            found.setdefault(name, (None, list(getattr(sys.modules.get(name), "__path__", ()))))
    return found


class _Found(MetaPathFinder):
    """Finds the modules that `_modules` found."""

    def __init__(self, modules: dict[str, tuple[str | None, Sequence[str]]]) -> None:
        self.modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        file, folders = self.modules[fullname]
        if file:
            return spec_from_file_location(fullname, file, submodule_search_locations=list(folders) or None)
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = list(folders)
        return spec
