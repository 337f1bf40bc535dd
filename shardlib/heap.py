"""The C library's heap, told to keep what is freed: a train step asks for the same memory again and again."""

import ctypes
import os
from functools import cache

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h


@cache
def keep_freed() -> bool:
    """Let malloc keep freed memory for the next request, in this process; whether it does.

    By default glibc gives blocks of 32 MB and more back to the operating system when they are freed, which clears every
    page when they are asked for again: filling a new tensor of 64 MB then takes six times as long. The process stays
    as large as it once was. `SHARDLIB_KEEP_FREED=0` in the environment leaves malloc alone; so do other C libraries.
    """
    if os.environ.get("SHARDLIB_KEEP_FREED") == "0" or "MALLOC_MMAP_MAX_" in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
