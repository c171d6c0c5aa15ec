"""Text becomes ids and back, whatever the model type, and every stop id of every file counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_config
from tiny_tokenizers import CHAT_TEMPLATE, SPECIAL, load, write_byte_level

from looped_spec.errors import ConfigError, ModelLoadError
from looped_spec.tokenization import load_tokenizer, stop_token_ids

TEXT = "hello world 😀 grüße 你好 . ,  two  spaces ' s"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_text_survives_the_round_trip(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert all(type(token_id) is int for token_id in ids)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_special_tokens_are_left_out_unless_wanted(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("hello<|im_end|>")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.decode([10**6, *tokenizer.encode("hello"), 10**12, -1]) == "hello"


def test_a_model_type_that_transformers_does_not_know_and_its_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    auto_map = {"AutoTokenizer": ["tokenization_new.T", None], "AutoConfig": "tokenization_new.C"}
    (tmp_path / "tokenization_new.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    write_config(tmp_path, model_type="never_heard_of", auto_map=auto_map)
    write_byte_level(tmp_path, auto_map=auto_map)
    assert load(tmp_path).decode(load(tmp_path).encode(TEXT)) == TEXT
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)
    assert not marker.exists()
    assert "tokenization_new" not in sys.modules


def test_a_tokenizer_json_is_loaded_without_what_takes_long_to_import(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    code = (
        "import sys; from pathlib import Path; from looped_spec.tokenization import load_tokenizer;"
        "load_tokenizer(Path(sys.argv[1])); print('transformers' in sys.modules, "
        "{'torch', 'transformers.models.auto'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True set()"


def test_vocabulary_files_without_tokenizer_json(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    write_config(tmp_path, model_type="never_heard_of")
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_ids == (0,)


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": 3}', ""])
def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path, content: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer in .* cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_level(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelLoadError, match="pip install transformers"):
        load_tokenizer(tmp_path)


def test_a_conversation_ends_where_the_answer_starts(tmp_path: Path) -> None:
    write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    tokenizer = load(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], think=True)
    assert tokenizer.decode(ids).endswith("<think>")


def test_a_template_file_of_its_own_is_found(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert load(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])[0] == 1


def test_what_a_template_refuses_is_the_users_to_mend(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    with pytest.raises(ConfigError, match="has no chat template"):
        load(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
    write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    with pytest.raises(ConfigError, match="refuses these messages: no role judge"):
        load(tmp_path).apply_chat_template([{"role": "judge", "content": "x"}])


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 5}, (0, 5, 7)),
        ({"eos_token_id": [7, 2]}, {"eos_token_id": [2, 0]}, (0, 2, 7)),
        ({"eos_token_id": None}, {}, (0,)),
        ({}, {"eos_token_id": [None, 3]}, (0, 3)),
    ],
)
def test_every_file_may_name_stop_ids(
    tmp_path: Path, config: Any, generation_config: Any, expected: tuple[int, ...]
) -> None:
    write_byte_level(tmp_path)
    assert stop_token_ids(config, generation_config, load(tmp_path)) == expected


def test_stop_ids_without_a_tokenizer_or_without_any(tmp_path: Path) -> None:
    assert stop_token_ids({"eos_token_id": 4}, {}, None) == (4,)
    assert stop_token_ids({}, {}, None) == ()
    write_byte_level(tmp_path, eos_token=None)
    assert load(tmp_path).eos_token_ids == ()
    write_byte_level(tmp_path, eos_token=SPECIAL[2])
    assert load(tmp_path).eos_token_ids == (2,)


def test_an_ignored_stop_id_counts_only_where_the_tokenizer_names_it(tmp_path: Path) -> None:
    write_byte_level(tmp_path)  # its end mark is 0
    given = {"eos_token_id": [0, 7, 5]}
    assert stop_token_ids(given, {"eos_token_id": 5}, load(tmp_path), (0, 5)) == (0, 7)


@pytest.mark.parametrize("value", ["2", True, 2.0, -1, [1, "x"]])
def test_a_stop_id_that_is_none_names_its_file(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"eos_token_id of generation_config\.json must be"):
        stop_token_ids({}, {"eos_token_id": value}, None)
