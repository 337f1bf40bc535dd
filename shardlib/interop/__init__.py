"""What other tools write and read, as values of this library."""

from shardlib.interop import deepspeed as deepspeed
from shardlib.interop import safetensors as safetensors
