"""A demo's tokenizer, a byte-level BPE of the training text, and rows of ids for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from looped_spec.errors import ConfigError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT = 0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens.

    Every byte is a token, so that any text survives the way there and back. Digits are split one by
    one, and the special tokens take the first ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the text is too small for a vocabulary of {vocab_size} tokens, it gives only "
            f"{tokenizer.get_vocab_size()}"
        )
    return tokenizer


def tokenizer_settings(max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json: nothing is added to a text, padding is end-of-text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """Turn each document into its token ids, ended by `<|endoftext|>`."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([*one.ids, END_OF_TEXT], dtype=np.int64) for one in encoded]


class RowSampler:
    """Rows of tokens drawn from shuffled documents; what a step sees depends on (seed, step) alone.

    A row begins anywhere, but half of those near the beginning of a document begin with it, so that
    the model knows how a text starts without any token before it.
    """

    def __init__(self, documents: Sequence[npt.NDArray[np.int64]], seed: int) -> None:
        order = np.random.default_rng((seed, 0)).permutation(len(documents))
        self.seed = seed
        self.tokens = np.concatenate([documents[i] for i in order])
        lengths = np.array([len(documents[i]) for i in order])
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def rows(self, step: int, num_rows: int, num_tokens: int) -> Tensor:
        """Return [num_rows, num_tokens + 1] int64; targets are the inputs shifted by one."""
        if len(self.tokens) <= num_tokens + 1:
            raise ConfigError(
                f"the training text has {len(self.tokens)} tokens, a row needs {num_tokens + 1}"
            )
        rng = np.random.default_rng((self.seed, 1, step))
        begin = rng.integers(0, len(self.tokens) - num_tokens, num_rows)
        document = self.starts[np.searchsorted(self.starts, begin, side="right") - 1]
        snap = (begin - document < num_tokens) & (rng.random(num_rows) < 0.5)
        begin = np.where(snap, document, begin)
        return torch.from_numpy(self.tokens[begin[:, None] + np.arange(num_tokens + 1)])
