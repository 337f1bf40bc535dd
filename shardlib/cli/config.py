"""`shardlib config explain FILE`: a DeepSpeed config as code of this library, and what of it is left out."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from shardlib.errors import ConfigError
from shardlib.interop.deepspeed.config import load
from shardlib.interop.deepspeed.explain import explain


def add(parser: ArgumentParser) -> None:
    """The arguments."""
    action = parser.add_subparsers(dest="action", required=True)
    help_ = "print code that is equal to a DeepSpeed config, and what is left out of it"
    said = action.add_parser("explain", help=help_, description=help_)
    said.add_argument("file", type=Path, metavar="ds_config.json")
    said.add_argument("--dp", type=int, metavar="N", help="data-parallel ranks, where the batch sizes do not say")
    said.add_argument(
        "--auto", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help='what "auto" stands for: lr=2e-5'
    )
    said.add_argument("--without", nargs="+", default=[], metavar="GLOB", help="keys to leave out: 'optimizer.*'")


def _pair(text: str) -> tuple[str, Any]:
    name, equals, said = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"write NAME=VALUE, not {text}")
    try:
        return name, json.loads(said)
    except json.JSONDecodeError:
        return name, said


def run(args: Namespace) -> int:
    """Print the code; 1 where the config cannot be honoured, with all reasons, 2 where it cannot be read."""
    try:
        print(explain(load(args.file, dp=args.dp, auto=dict(args.auto), without=args.without)), end="")
    except ConfigError as e:
        print(f"shardlib config: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"shardlib config: {args.file} cannot be read: {e.strerror}", file=sys.stderr)
        return 2
    return 0
