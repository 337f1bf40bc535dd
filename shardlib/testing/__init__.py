"""Helpers for tests of sharded programs: a function, a loss or an optimizer against the same on one rank."""

from shardlib.testing.functions import check as check
from shardlib.testing.functions import meshes as meshes
from shardlib.testing.launch import forked as forked
from shardlib.testing.launch import ranks as ranks
from shardlib.testing.optimizers import check_optimizer as check_optimizer
from shardlib.testing.steps import check_loss as check_loss
from shardlib.testing.steps import collectives as collectives
from shardlib.testing.storages import memory as memory
