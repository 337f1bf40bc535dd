"""DeepSpeed's JSON configs: `load` turns one into what a train step takes, `explain` into code. docs/deepspeed.md."""

from shardlib.interop.deepspeed.config import Config as Config
from shardlib.interop.deepspeed.config import load as load
from shardlib.interop.deepspeed.explain import explain as explain
from shardlib.interop.deepspeed.optimizers import matrices as matrices
