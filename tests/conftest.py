import os

import pytest
import torch

# Read when a kernel is defined: before anything imports one. Without a GPU they are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["COLUMNS"] = "200"  # the console breaks no message that a test reads

from linattn import cpu

if "LINATTN_TEST_LIBRARY" in os.environ:  # the native kernels of another build: make sanitize
    cpu.__path__[:] = [os.environ["LINATTN_TEST_LIBRARY"]]


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from the same random state and leaves the thread count alone."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
