"""The tokenizer of bytes, token i for byte i, in the form of transformers; and others by name."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from linattn._validation import reject


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


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer "bytes", or the one that transformers knows by this name or folder.

    Raises:
        ValueError: there is none.
    """
    if name == "bytes":
        return byte_tokenizer()
    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        reject("tokenizer", f"{name!r} ({first})", "'bytes', or a tokenizer of transformers")
    return made


def encoder(name: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]] | None:
    """Return text to tokens, without special ones; None for bytes, which need no tokenizer."""
    if name == "bytes":
        return None

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    return encode


def decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Return the text of tokens."""
    text = tokenizer.decode(tokens)
    assert isinstance(text, str)
    return text
