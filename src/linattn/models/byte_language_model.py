"""A small byte-level language model on linear attention with per-token decay. Reads top to bottom.

x = embed(bytes);  x += norm(attention(norm(x)));  x += mlp(norm(x));  logits = norm(x) embed^T
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from linattn._validation import reject, require_number, require_positive_int, require_tensor
from linattn.layers import LinearAttention, RecurrentCache

VOCABULARY = 256


@dataclass(frozen=True)
class Configuration:
    """Sizes and backend; the default has half a million parameters."""

    layers: int = 2
    dim: int = 128
    heads: int = 4
    hidden: int = 384
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "hidden"):
            require_positive_int(name, getattr(self, name))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to x."""

    def __init__(self, c: Configuration):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim)
        self.attention = LinearAttention(c.dim, c.heads, decay="token", backend=c.backend)
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
        self,
        tokens: Tensor,
        *,
        cache: list[RecurrentCache] | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, list[RecurrentCache]]:
        """Return logits [B, N, 256] for tokens [B, N] int64.

        `cache` is what an earlier call with `return_cache` returned: one entry a block, of a size
        that does not depend on the number of tokens seen.

        Raises:
            TypeError: tokens is no int64 tensor.
            ValueError: tokens does not have two dimensions, or cache not one entry a block.
        """
        require_tensor("tokens", tokens)
        if tokens.dtype != torch.int64:
            reject("tokens", tokens.dtype, "torch.int64", kind=TypeError)
        if tokens.dim() != 2:
            reject("tokens", f"shape {list(tokens.shape)}", "[B, N]")
        if cache is not None and len(cache) != len(self.blocks):
            reject("cache", f"{len(cache)} entries", f"{len(self.blocks)}, one a block")
        x = self.embedding(tokens)  # [B, N, dim]
        after = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if cache is None else cache[i])
            after.append(state)
        logits: Tensor = self.norm(x) @ self.embedding.weight.T  # [B, N, 256]
        return (logits, after) if return_cache else logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss, in nats a byte, of predicting tokens [B, N + 1] after the first."""
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        n: int,
        *,
        temperature: float = 0.8,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Return n bytes after prompt: one call for the prompt, then one a byte, constant memory.

        Raises:
            TypeError: temperature is not a number, n not an int.
            ValueError: an empty prompt, n < 1, or temperature < 0 (0 takes the likeliest byte).
        """
        if not prompt:
            reject("prompt", "no bytes", "at least one")
        require_positive_int("n", n)
        require_number("temperature", temperature)
        if temperature < 0:
            reject("temperature", temperature, "a number >= 0")
        device = self.embedding.weight.device
        made: list[int] = []
        cache: list[RecurrentCache] | None = None
        tokens = torch.tensor([list(prompt)], device=device)  # [1, N]
        while True:
            logits, cache = self(tokens, cache=cache, return_cache=True)
            last = logits[0, -1].float()  # [256]
            if temperature == 0:
                token = last.argmax(keepdim=True)
            else:
                token = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
            made.append(int(token))
            if len(made) == n:
                return bytes(made)
            tokens = token[None]  # [1, 1]


def save(model: ByteLanguageModel, path: Path) -> None:
    """Write weights and configuration to one safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    weights = {name: x.detach().contiguous() for name, x in model.state_dict().items()}
    beside = path.with_name(f"{path.name}.tmp")
    save_file(weights, beside, metadata={"configuration": json.dumps(asdict(model.configuration))})
    os.replace(beside, path)


def load(path: Path) -> ByteLanguageModel:
    """Return the model that `save` wrote to path.

    Raises:
        ValueError: the file holds no configuration: it is not one that `save` wrote.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        if "configuration" not in about:
            reject("path", f"{path} without a configuration", "a file that `save` wrote")
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = ByteLanguageModel(Configuration(**json.loads(about["configuration"])))
    model.load_state_dict(weights)
    return model
