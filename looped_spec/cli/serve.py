"""Serve a model to OpenAI's clients over HTTP, with metrics and a live page.

examples:
  looped-spec serve demo:NAME
  looped-spec serve MODEL --port 9000 --served-model-name mine --max-num-seqs 64
  LOOPED_SPEC_API_KEY=... looped-spec serve MODEL --host 0.0.0.0
  looped-spec serve MODEL --ray --replicas 2
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32}'

The live page is at http://127.0.0.1:8000/ once the model is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped_spec.cli import console
from looped_spec.cli.engine_flags import add_engine_flags, engine_options
from looped_spec.cli.flags import add_flag
from looped_spec.cli.main import EXIT_INTERRUPTED
from looped_spec.cli.model_loading import memory_errors
from looped_spec.errors import ConfigError
from looped_spec.serve.imports import lasting_imports
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.ray_options import RayOptions
from looped_spec.settings import Settings

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM

_FILES = 65536


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `looped-spec serve`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = f"{parser.prog} MODEL [flags]"
    parser.add_argument("model", metavar="MODEL", help="demo:NAME, a local folder, or a hub id")
    server = parser.add_argument_group("server")
    texts = ServeOptions.help_texts()
    for field in dataclasses.fields(ServeOptions):
        add_flag(server, field, texts[field.name])
    server.add_argument(
        "-v", "--verbose", action="store_true", help="log what is loaded and chosen on stderr"
    )
    replicas = parser.add_argument_group(
        "replicas", "Several engines behind one address, on Ray Serve."
    )
    replicas.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="deploy replicas on a Ray cluster: host:port, auto (one that runs), or local (one of "
        "this machine, which is what no ADDRESS means)",
    )
    for field in dataclasses.fields(RayOptions):
        add_flag(replicas, field, field.metadata["help"])
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; then running requests get a while to end."""
    options = _serve_options(args)
    engine = {"enable_prefix_caching": True, **engine_options(args)}
    ray_options = RayOptions(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(RayOptions)}
    )
    if args.ray is not None:
        return _run_on_ray(args, options, engine, ray_options)
    ray_options.check_unused()
    try:
        return _run_alone(args, options, engine)
    finally:
        gc.unfreeze()  # what serving kept from the collector


def _run_alone(args: argparse.Namespace, options: ServeOptions, engine: dict[str, Any]) -> int:
    """Serve one engine in this process until a signal."""
    try:
        with lasting_imports():
            from looped_spec.serve.server import serve
    except ImportError as error:
        if error.name and error.name.split(".")[0] in ("fastapi", "starlette", "uvicorn"):
            raise _no_extra() from error
        if error.name == "prometheus_client":
            raise _no_extra() from error
        raise
    _raise_file_limit()

    def load() -> LLM:
        with console.stdout_for_ours_alone():
            with lasting_imports():
                from looped_spec.runtime.llm import LLM
            return LLM(args.model, **engine)

    with console.log_level(args.verbose), memory_errors():
        server = serve(load, options, _default_name(args.model), console.note)
    console.note("stopped")
    code = EXIT_INTERRUPTED if server.signal == signal.SIGINT else 0
    if not server.has_ended:
        # A thread that loads or computes cannot be told to stop, and the interpreter cannot end
        # beneath it. Nothing is half done that would outlive the process.
        console.flush()
        os._exit(code)
    return code


def _run_on_ray(
    args: argparse.Namespace,
    options: ServeOptions,
    engine: dict[str, Any],
    ray_options: RayOptions,
) -> int:
    """Deploy replicas and stay until a signal."""
    from looped_spec.serve.ray_deployment import RayServer

    folder = Path(args.model).expanduser()
    model = str(folder.resolve()) if folder.is_dir() else args.model
    server = RayServer(args.ray, options, ray_options, console.note)
    server.run(model, engine, _default_name(args.model))
    console.note("stopped")
    return EXIT_INTERRUPTED if server.signal == signal.SIGINT else 0


def _serve_options(args: argparse.Namespace) -> ServeOptions:
    """Return the checked options; a key on the command line goes before that of the variable."""
    given: dict[str, Any] = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(ServeOptions)
        if getattr(args, field.name) != field.default
    }
    settings = Settings.from_environment()
    if settings.api_key is not None:
        given.setdefault("api_key", settings.api_key)
    return ServeOptions.from_kwargs(given)


def _default_name(model: str) -> str:
    """Return what to call the model: the name of its folder, never where it is."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _no_extra() -> ConfigError:
    return ConfigError("serving needs more packages: pip install 'looped-spec[serve]'")


def _raise_file_limit() -> None:
    """Let as many connections be open as this user may have files."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
