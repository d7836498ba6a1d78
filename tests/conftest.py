import pytest
import torch

from linattn import backends
from linattn.testing import KINDS

# A new backend joins every test of the operator by being available.
FAST = [b.name for b in backends().values() if b.available and b.name != "reference"]


@pytest.fixture(params=FAST)
def backend(request):
    return request.param


@pytest.fixture(params=["reference", *FAST])
def any_backend(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    """The name of a kind of call; `KINDS[kind]` is its Case."""
    return request.param


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from the same random state and leaves the thread count alone."""
    torch.manual_seed(0)
