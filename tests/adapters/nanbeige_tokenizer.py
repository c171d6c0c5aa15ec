"""A tiny tokenizer in the form that Nanbeige is published in: SentencePiece with added tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

TEXTS = [
    "hello world, hello tokens and more words here",
    "你好世界你好 我们 今天 天气 很好",
    "def f(x):\n    return x + 1",
    "the quick brown fox jumps over the lazy dog",
    "grüße über alles",
]
ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
SPECIAL = ADDED[:2]

CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}"
    "{{ '<|im_start|>system\\n你好<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' and not loop.first -%}"
    "{{ raise_exception('the system message must come first') }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '\\n</think>\\n\\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)


def write_tokenizer(
    folder: Path, *, dummy_prefix: bool = True, normalisation: str = "identity", **settings: Any
) -> SentencePieceProcessor:
    """Train a model of some hundred pieces, write it with its added tokens, and return it.

    `dummy_prefix` says whether the model puts a blank before every text, and `normalisation` is
    the rule of SentencePiece; `settings` go into tokenizer_config.json.
    """
    path = folder / "tokenizer.model"
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 30),
            model_writer=file,
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name=normalisation,
            remove_extra_whitespaces=False,
            add_dummy_prefix=dummy_prefix,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    model = SentencePieceProcessor(model_file=str(path))
    ids = {token: len(model) + number for number, token in enumerate(ADDED)}
    (folder / "added_tokens.json").write_text(json.dumps(ids))
    decoder = {
        str(token_id): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token, token_id in ids.items()
    }
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": decoder,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model
