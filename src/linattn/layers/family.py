"""MetaLA's unified table: what each layer takes from its tokens, and what that makes possible.

python -m linattn.layers.family          prints docs/family.md
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """The parts of a layer in the unified form S_t = diag(alpha_t) S_{t-1} + k_t v_t^T."""

    query: str
    key: str
    value: str
    decay: str
    gate: str
    kind: Literal["softmax", "none", "fixed", "dynamic", "delta"]  # what makes it forget
    tied_key: bool = False  # the key is a function of the decay, with no parameters of its own

    @property
    def linear_cost(self) -> bool:
        """C0: the cost is linear in the number of tokens."""
        return self.kind != "softmax"

    @property
    def dynamic_memory(self) -> bool:
        """C1: what the tokens say decides what is forgotten."""
        return self.kind in ("softmax", "dynamic", "delta")

    @property
    def static_approximation(self) -> bool:
        """C2: for some input, any map of softmax attention is reached with bounded parameters.

        It takes a query, and a key or a decay that depends on the token; a fixed decay forbids it.
        """
        return self.kind != "fixed"

    @property
    def fewest_parameters(self) -> bool:
        """C3: none of query, key and decay could be left out without losing C1 or C2."""
        return self.kind == "dynamic" and self.tied_key


def layers() -> dict[str, Family]:
    """Return the family entry of every layer, by name."""
    from linattn import layers

    classes = (getattr(layers, name) for name in layers.__all__)
    return {c.__name__: c.family for c in classes if hasattr(c, "family")}


def table() -> str:
    """Return docs/family.md: the page, in Markdown."""

    def mark(holds: bool) -> str:
        return "yes" if holds else "no"

    rows = [
        f"| `{name}` | {f.query} | {f.key} | {f.value} | {f.decay} | {f.gate} | "
        f"{mark(f.linear_cost)} | {mark(f.dynamic_memory)} | {mark(f.static_approximation)} | "
        f"{mark(f.fewest_parameters)} |"
        for name, f in sorted(layers().items())
    ]
    return "\n".join([INTRODUCTION, *rows, "", NOTES])


INTRODUCTION = """\
# The family

What each layer of `linattn.layers` takes from a token x, in the unified form of *MetaLA* (Chou et
al. 2024, section 3): S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, y_t = (gate_t
norm(o_t)) Wo. Written by `linattn info --family` from the layer classes.

| layer | q | k | v | decay alpha | gate | C0 | C1 | C2 | C3 |
|---|---|---|---|---|---|---|---|---|---|"""

NOTES = """\
C0: the cost is linear in the number of tokens. C1, dynamic memory: the tokens decide what is
forgotten. C2, static approximation: any attention map of softmax is reached, for some input, with
bounded parameters. C3: no fewer of query, key and decay would meet the others. The criteria are
necessary, not sufficient, and C3 counts the three groups of the paper only; softmax attention is
the paper's yardstick, not its ideal.

The delta rule multiplies the state by I - beta_t k_t k_t^T as well, which is not diagonal: outside
of the paper's table. It forgets what it is told to, so C1 and C2 are marked; C3 is not, as it has
a key, a write strength and often a decay. `LinearAttention` is marked as it is with its default,
decay=None; with decay="token" or "channel" it is a `GatedLinearAttention` in this table."""
