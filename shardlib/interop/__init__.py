"""What other tools write and read."""

from shardlib.interop import safetensors as safetensors
