"""What all tests share: Inductor compiles in the process that asks it, and the heap is looked through less often."""

import gc
import os

# With more threads Inductor starts workers beside each of pytest's own, which import torch and then wait.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_finish() -> None:
    """What has been imported stays to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
