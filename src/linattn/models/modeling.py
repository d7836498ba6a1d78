"""One decoder for every mixer, a transformers model in all its ways. Reads top to bottom.

x = embed(tokens);  x += mixer(norm(x));  x += feed_forward(norm(x));  logits = norm(x) W
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from linattn._validation import is_readable, reject
from linattn.models import arguments, caching
from linattn.models.block import Block
from linattn.models.configuration import LinattnConfig
from linattn.models.packing import packed_bounds, token_positions, without_first_labels


class LinattnPreTrainedModel(PreTrainedModel):
    """What all models here tell transformers."""

    config_class = LinattnConfig
    config: LinattnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # no going back in a recurrence: what transformers before 5.25 asks
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module; what was loaded from a file stays as it is."""
        super()._init_weights(module)
        reset = getattr(module, "reset_parameters", None)
        if reset is None or not type(module).__module__.startswith("linattn."):
            return
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
        reset()
        for parameter, value in loaded:
            parameter.copy_(value)


class LinattnModel(LinattnPreTrainedModel):
    """The decoder without an output layer: tokens or embeddings to hidden states."""

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, elementwise_affine=config.norm_affine
        )
        self.dropout = nn.Dropout(config.dropout)
        self.embed_positions: nn.Embedding | None = None
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states [B, N, hidden_size] and the cache.

        Args:
            input_ids: [B, N] tokens.
            inputs_embeds: [B, N, hidden_size] in place of input_ids.
            attention_mask: [B, N], or [B, tokens seen + N] with a cache; 0: padding.
            position_ids: [B, N] or [1, N]. Where they start again in one row, that row is packed.
            cache: of transformers, dynamic or static; its layers hold one state each, or keys.
            use_cache: whether to make a cache where none is given.
            **kwargs: cu_seq_lens_q [S + 1], the bounds of packed sequences; others of transformers.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds; a mask of four dimensions
                for a linear mixer; sequences packed in more than one row.
        """
        arguments.check_extras(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            reject("input_ids", f"{got} with inputs_embeds", "one of the two")
        x = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.bidirectional and cache is not None:
            reject("cache", "a cache in a bidirectional model", "None")
        if cache is not None:
            arguments.check_cache(cache, self.config)
        arguments.check_mask(attention_mask, cache, x)
        if position_ids is not None:
            arguments.check_positions(position_ids, x)
        given = None if isinstance(attention_mask, dict) else attention_mask
        bounds = packed_bounds(kwargs.get("cu_seq_lens_q"), position_ids, given, cache, x)
        if use_cache and cache is None and bounds is None and not self.config.bidirectional:
            cache = DynamicCache(config=self.config)
        N = x.shape[1]
        positions: Tensor | None = None
        visible: Tensor | None = None
        softmax = set(self.config.layer_types or ()) - {"linear_attention"}
        rotary = softmax and bounds is None and not self.config.bidirectional
        if rotary or self.embed_positions is not None:
            positions = token_positions(position_ids, given, cache, bounds, x)
        if self.embed_positions is not None:
            assert positions is not None
            x = x + self._learned(self.embed_positions, positions)
        if rotary:
            (kind,) = softmax
            visible = self._visible(kind, x, attention_mask, cache)
        else:
            positions = None
        mask = self._padding(attention_mask, N)
        x = self.dropout(x)
        if cache is not None:
            caching.count(cache, N)
        for layer in self.layers:
            x = layer(x, mask, visible, positions, bounds, cache=cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), cache=cache)

    def _embed(self, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        arguments.check_tokens("input_ids", tokens)
        try:
            x: Tensor = self.embed_tokens(tokens)
        except IndexError:
            arguments.reject_token(tokens, self.config.vocab_size)
        return x

    def _learned(self, table: nn.Embedding, positions: Tensor) -> Tensor:
        try:
            rows: Tensor = table(positions)  # [1 or B, N, dim]
        except IndexError:
            got = f"position {int(positions.max())} with learned positions"
            expected = f"at most max_position_embeddings = {table.num_embeddings} tokens"
            reject("input_ids", got, expected)
        return rows

    def _visible(
        self, kind: str, x: Tensor, attention_mask: Any, cache: Cache | None
    ) -> Tensor | None:
        """Return which keys a query sees, as scaled_dot_product_attention takes it."""
        if isinstance(attention_mask, dict):  # `generate` made the masks for a static cache
            prepared: Tensor | None = attention_mask[kind]
            return prepared
        full = kind == "full_attention"
        make = create_causal_mask if full else create_sliding_window_causal_mask
        # Without positions: they would be searched for packed sequences, which there are none of.
        visible: Tensor | None = make(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, cache=cache,
            position_ids=None,
        )  # fmt: skip
        return visible

    def _padding(self, attention_mask: Any, N: int) -> Tensor | None:
        """Return mask [B, N] bool of the new tokens, or None where none is padding."""
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask.get("linear_attention")
        if attention_mask is None:
            return None
        linear = "linear_attention" in (self.config.layer_types or ())
        if attention_mask.dim() != 2:
            if linear or self.config.bidirectional:
                reject("attention_mask", f"shape {list(attention_mask.shape)}", "[B, N]")
            return None
        mask: Tensor = attention_mask[:, -N:].bool()
        if is_readable(mask) and bool(mask.all()):
            return None
        return mask


class LinattnForCausalLM(LinattnPreTrainedModel, GenerationMixin):
    """The language model: predicts the next token, generates, trains under Trainer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LinattnConfig):
        super().__init__(config)
        if config.bidirectional:
            reject("bidirectional", True, "False: a language model must not see what it predicts")
        self.model = LinattnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return what `generate` passes to `forward`, of the whole text only what is new.

        transformers before 5.25 counts the tokens in a cache by its keys; where there are none it
        would read the text in front again, on top of itself.
        """
        mask = kwargs.get("attention_mask")
        if next_sequence_length is None and cache is not None and not caching.is_counted(cache):
            whole = mask is None or mask.shape[1] == input_ids.shape[1]
            seen = int(caching.tokens_seen(cache))
            if whole and seen > 0:
                next_sequence_length = input_ids.shape[1] - seen
        if next_sequence_length is not None and next_sequence_length < 1:
            seen = input_ids.shape[1] - int(next_sequence_length)
            got = f"{input_ids.shape[1]} tokens with a cache that has seen {seen}"
            reject("input_ids", got, "the whole text, with at least one new token")
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, cache=cache, **kwargs
        )
        return inputs

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, N, vocab_size], the cache, and with labels the loss.

        Args:
            input_ids: this, attention_mask, position_ids, cache, inputs_embeds and use_cache as in
                `LinattnModel.forward`, and so are the errors.
            attention_mask: see there.
            position_ids: see there.
            cache: see there.
            inputs_embeds: see there.
            labels: [B, N], the tokens themselves; -100: not scored. They move by one inside; the
                first of a packed sequence is not scored.
            use_cache: see there; with labels False unless given.
            logits_to_keep: the last n tokens only, or these indices; 0: all.
            **kwargs: see there; num_items_in_batch, what Trainer divides the loss by;
                shift_labels [B, N] in place of labels: what shall be said at each position.
        """
        arguments.check_logits_to_keep(logits_to_keep)
        moved = kwargs.get("shift_labels")
        if labels is not None and moved is not None:
            reject("shift_labels", "both with labels", "one of the two")
        if use_cache is None and (labels is not None or moved is not None):
            use_cache = False  # Trainer would gather the cache while it evaluates
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and tokens is not None:
            arguments.check_labels("labels", labels, tokens.shape[:2])
            given = None if isinstance(attention_mask, dict) else attention_mask
            bounds = packed_bounds(kwargs.get("cu_seq_lens_q"), position_ids, given, cache, tokens)
            kwargs["cu_seq_lens_q"] = bounds  # found once, for the model too
            labels = without_first_labels(labels, bounds)
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden: Tensor = out.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep > 0:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None or moved is not None:
            for name, given in (("labels", labels), ("shift_labels", moved)):
                if given is not None:
                    arguments.check_labels(name, given, logits.shape[:2])
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=out.cache, hidden_states=out.hidden_states
        )
