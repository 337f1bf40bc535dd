"""The heap: large blocks come back without the operating system, unless the environment says otherwise."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, torch
from shardlib.heap import keep_freed

def faults():
    torch.empty(1 << 24).fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(1 << 24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
print(faults())
os.environ["SHARDLIB_KEEP_FREED"] = "0"
print(int(keep_freed()), faults())
del os.environ["SHARDLIB_KEEP_FREED"]
keep_freed.cache_clear()
print(int(keep_freed()), faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again(monkeypatch):
    """A page fault each is what getting pages of 64 MB again costs (huge pages make it fewer)."""
    for name in ("SHARDLIB_KEEP_FREED", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    plain, left, told, kept, after = map(int, out.split())
    assert (left, kept) == (False, True) and told > plain / 2 > 2 * after
