"""The command line."""

from shardlib.cli.command import main as main
