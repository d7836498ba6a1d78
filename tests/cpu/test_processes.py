"""The native kernels after a fork, in workers of a DataLoader, and from many Python threads."""

import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from linattn import backends, causal_conv1d, linear_attention
from linattn.testing import relative_error

cpu = pytest.mark.skipif(not backends()["cpu"].available, reason="the native kernels are not built")


def results(seed=0, N=300):
    """Outputs and gradients of every recurrence and of the convolution, as one tensor."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, N, 3, 8, generator=generator).requires_grad_() for _ in range(3))
    g, beta = -torch.rand(2, N, 3, 8, generator=generator), torch.rand(2, N, 3, generator=generator)
    found = []
    for gates in ((None, None), (g[..., 0], None), (g, None), (g[..., 0], beta)):
        o = linear_attention(q, k / 4, v, *gates, backend="cpu")
        found += [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]
    x = causal_conv1d(q.flatten(2), torch.ones(24, 4), activation="silu", backend="cpu")
    with torch.no_grad():
        found += [x, linear_attention(q[:, :1], k[:, :1], v[:, :1], backend="cpu")]
    return torch.cat([y.detach().flatten() for y in found])


def send(connection):
    connection.send(results().numpy())
    connection.close()


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return results(seed=i)


@cpu
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_what_its_parent_does():
    expected = results()  # the threads of the parent are up by now
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(there,))
    child.start()
    assert here.poll(60), "the child hangs"
    found = torch.from_numpy(here.recv())
    child.join(60)
    assert child.exitcode == 0
    # On one thread: the parts of a long sequence may differ, this one is too short for parts.
    assert relative_error(found, expected) < 1e-6


@cpu
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_compute_it_too():
    loader = DataLoader(Rows(), batch_size=None, num_workers=2, timeout=60)
    for i, found in enumerate(loader):
        assert relative_error(found, results(seed=i)) < 1e-6


@cpu
def test_many_python_threads_at_once_do_not_disturb_each_other():
    expected = [results(seed=i) for i in range(4)]
    wrong = []

    def work(i):
        for _ in range(8):
            if not torch.equal(results(seed=i), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@cpu
def test_the_same_bits_again_and_on_any_number_of_threads():
    """No part of a sequence here; tests/cpu/test_sequence_split.py has those."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results()
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            assert torch.equal(results(), one)
    finally:
        torch.set_num_threads(before)
