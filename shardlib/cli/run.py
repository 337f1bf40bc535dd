"""`shardlib run`: starts the ranks of a run on this host, or over ssh on the hosts of a hostfile."""

import argparse
import shlex
import sys
import uuid
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from shardlib.cli.hosts import chosen, parsed
from shardlib.errors import MeshError

PORT = 29500


def add(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.usage = (
        "shardlib run [options] SCRIPT [its arguments]   or   shardlib run [options] -m MODULE [its arguments]"
    )
    option = parser.add_argument
    option("--nproc", type=int, metavar="N", help="ranks on each host; by default one for each GPU, or slot, or one")
    option("--hostfile", type=Path, metavar="FILE", help="hosts, one a line: worker-0 slots=4")
    option("--include", default="", metavar="HOSTS", help="of the hostfile only these: worker-0@worker-1:0,2")
    option("--exclude", default="", metavar="HOSTS", help="of the hostfile not these")
    option(
        "--ssh", default="ssh -o BatchMode=yes -o ServerAliveInterval=5", metavar="CMD", help="what runs CMD HOST LINE"
    )
    option("--nnodes", metavar="N[:M]", help="hosts at least, and at most; fewer than all may go on")
    option(
        "--master", default="", metavar="HOST[:PORT]", help=f"where hosts meet: an address of the first, port {PORT}"
    )
    option(
        "--max-restarts", type=int, default=0, metavar="N", help="start all ranks again so often; the script restores"
    )
    option("--log-dir", type=Path, metavar="DIR", help="keep what each rank writes: rank3.out, rank3.err")
    option("--grace", type=float, default=30.0, metavar="S", help="seconds from a signal until ranks are killed")
    option(
        "--silence", type=float, default=15.0, metavar="S", help="seconds until a host that is not heard of has left"
    )
    option("--wait", type=float, default=30.0, metavar="S", help="seconds for further hosts once there are enough")
    option("--run-id", default="run", help=argparse.SUPPRESS)
    option("--obey", action="store_true", help=argparse.SUPPRESS)  # signals come by standard input
    option("-m", dest="module", action="store_true", help="SCRIPT is a module")
    option("script", metavar="SCRIPT")
    option("arguments", nargs=argparse.REMAINDER, metavar="...")


def run(args: Namespace) -> int:
    """Run it; the exit code: 0, the failed rank's (128 + its signal, if killed), or 128 + the signal that ended it."""
    try:
        return _fleet(args) if args.hostfile else _here(args)
    except MeshError as e:
        print(f"shardlib run: {e}", file=sys.stderr)
        return 2


def _here(args: Namespace) -> int:
    from shardlib.cli import agent  # torch's elastic agent takes its time to load

    if args.include or args.exclude:
        raise MeshError("--include and --exclude choose hosts of a --hostfile, which is not given")
    hosts = _range(args.nnodes or "1")
    if hosts[1] > 1 and not args.master:
        raise MeshError(f"--nnodes {args.nnodes}: several hosts need a --hostfile, or --master HOST on each of them")
    if args.obey:
        from shardlib.cli.fleet import obey

        obey()
    return agent.run(
        agent.Plan(
            command=[sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments],
            nproc=args.nproc or max(1, torch.cuda.device_count()),
            hosts=hosts,
            master=_address(args.master) if args.master else ("127.0.0.1", 0),
            run_id=args.run_id,
            restarts=args.max_restarts,
            grace=args.grace,
            silence=args.silence,
            wait=args.wait,
            logs=args.log_dir,
        )
    )


def _fleet(args: Namespace) -> int:
    from shardlib.cli.fleet import Fleet

    try:
        text = args.hostfile.read_text()
    except OSError as e:
        raise MeshError(f"the hostfile cannot be read: {e}") from None
    hosts = chosen(parsed(text), args.include, args.exclude)
    least, most = _range(args.nnodes or str(len(hosts)))
    if most != len(hosts):
        raise MeshError(f"--nnodes {args.nnodes}: the hostfile gives {len(hosts)} host(s); the most must be that")
    address, port = _address(args.master or next(iter(hosts)))
    name = f"run-{uuid.uuid4().hex[:8]}"
    commands = {}
    for host, slots in hosts.items():
        told = {"nproc": args.nproc or len(slots), "nnodes": f"{least}:{most}", "master": f"{address}:{port}"}
        told |= {"run-id": name, "max-restarts": args.max_restarts, "grace": args.grace}
        told |= {"silence": args.silence, "wait": args.wait} | ({"log-dir": args.log_dir} if args.log_dir else {})
        options = [f"--{key}={value}" for key, value in told.items()] + ["--obey"]
        devices = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))}"]
        program = [*(["-m"] if args.module else []), args.script, *args.arguments]
        commands[host] = [*devices, sys.executable, "-m", "shardlib", "run", *options, *program]
    return Fleet(commands, shlex.split(args.ssh), args.max_restarts, args.grace).run()


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise MeshError(f"--nnodes {text}: write the number of hosts, or the least and the most: 1:4")
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if port and not port.isdigit():
        raise MeshError(f"--master {text}: write HOST or HOST:PORT")
    return host, int(port or PORT)
