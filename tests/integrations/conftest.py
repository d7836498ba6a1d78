import pytest

import linattn


@pytest.fixture(autouse=True)
def _put_back():
    yield
    linattn.decelerate()
