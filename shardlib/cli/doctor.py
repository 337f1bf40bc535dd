"""`shardlib doctor`: is this machine, or are the hosts of a hostfile, fit for a run; if not, what to mend."""

import json
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardlib.cli.hosts import parsed, there
from shardlib.errors import MeshError, amount

SLOW = 100e6  # bytes per second between ranks that are too few
FULL = 2 << 30  # bytes free that are too few for checkpoints and logs
APART = 1.0  # seconds between clocks that are too many


class Finding(NamedTuple):
    """What was looked at, what was found, and what to do about it; nothing where all is well."""

    what: str
    found: str
    mend: str = ""


def add(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="look at these hosts, and at what lies between them"
    )
    parser.add_argument(
        "--ssh", default="ssh -o BatchMode=yes -o ConnectTimeout=10", metavar="CMD", help="what runs CMD HOST LINE"
    )
    parser.add_argument("--master", default="", metavar="HOST[:PORT]", help="as for shardlib run")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks that try the link on each host")
    parser.add_argument("--no-link", action="store_true", help="start no ranks")
    parser.add_argument("--json", action="store_true", help="one line of JSON: the findings and the time")


def run(args: Namespace) -> int:
    """Print the findings; 1 if there is anything to mend."""
    try:
        found = [*_hosts(args)] if args.hostfile else [*machine()]
    except (OSError, MeshError) as e:
        print(f"shardlib doctor: {e}", file=sys.stderr)
        return 2
    if not args.no_link:
        found.append(link(args))
    if args.json:
        print(json.dumps({"time": time.time(), "findings": found}))
    else:
        print("\n".join(f"{'mend' if f.mend else 'ok':<5} {f.what:<22} {f.found}" + _then(f.mend) for f in found))
    return int(any(f.mend for f in found))


def _then(mend: str) -> str:
    return f"\n      -> {mend}" if mend else ""


