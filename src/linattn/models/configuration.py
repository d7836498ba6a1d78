"""The configuration of the models, in the form that transformers saves and loads."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from linattn._validation import reject, require_bool, require_number, require_positive_int
from linattn.models.mixers import check_options


class LinattnConfig(PreTrainedConfig):
    r"""Sizes and mixers of a linattn model.

    Args:
        vocab_size: tokens; 256 for bytes.
        hidden_size: channels between the layers.
        num_hidden_layers: layers, each a mixer and a gated feed-forward part.
        num_attention_heads: heads of every mixer.
        intermediate_size: channels inside of the feed-forward part; None: 8 / 3 of hidden_size,
            rounded up to a multiple of 256 where that is more than 1024, else of 16; 0: layers
            are mixers alone.
        mixer: a name of `linattn.models.mixers.MIXERS`; or a list of names, repeated down the
            layers: ["metala", "metala", "softmax"] is a hybrid.
        mixer_options: keyword arguments for a mixer by its name: {"metala": {"kernel_size": 2}}.
        bidirectional: whether every token sees all: for classification.
        rms_norm_eps: of the norms in front of each part.
        norm_affine: whether these norms have weights (MetaLA as released has none).
        dropout: of each part's output, in training.
        initializer_range: standard deviation of projections and embeddings.
        tie_word_embeddings: whether the output layer is the embedding, transposed.
        use_cache: whether `forward` returns a cache unless told otherwise, in evaluation.
        learned_positions: whether a table of max_position_embeddings is added to the tokens.
        max_position_embeddings: the length that evaluation tools cut at; no limit of the model
            itself unless its positions are learned.
        pooling: of a classifier, "mean" of the tokens, "cls" (the first), or "last".
        two_towers: whether a classifier reads pairs [B, 2, N].
        image_size, patch_size, num_channels: of an image classifier; patches of 1 are pixels.
        pixel_embedding: "linear", of values; or "table", of 8-bit grey levels of single pixels.

    Raises:
        ValueError, TypeError: a size that is no positive int, an unknown mixer or option.
    """

    model_type = "linattn"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    intermediate_size: int | None = None
    mixer: str | list[str] = "metala"
    mixer_options: dict[str, dict[str, Any]] | None = None
    bidirectional: bool = False
    rms_norm_eps: float = 1e-6
    norm_affine: bool = True
    dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    learned_positions: bool = False
    max_position_embeddings: int = 2048
    pooling: str = "mean"
    two_towers: bool = False
    image_size: int = 32
    patch_size: int = 1
    num_channels: int = 1
    pixel_embedding: str = "linear"
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = {*_OF_TRANSFORMERS, *GenerationConfig._get_default_generation_params()}
        for name in kwargs:
            if name not in known and not name.startswith("_"):
                reject(name, "an unknown option", f"one of {_own_names()}", kind=TypeError)
        sizes = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "image_size",
            "patch_size", "num_channels", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            require_positive_int(name, getattr(self, name))
        for name in ("bidirectional", "norm_affine", "two_towers", "learned_positions"):
            require_bool(name, getattr(self, name))
        for name in ("dropout", "rms_norm_eps", "initializer_range"):
            require_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                reject(name, getattr(self, name), "a number >= 0")
        if not 0 <= self.dropout < 1:
            reject("dropout", self.dropout, "a rate in [0, 1)")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                reject(name, repr(getattr(self, name)), f"one of {choices}")
        if self.intermediate_size is None:
            self.intermediate_size = feed_forward_size(self.hidden_size)
        if self.intermediate_size != 0 or isinstance(self.intermediate_size, bool):
            require_positive_int("intermediate_size", self.intermediate_size)
        self.mixer_options = {} if self.mixer_options is None else self.mixer_options
        if not isinstance(self.mixer_options, dict):
            expected = "a dict of options by mixer"
            reject("mixer_options", repr(self.mixer_options), expected, kind=TypeError)
        period = [self.mixer] if isinstance(self.mixer, str) else list(self.mixer)
        for name in {*period, *self.mixer_options}:
            check_options(name, self.mixer_options.get(name, {}))
        if not period or self.num_hidden_layers % len(period) != 0:
            expected = f"a list whose length divides num_hidden_layers = {self.num_hidden_layers}"
            reject("mixer", f"{len(period)} names", expected)
        # What transformers makes its caches and masks from.
        self.sliding_window = self.mixer_options.get("softmax", {}).get("window")
        softmax = "full_attention" if self.sliding_window is None else "sliding_attention"
        self.layer_types = [
            softmax if name == "softmax" else "linear_attention" for name in self.mixers
        ]
        super().__post_init__(**kwargs)

    @property
    def mixers(self) -> list[str]:
        """The name of the mixer of every layer."""
        period = [self.mixer] if isinstance(self.mixer, str) else list(self.mixer)
        return period * (self.num_hidden_layers // len(period))


def _own_names() -> list[str]:
    return sorted(set(LinattnConfig.__annotations__) - {"keys_to_ignore_at_inference"})


# What PreTrainedConfig takes without declaring it.
_OF_TRANSFORMERS = (
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "output_attentions", "per_layer_config", "quantization_config", "torch_dtype",
    "transformers_version",
)  # fmt: skip
CHOICES = {"pooling": ("mean", "cls", "last"), "pixel_embedding": ("linear", "table")}


def feed_forward_size(hidden_size: int) -> int:
    """Return 8 / 3 of hidden_size, rounded up to a multiple of 256, of 16 where it is small."""
    size = 8 * hidden_size / 3
    multiple = 256 if size > 1024 else 16
    return int(-(-size // multiple) * multiple)
