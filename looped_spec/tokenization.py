"""Text to token ids and back, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from looped_spec.detokenization import IncrementalDetokenizer
from looped_spec.errors import ConfigError, ModelLoadError
from looped_spec.model_config import CONFIG_FILE, GENERATION_CONFIG_FILE
from looped_spec.sentencepiece_files import is_llama_sentencepiece, load_llama_sentencepiece

__all__ = [
    "IncrementalDetokenizer",
    "Tokenizer",
    "load_tokenizer",
    "stop_token_ids",
]

_FAST_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


class Tokenizer:
    """A thin wrapper that pins down what the rest needs of a transformers tokenizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in inner.added_tokens_decoder.items() if token.special
        )
        """Ids that `decode` leaves out unless told otherwise."""
        self._num_ids = 1 + max(inner.get_vocab().values(), default=-1)

    def knows(self, token_id: int) -> bool:
        """Tell whether an id is within the vocabulary; a model's own may be padded beyond it."""
        return 0 <= token_id < self._num_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the model expects around it."""
        # Whether a prompt is too long is the engine's business, not a warning of the tokenizer's.
        return [int(token_id) for token_id in self.inner.encode(text, verbose=False)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, without any clean-up of spaces.

        Ids beyond the vocabulary have no text and are left out.
        """
        text = self.inner.decode(
            [token_id for token_id in token_ids if self.knows(token_id)],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer starts.

        `messages` are mappings with `role` and `content`; `template_options` are variables of the
        model's own template, such as `enable_thinking`.
        """
        if not self.inner.chat_template:
            raise ConfigError("this model has no chat template: send a plain prompt instead")
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **template_options,
            )
        except ImportError as error:
            raise ConfigError("chat templates need jinja2: pip install jinja2") from error
        except RecursionError as error:
            raise ConfigError(
                "the chat template cannot be filled in: something in the messages or in "
                "chat_template_kwargs is nested too deeply"
            ) from error
        except Exception as error:  # templates raise what they like about roles and their order
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"the chat template refuses these messages: {reason}") from error
        # The template writes the special tokens itself.
        ids = self.inner.encode(text, add_special_tokens=False, verbose=False)
        return [int(token_id) for token_id in ids]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text according to the tokenizer; empty if it names none."""
        return _token_ids(self.inner.eos_token_id, "the tokenizer's eos_token_id")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder; None if it has no files of one (ids still work).

    Code of the folder is never run, and the model type need not be known to transformers.
    """
    is_fast = (folder / _FAST_FILE).is_file()
    if not is_fast and not any((folder / file).is_file() for file in _OTHER_FILES):
        return None
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ModelLoadError(
            f"the tokenizer in {folder} needs transformers: install the extra of its family "
            "(see 'looped-spec adapters') or 'pip install transformers'"
        ) from error
    try:
        if is_fast:
            inner = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        elif is_llama_sentencepiece(folder):
            inner = load_llama_sentencepiece(folder)
        else:
            from transformers import AutoTokenizer  # takes half a second to import

            inner = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ModelLoadError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(
            f"the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {reason[:200]})"
        ) from error
    if len(inner.get_vocab()) <= len(inner.added_tokens_decoder):
        # transformers makes an empty tokenizer of a known class whose vocabulary file is missing.
        raise ModelLoadError(
            f"the tokenizer in {folder} cannot be loaded (it has no vocabulary): "
            f"is {_FAST_FILE} missing?"
        )
    return Tokenizer(inner)


def stop_token_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    ignored: Collection[int] = (),
) -> tuple[int, ...]:
    """Return every id that ends a text, sorted: the union of what the model's files say.

    The files of published models disagree; a model that stops only on one of them may never stop.
    What the two configurations say of `ignored` ids does not count.
    """
    configured = {
        *_token_ids(config.get("eos_token_id"), f"eos_token_id of {CONFIG_FILE}"),
        *_token_ids(
            generation_config.get("eos_token_id"), f"eos_token_id of {GENERATION_CONFIG_FILE}"
        ),
    }
    own = tokenizer.eos_token_ids if tokenizer is not None else ()
    return tuple(sorted(configured.difference(ignored).union(own)))


def _token_ids(value: Any, what: str) -> tuple[int, ...]:
    """Read an id, a list of ids or None."""
    values = value if isinstance(value, list | tuple) else [value]
    found = [item for item in values if item is not None]
    for item in found:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelLoadError(f"{what} must be a token id or a list of them, found {item!r}")
    return tuple(found)
