"""Texts of the user: every form, groups that share nothing, and mistakes that name the place."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from looped_spec.errors import ConfigError
from looped_spec.offline.documents import read_documents
from looped_spec.offline.workloads import (
    EVALUATION,
    GROUPS,
    SELECTION,
    group_of,
    named_paths,
    read_workload,
)


class Letters:
    """A tokenizer whose tokens are the characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def read(path: Path, group: str = SELECTION, rows: int = 3, tokens: int = 5) -> list[list[int]]:
    work = read_workload("w", path, Letters(), group=group, num_rows=rows, num_tokens=tokens)  # type: ignore[arg-type]
    return work.rows


def write_prompts(path: Path, count: int = 40) -> Path:
    lines = [json.dumps({"prompt": f"{n:03} is a number"}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_known_form_becomes_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"question": "What?", "answer": "That."}\n\n'
        '{"prompt": "def f():\\n", "canonical_solution": "    return 1", "task_id": "x"}\n'
        '{"prompt": "Alone"}\n{"text": "Also alone"}\n{"text": "Also alone"}\n'
    )
    found = read_documents(tmp_path / "a.jsonl")
    assert [tuple(item) for item in found.items] == [
        ("Question: What?\nAnswer: That.", 1),
        ("def f():\n    return 1", 3),
        ("Alone", 4),
        ("Also alone", 5),
    ]
    assert found.sha256 == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    (tmp_path / "wiki.txt").write_text(" \n = One = \n Text . A <unk> here .\n = Two = \n More .\n")
    assert [tuple(item) for item in read_documents(tmp_path / "wiki.txt").items] == [
        ("= One = \n Text .", 2),
        ("= Two = \n More .", 4),
    ]
    (tmp_path / "plain.txt").write_bytes(b"One\r\ntwo\r\n\r\n  \r\nThree\r\n")
    assert [tuple(item) for item in read_documents(tmp_path / "plain.txt").items] == [
        ("One\ntwo", 1),
        ("Three", 5),
    ]


def test_no_text_is_in_both_groups_whatever_file_it_comes_from(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.jsonl")
    twice = tmp_path / "b.jsonl"
    twice.write_text(first.read_text() * 2 + '{"text": "one more"}\n')
    rows = {
        (path.name, group): {tuple(row) for row in read(path, group, rows=10, tokens=15)}
        for path in (first, twice)
        for group in GROUPS
    }
    for one in ("a.jsonl", "b.jsonl"):
        for other in ("a.jsonl", "b.jsonl"):
            assert not rows[one, SELECTION] & rows[other, EVALUATION]
    assert rows["a.jsonl", SELECTION] == rows["b.jsonl", SELECTION]
    counts = [sum(group_of(f"text {n}") == group for n in range(2000)) for group in GROUPS]
    assert min(counts) > 900


def test_rows_are_of_one_length_and_their_origin_holds_no_text_and_no_folder(
    tmp_path: Path,
) -> None:
    path = write_prompts(tmp_path / "secret.jsonl")
    work = read_workload("w", path, Letters(), group=SELECTION, num_rows=4, num_tokens=6)  # type: ignore[arg-type]
    assert [len(row) for row in work.rows] == [6] * 4
    origin = json.dumps(work.provenance)
    assert str(tmp_path) not in origin and "number" not in origin
    assert work.provenance["items"] == 4 and work.provenance["group"] == SELECTION
    again = read_workload("w", path, Letters(), group=SELECTION, num_rows=3, num_tokens=6)  # type: ignore[arg-type]
    assert again.provenance["sha256_of_token_ids"] != work.provenance["sha256_of_token_ids"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2 is no JSON"),
        ("a.jsonl", b'\n{"answer": "x"}\n', "line 2 must be an object with .*, got answer"),
        ("a.jsonl", b"[1]\n", "line 1 must be an object"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1 must be an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "  "}\n', "line 2 has an empty text"),
        ("a.jsonl", b'{"question": "", "answer": "x"}\n', "line 1 has an empty text"),
        ("a.jsonl", b"\n\n", "holds no text"),
        ("a.txt", b"  \n\n", "holds no text"),
        ("a.txt", b"ab\ncd\n\xff\n", r"not UTF-8 text \(line 3\)"),
        ("a.parquet", b"PAR1", "convert it to JSON lines"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"cannot read .*directory"):
        read(tmp_path)


def test_too_few_texts_for_a_group_says_how_many_there_are(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "few.jsonl", 4)
    with pytest.raises(ConfigError, match=r"the selection group of .* 3 are needed \(its 4 diff"):
        read(path)
    with pytest.raises(ConfigError, match="0 of at least 500 tokens"):
        read(path, tokens=500)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["gsm8k"], "must be NAME=PATH, got 'gsm8k'"),
        (["=x"], "must be NAME=PATH"),
        (["a="], "must be NAME=PATH"),
        (["a=x", "a=y"], "a is given twice"),
        ([], "no text to measure on"),
    ],
)
def test_workloads_that_are_not_named_well_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_paths(texts)
    with pytest.raises(ConfigError, match="did you mean 'selection'"):
        read(Path("any"), "selektion")
