"""A small byte-level language model on linear attention with per-token decay. Reads top to bottom.

x = embed(bytes);  x += attention(norm(x));  x += mlp(norm(x));  logits = norm(x) embed^T
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn._validation import reject
from linattn.layers import LinearAttention, RecurrentCache

VOCABULARY = 256


@dataclass(frozen=True)
class Configuration:
    """Sizes; the default has half a million parameters."""

    layers: int = 2
    dim: int = 128
    heads: int = 4
    hidden: int = 384


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to x."""

    def __init__(self, c: Configuration):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim)
        self.attention = LinearAttention(c.dim, c.heads, decay="token")
        self.output_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.gate_and_up = nn.Linear(c.dim, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor, cache: RecurrentCache | None) -> tuple[Tensor, RecurrentCache]:
        """Map x [B, N, dim] and the cache before it to x and the cache after it."""
        y, cache = self.attention(self.attention_norm(x), cache=cache, return_cache=True)
        x = x + self.output_norm(y)  # unnormalised sums grow with N: the norm keeps their scale
        gate, up = self.gate_and_up(self.mlp_norm(x)).chunk(2, dim=-1)
        x = x + self.down(nn.functional.silu(gate) * up)
        return x, cache


class ByteLanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, configuration: Configuration | None = None):
        super().__init__()
        c = Configuration() if configuration is None else configuration
        self.configuration = c
        self.embedding = nn.Embedding(VOCABULARY, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
            elif name.endswith("decay_proj.bias"):
                # From exp(-24 / 16) = 0.22 a token to nearly 1: one head begins with the last few
                # bytes in view, one with all of them.
                weight.data = torch.linspace(-24.0, 5.0, c.heads)

    def forward(
        self, tokens: Tensor, caches: list[RecurrentCache] | None = None
    ) -> tuple[Tensor, list[RecurrentCache]]:
        """Return logits [B, N, 256] for tokens [B, N], and the caches after them."""
        x = self.embedding(tokens)
        after = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[i])
            after.append(cache)
        return self.norm(x) @ self.embedding.weight.T, after

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss in nats a byte of predicting tokens [B, N + 1] after the first."""
        logits, _ = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, *, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> Iterator[int]:
        """Yield bytes without end after prompt, by recurrent decode in constant memory.

        Raises:
            ValueError: the prompt is empty, or temperature < 0 (0 takes the likeliest byte).
        """
        if not prompt:
            reject("prompt", "no bytes", "at least one")
        if temperature < 0:
            reject("temperature", temperature, "a number >= 0")
        logits, caches = self(torch.tensor([list(prompt)]))
        while True:
            last = logits[0, -1].float()
            if temperature == 0:
                token = last.argmax(keepdim=True)
            else:
                token = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
            yield int(token)
            logits, caches = self(token[None], caches)
