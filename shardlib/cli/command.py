"""The command `shardlib`: `run`, `doctor`, `hang`."""

from argparse import ArgumentParser
from collections.abc import Sequence

from shardlib.cli import doctor, hang, run

COMMANDS = {
    "run": (run, "start the ranks of a run, here or on the hosts of a hostfile"),
    "doctor": (doctor, "check this machine, or the hosts of a hostfile, and say what to mend"),
    "hang": (hang, "which rank of a hung run did not reach which collective"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's; the exit code."""
    parser = ArgumentParser(prog="shardlib", description="Tools for runs with shardlib.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, help_) in COMMANDS.items():
        module.add(commands.add_parser(name, help=help_, description=help_))
    args = parser.parse_args(argv)
    return COMMANDS[args.command][0].run(args)
