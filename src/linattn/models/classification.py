"""Classifiers of sequences, of pairs of them, and of images, on the same model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from linattn._validation import reject
from linattn.models.configuration import LinattnConfig
from linattn.models.modeling import LinattnModel, LinattnPreTrainedModel


def pool(x: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Return one vector [B, dim] for the tokens of x [B, N, dim] that are there.

    "mean" of them, "cls", the first, or "last". A row of padding alone has the mean 0.
    """
    if mask is None:
        return {"mean": x.mean(1), "cls": x[:, 0], "last": x[:, -1]}[how]
    there = mask.bool()
    if how == "mean":
        count = there.sum(1, keepdim=True).clamp(min=1)
        return x.masked_fill(~there[:, :, None], 0).sum(1) / count
    tokens = torch.arange(x.shape[1], device=x.device)
    place = there.long().argmax(1) if how == "cls" else torch.where(there, tokens, 0).amax(1)
    return x[torch.arange(x.shape[0], device=x.device), place]


def check_pooling(config: LinattnConfig) -> None:
    """Raise where the first token would have to sum up what it has not seen."""
    if config.pooling == "cls" and not config.bidirectional:
        reject("pooling", "'cls' without bidirectional=True", "'mean' or 'last'")


class LinattnForSequenceClassification(LinattnPreTrainedModel):
    """A class for every sequence, or with two_towers for every pair.

    A pair is read by the same model twice and judged by [x0, x1, x0 x1, x0 - x1], as in Long Range
    Arena's retrieval (Tay et al. 2021).
    """

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        check_pooling(config)
        self.num_labels = int(config.num_labels or 2)
        self.model = LinattnModel(config)
        dim = config.hidden_size
        self.pair: nn.Module | None = None
        if config.two_towers:
            self.pair = nn.Sequential(nn.Linear(4 * dim, dim), nn.ReLU())
        self.score = nn.Linear(dim, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits [B, num_labels], and with labels the loss.

        Args:
            input_ids: [B, N], with two_towers [B, 2, N].
            attention_mask: of the same shape; 0: padding, on either side.
            inputs_embeds: [B, N, dim] or [B, 2, N, dim] in place of input_ids.
            labels: [B] classes; numbers for a regression, [B, num_labels] 0 or 1 for many classes.
            **kwargs: of transformers, output_hidden_states among them.

        Raises:
            ValueError: tokens that are no pairs in a model of pairs, or the other way round.
        """
        given, name = (inputs_embeds, "inputs_embeds") if input_ids is None else (
            input_ids, "input_ids"
        )  # fmt: skip
        if given is None:
            reject("input_ids", "neither with inputs_embeds", "one of the two")
        assert given is not None
        towers = self.pair is not None
        dims = 2 + int(input_ids is None) + int(towers)
        if given.dim() != dims or (towers and given.shape[1] != 2):
            form = "[B, 2, N" if towers else "[B, N"
            expected = f"{form}, dim]" if input_ids is None else f"{form}]"
            reject(name, f"shape {list(given.shape)}", expected)
        if towers:  # both of a pair side by side in the batch
            given = given.flatten(0, 1)
            attention_mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        out = self.model(attention_mask=attention_mask, use_cache=False, **{name: given}, **kwargs)
        x = pool(out.last_hidden_state, attention_mask, self.config.pooling)
        if self.pair is not None:
            a, b = x.unflatten(0, (-1, 2)).unbind(1)
            x = self.pair(torch.cat([a, b, a * b, a - b], dim=-1))
        logits = self.score(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class LinattnForImageClassification(LinattnPreTrainedModel):
    """A class for every image, read as a sequence of pixels or of patches, row by row."""

    main_input_name = "pixel_values"

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        check_pooling(config)
        size, patch = config.image_size, config.patch_size
        if size % patch != 0:
            reject("patch_size", patch, f"a divisor of image_size = {size}")
        table = config.pixel_embedding == "table"
        if table and (patch != 1 or config.num_channels != 1 or config.vocab_size < 256):
            got = f"patches of {patch}, {config.num_channels} channels, {config.vocab_size} tokens"
            reject("pixel_embedding", f"'table' with {got}", "single grey pixels and 256 tokens")
        self.num_labels = int(config.num_labels or 2)
        self.model = LinattnModel(config)
        self.patches: nn.Module | None = None
        if not table:
            self.model.embed_tokens = None
            self.patches = nn.Conv2d(config.num_channels, config.hidden_size, patch, stride=patch)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Return logits [B, num_labels], and with labels [B] the loss.

        Args:
            pixel_values: [B, num_channels, image_size, image_size]; floats, or with
                pixel_embedding="table" grey levels 0 to 255 as integers.
            labels: [B] classes.
            **kwargs: of transformers, output_hidden_states among them.

        Raises:
            ValueError, TypeError: another shape, or levels that are no integers.
        """
        c = self.config
        shape = [c.num_channels, c.image_size, c.image_size]
        if pixel_values.dim() != 4 or list(pixel_values.shape[1:]) != shape:
            expected = f"[B, {', '.join(map(str, shape))}]"
            reject("pixel_values", f"shape {list(pixel_values.shape)}", expected)
        if self.patches is None:
            if pixel_values.is_floating_point():
                expected = "integers 0 to 255 for pixel_embedding='table'"
                reject("pixel_values", pixel_values.dtype, expected, kind=TypeError)
            out = self.model(pixel_values.flatten(1).long(), use_cache=False, **kwargs)
        else:
            x = self.patches(pixel_values).flatten(2).transpose(1, 2)  # [B, patches, dim]
            out = self.model(inputs_embeds=x, use_cache=False, **kwargs)
        logits = self.score(pool(out.last_hidden_state, None, c.pooling))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
