"""Where a model comes from: a bundled demo, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped_spec.checkpoint import no_safetensors
from looped_spec.errors import ConfigError, LoopedSpecError, ModelLoadError
from looped_spec.model_config import file_mode
from looped_spec.plugins import PluginManager

_DEMO_PREFIX = "demo:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FORMS = "give a local folder, a hub id 'org/name', or 'demo:<name>'"

# Weights as safetensors only, and no Python file: code of a repository is never run.
SMALL_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
WEIGHT_FILES = ("*.safetensors",)
IGNORED_FILES = ("*/*",)


@dataclass(frozen=True)
class ModelSource:
    """A model folder on this machine, the name to show for it, and the revision asked for.

    The folder of a hub model may lack its weights until `fetch_weights` was called.
    """

    folder: Path
    name: str
    revision: str | None = None
    from_hub: bool = False

    def fetch_weights(self) -> None:
        """Download the weights of a hub model into `folder`; other models have theirs already.

        Raises `ModelLoadError` before any download if there are none in safetensors, and for what
        cannot be fetched.
        """
        if not self.from_hub:
            return
        # The snapshot's folder is called after its commit: a branch that moved since the other
        # files were fetched would bring weights of another model.
        commit = self.folder.name
        with _hub(self.name, self.revision) as hub:
            if not any(self.folder.glob(WEIGHT_FILES[0])):
                files = hub.list_repo_files(self.name, revision=commit)
                top = [file for file in files if "/" not in file]
                if not any(file.endswith(".safetensors") for file in top):
                    raise no_safetensors(f"hub model {_at(self.name, self.revision)}", top)
            _download(hub, self.name, commit, WEIGHT_FILES)


def resolve_model_source(
    model: str | Path, revision: str | None = None, plugins: PluginManager | None = None
) -> ModelSource:
    """Find the folder of `model`: `demo:<name>`, a local folder, or a hub id.

    A local folder wins over a hub id of the same spelling. Of a hub model all files but the weights
    are downloaded; those wait for `ModelSource.fetch_weights`. `revision` (branch, tag or commit)
    goes with a hub id only. `plugins` know the demos, by default those of the environment. Raises
    `ConfigError` for arguments that make no sense and `ModelLoadError` for a model that is not
    there or cannot be fetched.
    """
    text = os.fspath(model)
    if not text.strip():
        raise ConfigError(f"model must not be empty: {_FORMS}")
    if isinstance(model, str) and text.startswith(_DEMO_PREFIX):
        _refuse_revision(revision, f"the bundled model '{text}'")
        return ModelSource(_demo_folder(text.removeprefix(_DEMO_PREFIX), plugins), text)
    folder = _expand(text)
    mode = file_mode(folder)
    if mode is not None and stat.S_ISDIR(mode):
        _refuse_revision(revision, f"the local folder '{text}'")
        return ModelSource(folder, folder.resolve().name)
    if mode is not None:
        raise ModelLoadError(
            f"model '{text}' is a file, not a folder: give the folder that holds config.json"
        )
    if isinstance(model, Path) or text.startswith(("/", ".", "~")):
        raise ModelLoadError(f"model folder '{text}' does not exist")
    if not _HUB_ID.fullmatch(text):
        raise ModelLoadError(f"model '{text}' is not a folder here: {_FORMS}")
    with _hub(text, revision) as hub:
        folder = _download(hub, text, revision, SMALL_FILES)
    return ModelSource(folder, text, revision, from_hub=True)


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"revision '{revision}' was given for {what}: only hub ids have revisions"
        )


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # '~name' of no known user
        raise ModelLoadError(f"model folder '{text}' does not exist: {error}") from error


def _demo_folder(name: str, plugins: PluginManager | None) -> Path:
    manager = PluginManager() if plugins is None else plugins
    if not name:
        demos = ", ".join(f"demo:{demo}" for demo in manager.demo_names()) or "none is installed"
        raise ConfigError(f"model 'demo:' names no demo; there is: {demos}")
    return manager.demo_path(name)


def _at(repo_id: str, revision: str | None) -> str:
    return repo_id if revision is None else f"{repo_id} at revision '{revision}'"


def _download(hub: Any, repo_id: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Download the files that match, or find them in the hub's cache; return their folder."""
    folder = hub.snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=list(IGNORED_FILES),
    )
    return Path(folder)


@contextmanager
def _hub(repo_id: str, revision: str | None) -> Iterator[Any]:
    """Give the hub's client; what it raises becomes a `ModelLoadError` of one line."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelLoadError(
            f"model '{repo_id}' is no folder here, and fetching it from the hub needs "
            "huggingface_hub: install the extra of its family (see 'looped-spec adapters') or "
            "'pip install huggingface_hub'"
        ) from error
    at = _at(repo_id, revision)
    try:
        yield huggingface_hub
    except LoopedSpecError:
        raise
    except errors.GatedRepoError as error:  # before its base class, RepositoryNotFoundError
        reason = "is gated: accept its terms on its hub page and log in with 'hf auth login'"
        raise ModelLoadError(f"hub model {at} {reason}") from error
    except errors.RepositoryNotFoundError as error:
        reason = f"does not exist, or is private and you are not logged in; otherwise {_FORMS}"
        raise ModelLoadError(f"hub model {at} {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(
            f"hub model {repo_id} has no revision '{revision or 'main'}'"
        ) from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"'{repo_id}' is not a valid hub id: {_FORMS}") from error
    except Exception as error:
        # The network, the cache or the disk; the hub's HTTP library has errors of its own.
        raise ModelLoadError(_unreachable(at, error)) from error


def _unreachable(at: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"hub model {at} could not be fetched and is not complete in the local cache "
        f"({first_line}): check the network and HF_HUB_OFFLINE, or give a local folder"
    )
