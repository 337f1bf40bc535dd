"""The heap: large blocks come back without the operating system, unless the environment says otherwise."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from shardlib.heap import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(1 << 24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
plain = faults()
kept = keep_freed()
faults()
print(kept, plain, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("said", "kept"), [({}, True), ({"SHARDLIB_KEEP_FREED": "0"}, False)])
def test_freed_memory_is_used_again(said, kept, monkeypatch):
    """A page fault each is what getting pages of 64 MB again costs (huge pages make it fewer)."""
    for name in ("SHARDLIB_KEEP_FREED", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    plain, after = map(int, out[1:])
    assert out[0] == str(kept)
    assert after < plain / 4 if kept else after > plain / 2
