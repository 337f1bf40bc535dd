"""The heap: large blocks come back without the operating system, unless the environment says otherwise."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from shardlib.heap import keep_freed
kept = keep_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.set_num_threads(1)
torch.empty(1 << 24).fill_(1.0)
before = faults()
for _ in range(4):
    torch.empty(1 << 24).fill_(1.0)
print(kept, faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("said", "kept"), [({}, True), ({"SHARDLIB_KEEP_FREED": "0"}, False)])
def test_freed_memory_is_used_again(said, kept, monkeypatch):
    """64 MB are 16384 pages; a page fault each is what getting them again costs (huge pages make it fewer)."""
    for name in ("SHARDLIB_KEEP_FREED", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == str(kept)
    assert int(out[1]) < 100 if kept else int(out[1]) > 100
