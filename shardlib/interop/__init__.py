"""What other systems have, as values of this library."""

from shardlib.interop import deepspeed as deepspeed
