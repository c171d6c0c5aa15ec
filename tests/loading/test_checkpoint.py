"""Every way in which weights can be wrong is told in one line that names the thing."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import (
    NORM,
    K,
    Q,
    meta_adapter,
    random_tensors,
    write_config,
    write_index,
    write_sharded,
    write_single,
)

from looped_spec.checkpoint import some_names
from looped_spec.errors import LoopedSpecError, ModelLoadError
from looped_spec.weights import load_weights


def failure(folder: Path) -> str:
    """Load, and return the one line that says why it cannot be done."""
    with pytest.raises(ModelLoadError) as caught:
        load_weights(meta_adapter(), folder, torch.device("cpu"), torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[NORM]
    write_single(tmp_path, tensors)
    assert f"1 missing: {NORM}" in failure(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), "model.extra": torch.ones(2)})
    assert "1 unexpected: model.extra" in failure(tmp_path)


def test_names_of_any_text_leave_the_error_one_short_line(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), "a\nb": torch.ones(1), "c" * 10_000: torch.ones(1)})
    text = failure(tmp_path)
    assert r"2 unexpected: 'a\nb', ccc" in text
    assert len(text) < 600 + len(str(tmp_path))


def test_a_wrong_shape_is_told_with_both_shapes(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), K: torch.ones(8, 15)})
    text = failure(tmp_path)
    assert f"1 of another shape: {K} (expected [8, 16], found [8, 15])" in text


def test_a_tensor_of_another_rank_is_misshapen(tmp_path: Path) -> None:
    write_single(tmp_path, {**random_tensors(), NORM: torch.ones(16, 1)})
    assert f"{NORM} (expected [16], found [16, 1])" in failure(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "spelled"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_quantised_and_integer_weights_are_refused(
    tmp_path: Path, dtype: torch.dtype, spelled: str
) -> None:
    write_single(tmp_path, {**random_tensors(), Q: torch.zeros(16, 16).to(dtype)})
    assert f"1 not plain floating point: {Q} ({spelled})" in failure(tmp_path)


def test_all_kinds_of_misfit_are_told_at_once_and_at_most_five_names_each(tmp_path: Path) -> None:
    tensors = {name: t for name, t in random_tensors().items() if "layers.0" not in name}
    write_single(tmp_path, {**tensors, "extra": torch.ones(1), NORM: torch.ones(3)})
    text = failure(tmp_path)
    assert "11 missing: " in text
    assert "and 6 more; 1 unexpected: extra; 1 of another shape: " in text
    assert text.count("model.layers.0") == 5


def test_some_names_counts_what_it_leaves_out() -> None:
    assert some_names(list("abcde")) == "a, b, c, d, e"
    assert some_names(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert "holds no weights: expected model.safetensors" in failure(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-2.bin", "a.pt", "b.pth", "c.ckpt"])
def test_pickle_is_refused_without_opening_it(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / name).write_bytes(f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode())
    text = failure(tmp_path)
    assert name in text
    assert "convert the weights to safetensors" in text
    assert not marker.exists()


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors(), "a.safetensors")
    write_single(tmp_path, random_tensors(), "b.safetensors")
    assert "2 safetensors files (a.safetensors, b.safetensors) but no" in failure(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path, random_tensors())[Q]
    (tmp_path / shard).unlink()
    assert f"lacks 1 shard(s) of model.safetensors.index.json: {shard}" in failure(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = random_tensors()
    weight_map = write_sharded(tmp_path, tensors)
    first, second = sorted(set(weight_map.values()))[:2]
    name = next(name for name, file in weight_map.items() if file == first)
    part = {n: t for n, t in tensors.items() if weight_map[n] == second or n == name}
    save_file(part, tmp_path / second)
    assert f"'{name}' is in two shards: {first} and {second}" in failure(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, random_tensors())
    first, second = sorted(set(weight_map.values()))[:2]
    name = next(name for name, file in weight_map.items() if file == first)
    write_index(tmp_path, {**weight_map, name: second})
    assert f"'{name}' is in {first}, but" in failure(tmp_path)


def test_a_shard_with_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, random_tensors())
    file = weight_map.pop(Q)
    write_index(tmp_path, weight_map)
    assert f"'{Q}' is in {file}, but" in failure(tmp_path)


def test_a_tensor_of_the_index_that_is_in_no_shard(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, random_tensors())
    write_index(tmp_path, {**weight_map, "ghost": weight_map[Q]})
    assert "are not in their shards: ghost" in failure(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../w.safetensors",
        "/w.safetensors",
        "a/../../w.safetensors",
        "..\\w.safetensors",
        "C:/w.safetensors",
        "",
        3,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: object) -> None:
    write_index(tmp_path, {Q: file})
    text = failure(tmp_path)
    assert Q in text
    assert "which is no file of the folder" in text


def test_an_index_names_safetensors_files_only(tmp_path: Path) -> None:
    write_index(tmp_path, {Q: "w.bin"})
    assert "'w.bin', which is no safetensors file" in failure(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_needs_a_weight_map(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    assert "must have a weight_map" in failure(tmp_path)


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    assert "model.safetensors.index.json is not valid JSON" in failure(tmp_path)


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    for file in set(write_sharded(blobs, random_tensors()).values()):
        (folder / file).symlink_to(blobs / file)
    index = "model.safetensors.index.json"
    (folder / index).symlink_to(blobs / index)
    load_weights(meta_adapter(), folder, torch.device("cpu"), torch.float32)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456789\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert "is a Git LFS pointer, not the weights" in failure(tmp_path)


def header_length(path: Path) -> int:
    return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])


def test_a_file_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    whole, header = path.read_bytes(), header_length(path)
    rng = random.Random(0)
    lengths = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1}
    for length in sorted(lengths | {rng.randrange(len(whole)) for _ in range(100)}):
        path.write_bytes(whole[:length])
        text = failure(tmp_path)
        assert "model.safetensors is damaged" in text, (length, text)


def test_trailing_bytes_are_damage(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    path.write_bytes(path.read_bytes() + b"\0" * 16)
    assert "model.safetensors is damaged" in failure(tmp_path)


def test_flipped_header_bytes_raise_nothing_but_load_errors(tmp_path: Path) -> None:
    path = write_single(tmp_path, random_tensors())
    whole, header = path.read_bytes(), header_length(path)
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_weights(meta_adapter(), tmp_path, torch.device("cpu"), torch.float32)
        except ModelLoadError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99999]}}',
        b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
        b"\xff\xfe",
        json.dumps({"a" * 300: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(),
    ],
)
def test_malicious_headers_raise_nothing_but_load_errors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    failure(tmp_path)
    path.write_bytes(struct.pack("<Q", 2**63 + 5) + header)
    failure(tmp_path)


def test_load_errors_are_user_errors() -> None:
    assert issubclass(ModelLoadError, LoopedSpecError)


def test_a_shard_of_a_name_too_long_is_one_line(tmp_path: Path) -> None:
    write_index(tmp_path, {NORM: "a" * 300 + ".safetensors"})
    assert "cannot be read: File name too long" in failure(tmp_path)