def machine() -> Iterable[Finding]:
    """What can be seen without starting ranks."""
    yield Finding("python", platform.python_version())
    old = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 11)
    yield Finding("torch", torch.__version__, "pip install 'torch>=2.11'" if old else "")
    for name in ("shardlib", "optree", "einops", "numpy", "rich"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed", f"pip install {name}")
    gpus = torch.cuda.device_count()
    yield Finding("GPUs", ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none: ranks run on the CPU")
    backends = [b for b in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(b)]
    needed = "nccl" if gpus else "gloo"
    lacks = "" if needed in backends else f"this torch has no {needed}, which ranks here talk: install another build"
    yield Finding("backends", ", ".join(backends) or "none", lacks)
    yield _name()
    yield _cores()
    yield from _limits()
    yield from _disks()
    yield _clock()


def _name() -> Finding:
    name = socket.gethostname()
    try:
        return Finding("host", f"{name}, {socket.gethostbyname(name)}")
    except OSError:
        mend = "gloo without a launcher looks the name up: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host", f"{name} does not resolve", mend)


def _cores() -> Finding:
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    many = threads is not None and threads.isdigit() and int(threads) > cores
    found = f"{cores} cores for this process, OMP_NUM_THREADS={threads or 'not set'}"
    return Finding("CPU", found, f"each rank starts {threads} threads: unset OMP_NUM_THREADS" if many else "")


def _limits() -> Iterable[Finding]:
    for what, kind, least, why in (
        ("open files", resource.RLIMIT_NOFILE, 4096, "each pair of ranks and each file of tokens takes one"),
        ("processes", resource.RLIMIT_NPROC, 4096, "ranks, their threads and loaders count"),
    ):
        soft, hard = resource.getrlimit(kind)
        low = 0 <= soft < least
        letter = "n" if kind == resource.RLIMIT_NOFILE else "u"
        can = "" if hard < 0 or hard >= least else ", after the administrator has raised the hard limit"
        mend = f"ulimit -{letter} {least}{can}: {why}" if low else ""
        yield Finding(what, "no limit" if soft < 0 else f"at most {soft}", mend)


def _disks() -> Iterable[Finding]:
    for where in dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm"))):
        if not where.exists():
            continue
        free, shared = shutil.disk_usage(where).free, where == Path("/dev/shm")
        low = free < (FULL // 8 if shared else FULL)
        why = "loaders pass batches there: docker run --shm-size=8g" if shared else "checkpoints and logs need more"
        speed, mend = "", f"make room on {where}: {why}" if low else ""
        if not shared:
            try:
                speed = f", {amount(int(_write_speed(where)))}/s to the disk"
            except OSError as e:
                mend = f"cannot write to {where}: {e}"
        yield Finding(f"disk {where}", f"{amount(free)} free{speed}", mend)


def _write_speed(folder: Path) -> float:
    """Bytes per second that reach the disk."""
    size = 16 << 20
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(os.urandom(1 << 20) * (size >> 20))
        file.flush()
        os.fsync(file.fileno())
    return size / (time.perf_counter() - began)


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if shutil.which("timedatectl"):
        asked = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.stdout.strip() == "no":
            return Finding(
                "clock", f"{now}, not synchronized", "timedatectl set-ntp true: logs of hosts are merged by time"
            )
    return Finding("clock", now)


def _hosts(args: Namespace) -> Iterable[Finding]:
    """Each host's findings that say what to mend, or differ from the first host's; clocks that are apart."""
    versions: dict[str, tuple[str, str]] = {}
    for host in parsed(args.hostfile.read_text()):
        line = there([sys.executable, "-m", "shardlib", "doctor", "--json", "--no-link"])
        began = time.time()
        done = subprocess.run(
            [*shlex.split(args.ssh), host, line], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        try:
            said = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            mend = f"mend what `{args.ssh} {host}` says: {done.stderr.strip()[-300:]}"
            yield Finding(host, "does not answer, or has no shardlib there", mend)
            continue
        found = [Finding(*f) for f in said["findings"]]
        yield Finding(host, f"{len(found)} things looked at")
        yield from (f._replace(what=f"{host}: {f.what}") for f in found if f.mend)
        apart = max(began - said["time"], said["time"] - time.time(), 0.0)
        if apart > APART:
            yield Finding(
                f"{host}: clock", f"{apart:.1f} s from here", "synchronize the clocks: logs are merged by time"
            )
        for f in found[:3]:  # python, torch, shardlib
            first, other = versions.setdefault(f.what, (f.found, host))
            if first != f.found:
                yield Finding(f"{host}: {f.what}", f"{f.found}, but {first} on {other}", "install the same everywhere")


def link(args: Namespace) -> Finding:
    """Whether ranks meet, and how fast they reduce."""
    command = [sys.executable, "-m", "shardlib", "run", f"--nproc={args.nproc}"]
    if args.hostfile:
        command += [f"--hostfile={args.hostfile}", f"--ssh={args.ssh}"] + (
            [f"--master={args.master}"] * bool(args.master)
        )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    asked = [*command, "-m", "shardlib.cli.link"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, env=environment)
        line = next(x for x in done.stdout.splitlines() if '"bytes_per_s"' in x)
    except subprocess.TimeoutExpired:
        return Finding("link", "ranks did not meet in 120 s", "open the ports between the hosts, 29500 on the first")
    except StopIteration:
        return Finding("link", f"exit code {done.returncode}", f"mend what the ranks say: {done.stderr.strip()[-600:]}")
    found = json.loads(line[line.index("{") :])
    speed = f"{found['ranks']} ranks reduce {amount(int(found['bytes_per_s']))}/s, or one number in"
    speed += f" {found['delay'] * 1e3:.2f} ms"
    slow = found["bytes_per_s"] < SLOW
    return Finding("link", speed, "slower than a disk: other ranks or a slow network share it" if slow else "")
