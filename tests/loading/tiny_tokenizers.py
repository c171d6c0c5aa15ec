"""Tiny tokenizers, trained on the spot and saved as a model folder would have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from looped_spec.tokenization import Tokenizer as Wrapper
from looped_spec.tokenization import load_tokenizer

SAMPLES = [
    "hello world, hello tokens",
    "grüße über alles",
    "你好世界你好",
    "😀😃😀😃 👩‍👩‍👧",
    "x = [1, 2]\n    ",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant', 'system') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if think %}<think>{% endif %}"
)


def write_byte_level(folder: Path, vocab_size: int = 420, **config: Any) -> None:
    """Write a byte-level BPE tokenizer, as GPT-2 and most models have, and its configuration."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "tokenizer_class": "GPT2Tokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_byte_fallback(folder: Path) -> None:
    """Write a tokenizer that spells rare characters as single byte tokens, as Llama's does."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", *"abcdefgh"]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def load(folder: Path) -> Wrapper:
    """Load a tokenizer that must be there."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer
