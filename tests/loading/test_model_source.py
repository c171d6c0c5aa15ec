"""A model is a demo, a local folder or a hub id, and whatever else is told what these are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import FakeHub
from huggingface_hub import constants, errors

from looped_spec.errors import ConfigError, LoopedSpecError, ModelLoadError, PluginError
from looped_spec.model_source import ModelSource, resolve_model_source


class FakePlugins:
    """A plugin manager with one demo."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def demo_names(self) -> list[str]:
        return ["toy"]

    def demo_path(self, name: str) -> Path:
        if name != "toy":
            raise PluginError(f"unknown demo '{name}'")
        return self.folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Put a function in the place of all requests, which returns a folder or raises."""

    def install(error: Exception | None = None) -> list[Any]:
        calls: list[Any] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append((repo_id, options))
            if error is not None:
                raise error
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", snapshot_download)
        return calls

    return install


def http_error(kind: type[Exception]) -> Exception:
    """Make an error of the hub's client, whose constructor would want a response of its library."""
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


def test_a_local_folder_absolute_relative_or_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "Tiny-1B"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(folder), "org/Tiny-1B", "./org/Tiny-1B/", "~/org/Tiny-1B"):
        source = resolve_model_source(text)
        assert source.folder.resolve() == folder.resolve()
        assert (source.name, source.revision) == ("Tiny-1B", None)
    assert resolve_model_source(folder).folder == folder
    monkeypatch.chdir(folder)
    assert resolve_model_source(".").name == "Tiny-1B"


def test_a_demo_comes_from_its_plugin(tmp_path: Path) -> None:
    plugins: Any = FakePlugins(tmp_path)
    source = resolve_model_source("demo:toy", plugins=plugins)
    assert (source.folder, source.name) == (tmp_path, "demo:toy")
    with pytest.raises(PluginError, match="unknown demo 'tyo'"):
        resolve_model_source("demo:tyo", plugins=plugins)
    with pytest.raises(ConfigError, match="names no demo; there is: demo:toy"):
        resolve_model_source("demo:", plugins=plugins)


def test_a_revision_goes_with_a_hub_id_only(tmp_path: Path) -> None:
    plugins: Any = FakePlugins(tmp_path)
    for model in (str(tmp_path), "demo:toy"):
        with pytest.raises(ConfigError, match=f"'v1' was given for .*'{model}'"):
            resolve_model_source(model, "v1", plugins)


@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name(model: str) -> None:
    with pytest.raises(ConfigError, match="model must not be empty: give a local folder"):
        resolve_model_source(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors' is a file, not a folder"):
        resolve_model_source(str(path))


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "../no/where", "~/no-such-folder"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(
    model: str, hub: Callable[..., list[Any]]
) -> None:
    calls = hub()
    with pytest.raises(ModelLoadError, match=f"'{model}' does not exist"):
        resolve_model_source(model)
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model_source(Path("org/name"))
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model_source("~no-such-user-here/x")
    assert not calls


@pytest.mark.parametrize("model", ["name", "a/b/c", "org/", "or g/name", "https://x.y/z", "o/-n"])
def test_a_name_of_no_form_is_told_the_three_forms(model: str) -> None:
    with pytest.raises(ModelLoadError, match="a local folder, a hub id 'org/name', or 'demo:<name"):
        resolve_model_source(model)


def test_a_hub_id_fetches_no_code_and_no_pickle_and_weights_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        *("config.json", "tokenizer.json", "merges.txt", "vocab.json", "vocab.txt"),
        *("chat_template.jinja", "tokenizer.model", "model.safetensors.index.json"),
    }
    weights = {"model-1.safetensors", "model-2.safetensors"}
    never = ("modeling_x.py", "pytorch_model.bin", "original/params.json", "README.md", "x.pt")
    hub = FakeHub(tmp_path).install(monkeypatch)
    hub.add({**dict.fromkeys(small | weights, b""), **dict.fromkeys(never, b"")})
    source = resolve_model_source("org/name", "v1")
    assert (source.name, source.revision) == ("org/name", "v1")
    assert hub.asked == [("org/name", "v1")]
    assert hub.fetched() == {path.name for path in source.folder.iterdir()} == small
    source.fetch_weights()
    assert hub.fetched() == {path.name for path in source.folder.iterdir()} == small | weights


def test_weights_come_from_the_commit_of_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    hub.add({"config.json": b"{}", "model.safetensors": b""})
    source = resolve_model_source("org/name", "v1")
    source.fetch_weights()
    assert {revision for _, revision in hub.asked[1:]} == {source.folder.name} == {hub.commit}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], r"holds pickle weights only \(pytorch_model\.bin\): .* refused"),
        (["pytorch_model-1-of-2.bin", "b.pt"], r"only \(b\.pt, pytorch_model-1-of-2\.bin\)"),
        (["original/a.safetensors", "c.ckpt"], r"only \(c\.ckpt\)"),
        (["original/a.safetensors", "original/b.pt"], "holds no weights: expected model"),
        (["README.md", "model.gguf"], "holds no weights: expected model.safetensors or model"),
        ([], "holds no weights"),
    ],
)
def test_a_hub_model_without_safetensors_is_refused_before_any_weight_is_fetched(
    files: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    hub.add({"config.json": b"{}", **dict.fromkeys(files, b"")})
    source = resolve_model_source("org/name", "v1")
    with pytest.raises(ModelLoadError, match=message) as caught:
        source.fetch_weights()
    assert str(caught.value).startswith("hub model org/name at revision 'v1' holds ")
    assert "\n" not in str(caught.value)
    assert hub.fetched() == {"config.json"}


def test_weights_in_the_cache_need_no_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path).install(monkeypatch)
    hub.add({"config.json": b"{}", "model.safetensors": b""})
    resolve_model_source("org/name").fetch_weights()
    hub.asked.clear()
    resolve_model_source("org/name").fetch_weights()
    assert hub.asked == [("org/name", None), ("org/name", hub.commit)]


def test_weights_of_a_folder_or_a_demo_are_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path / "hub").install(monkeypatch)
    plugins: Any = FakePlugins(tmp_path)
    for model in (str(tmp_path), "demo:toy"):
        resolve_model_source(model, plugins=plugins).fetch_weights()
    assert hub.asked == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "is gated: accept its terms"),
        (http_error(errors.RepositoryNotFoundError), "does not exist, or is private"),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v1'"),
        (http_error(errors.HfHubHTTPError), r"could not be fetched .*\(first line\)"),
        (errors.LocalEntryNotFoundError("no snapshot"), "or give a local folder"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (errors.HFValidationError("bad"), "not a valid hub id"),
        (ConnectionError("no route to host"), r"could not be fetched .*no route to host"),
        (OSError(28, "No space left on device"), "No space left"),
        (ValueError(""), "ValueError"),
    ],
)
def test_every_failure_of_the_hub_is_one_line(
    error: Exception, message: str, hub: Callable[..., list[Any]], tmp_path: Path
) -> None:
    hub(error)
    weightless = ModelSource(tmp_path, "org/name", "v1", from_hub=True)
    for fetch in (lambda: resolve_model_source("org/name", "v1"), weightless.fetch_weights):
        with pytest.raises(ModelLoadError, match=message) as caught:
            fetch()
        assert "org/name" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_real_client_offline_with_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"org/name could not be fetched .* local folder"):
        resolve_model_source("org/name")


def test_without_the_hub_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoopedSpecError, match="pip install huggingface_hub"):
        resolve_model_source("org/name")


def test_the_real_client_offline_with_a_model_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--name"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (folder / "config.json").write_text("{}")
    source = resolve_model_source("org/name")
    assert source.folder.resolve() == folder.resolve()
    with pytest.raises(ModelLoadError, match=r"org/name could not be fetched"):
        source.fetch_weights()
    (folder / "model.safetensors").write_text("")
    source.fetch_weights()


@pytest.mark.parametrize("model", ["a" * 5000, Path("a" * 5000)])
def test_a_name_that_the_file_system_refuses_is_one_line(model: str | Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: File name too long"):
        resolve_model_source(model)
