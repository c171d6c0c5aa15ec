"""A model is a demo, a local folder or a hub id, and whatever else is told what these are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from looped_spec.errors import ConfigError, LoopedSpecError, ModelLoadError, PluginError
from looped_spec.model_source import resolve_model_source


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
    """Put a function in the place of the download, which returns a folder or raises."""

    def install(error: Exception | None = None) -> list[Any]:
        calls: list[Any] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append((repo_id, options))
            if error is not None:
                raise error
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
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


def test_a_hub_id_fetches_no_code_and_no_pickle(
    tmp_path: Path, hub: Callable[..., list[Any]]
) -> None:
    calls = hub()
    source = resolve_model_source("org/name", "abc123")
    assert (source.folder, source.name, source.revision) == (tmp_path, "org/name", "abc123")
    ((repo_id, options),) = calls
    assert (repo_id, options["revision"]) == ("org/name", "abc123")
    kept = set(
        huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "model-1.safetensors",
                "tokenizer.json",
                "merges.txt",
                "vocab.json",
                "chat_template.jinja",
                "tokenizer.model",
                "modeling_x.py",
                "pytorch_model.bin",
                "original/params.json",
                "README.md",
                "x.pt",
            ],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
    )
    assert len(kept) == 7
    assert not any(name.endswith((".py", ".bin", ".pt", ".md")) or "/" in name for name in kept)


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
    error: Exception, message: str, hub: Callable[..., list[Any]]
) -> None:
    hub(error)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model_source("org/name", "v1")
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
