"""How much rounding alone changes what a model gives: the tolerance of the comparisons."""

import copy

import torch

UNIT = 2.0**-23  # of float32
FACTOR = 8.0  # the largest error seen in any quantity of any family is 4 times the noise


def results(model, x):
    """Return logits, loss and every gradient by name."""
    model.zero_grad()
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients}


def noise(model, x):
    """Return by name how far results move (norm) if every weight moves by up to a unit of it."""
    before, most = results(model, x), {}
    for seed in range(3):
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in moved.parameters():
                p.mul_(1 + UNIT * (2 * torch.rand(p.shape, generator=generator) - 1))
        for name, y in results(moved, x).items():
            most[name] = max(most.get(name, 0.0), (y - before[name]).norm().item())
    return before, most


def excess(got, before, most):
    """Return the largest error over the noise, and of what; a unit of the size is noise too."""
    assert got.keys() == before.keys()
    found = {}
    for name, wanted in before.items():
        allowed = most[name] + UNIT * wanted.norm().item() + 1e-12
        found[name] = (got[name] - wanted).norm().item() / allowed
    worst = max(found, key=found.get)
    return found[worst], worst
