import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from the same random state and leaves the thread count alone."""
    torch.manual_seed(0)
