"""Tokenizers of the Llama class that are kept as a SentencePiece model (tokenizer.model)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from looped_spec.errors import ModelLoadError
from looped_spec.model_config import read_json_object

logger = logging.getLogger(__name__)

_MODEL_FILE = "tokenizer.model"
_SETTINGS_FILE = "tokenizer_config.json"
_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_BLANK = "▁"
_PROBE = "  Hello  world\n\t1,234 = x; \uff12你好\uff0c世界。\ufb01 😀"


def is_llama_sentencepiece(folder: Path) -> bool:
    """Tell whether the folder has a SentencePiece model and names a Llama class for it."""
    if not (folder / _MODEL_FILE).is_file():
        return False
    return _read_settings(folder).get("tokenizer_class") in _CLASSES


def load_llama_sentencepiece(folder: Path) -> Any:
    """Load the transformers tokenizer of such a folder, with the ids that its model file gives.

    transformers converts the model, but does not ask it whether to put a blank before every text
    (and puts none before a text that has one), and since version 5 takes files that say nothing
    of `legacy` for the new way, where they were written for the old. All of it decides which
    tokens the model sees, so it is set here.
    """
    try:
        import google.protobuf  # noqa: F401 - what transformers reads the model file with
        from sentencepiece import SentencePieceProcessor
        from transformers import LlamaTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"the tokenizer in {folder} is a SentencePiece model, which needs sentencepiece and "
            "protobuf: pip install sentencepiece protobuf"
        ) from error
    model = SentencePieceProcessor(model_file=str(folder / _MODEL_FILE))
    if _read_settings(folder).get("legacy") is False:
        inner = LlamaTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        adds_blank = model.encode("a", out_type=str)[0].startswith(_BLANK)
        inner = LlamaTokenizer.from_pretrained(
            folder, local_files_only=True, legacy=True, add_prefix_space=adds_blank
        )
        if adds_blank:
            _put_blank_before_every_text(inner)
    if inner.encode(_PROBE, add_special_tokens=False) != model.encode(_PROBE):
        logger.warning(
            "the tokenizer in %s gives other ids than its %s for some texts: its normalisation "
            "is not carried over, and a tokenizer.json made for this model would be better",
            folder,
            _MODEL_FILE,
        )
    return inner


def _put_blank_before_every_text(inner: Any) -> None:
    """Do so even where the text has one, but not inside the added tokens."""
    from tokenizers import AddedToken, normalizers

    inner.backend_tokenizer.pre_tokenizer = None
    inner.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)]
    )
    literal = [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=False,
            special=token.special,
        )
        for token in inner.added_tokens_decoder.values()
        if token.normalized
    ]
    inner.add_tokens(literal)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS_FILE
    return read_json_object(path) if path.is_file() else {}
