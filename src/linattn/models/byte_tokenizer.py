"""The tokenizer of bytes, token i for byte i, in the form of transformers."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 tokens, the bytes of a text in UTF-8.

    It has no special tokens: byte 0, which no text holds, ends and pads.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = (byte for byte in range(256) if byte not in printable)
    # The alphabet of the tokenizers library: bytes that do not print are letters from 256 on.
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    zero = letters[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=zero,
        pad_token=zero,
        clean_up_tokenization_spaces=False,
    )
