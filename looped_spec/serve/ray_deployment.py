"""Several servers behind one address: replicas on Ray Serve, whose proxies are the shared front."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from looped_spec.errors import ConfigError
from looped_spec.options import EngineOptions
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.ray_options import RayOptions

LOCAL = "local"
APP = "looped-spec"
_WATCH_SECONDS = 1.0
_GRACE_SECONDS = 3.0
_SPARE = 64
"""Requests beyond the places of a queue, so that a replica itself can say that it is full."""

_ON_THE_WAY = 1024
"""Requests that a proxy has taken and no replica yet. The proxy counts all that come within a
moment, and refuses what is more with a status 503 of its own."""

_ASK_SECONDS = 10.0


class _Stopped(BaseException):
    """A signal came."""


class RayServer:
    """Deploys replicas and stays until a signal; then drains them and takes them down."""

    def __init__(
        self,
        address: str,
        options: ServeOptions,
        ray_options: RayOptions,
        notify: Callable[[str], None],
    ) -> None:
        """Connect to the cluster at `address`, or start one of this machine for `local`.

        Raises:
            ConfigError: Ray is missing, there is no cluster, or what it has does not fit.
        """
        self._ray, self._serve = _import_ray()
        self._options, self._ray_options = options, ray_options
        self._is_local = address == LOCAL
        self._notify = notify
        self.signal: int | None = None
        if options.port == 0:
            raise ConfigError("--port 0 does not go with --ray: its proxies need one to share")
        if self._is_local:
            from looped_spec.serve.server import listen

            listen(options).close()  # Ray would try for ever
        for name in ("ray", "ray.serve"):  # which print every step
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._ray.init(
                address=address,  # "local" is Ray's own word too; none may mean a stale cluster
                include_dashboard=False if self._is_local else None,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # Ray raises whatever its transport does
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"--ray {address}: no cluster there, or none that lets us in ({reason})"
            ) from error

    def run(self, model: str, engine: Mapping[str, Any], default_name: str) -> None:
        """Serve `model` with `engine`, keyword arguments of `LLM`, until a signal."""
        was_there = bool(self._serve.status().proxies)
        try:
            with self._signals():
                where = self._start_proxies(was_there)
                self._deploy(model, engine, default_name)
                name = (self._options.served_model_name or (default_name,))[0]
                self._notify(f"serving {name} at {where}")
                self._watch()
        except _Stopped:
            pass
        finally:
            self._take_down(was_there)

    def _start_proxies(self, was_there: bool) -> str:
        """Start Ray Serve unless it runs; return the address to tell."""
        host, port = self._options.host, self._options.port
        if was_there:
            self._notify("Ray Serve runs there: its own address counts, not --host and --port")
            return "the address of Ray Serve"
        self._serve.start(http_options={"host": host, "port": port, "location": "EveryNode"})
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _deploy(self, model: str, engine: Mapping[str, Any], default_name: str) -> None:
        from looped_spec.serve.replica import Replica

        max_num_seqs = EngineOptions.from_kwargs(engine).max_num_seqs
        places = max_num_seqs + self._options.max_queued_requests
        deployment = self._serve.deployment(
            name="replica",
            ray_actor_options=self._actor_options(),
            max_ongoing_requests=places + _SPARE,
            max_queued_requests=places + _ON_THE_WAY,
            max_constructor_retry_count=1,
            graceful_shutdown_wait_loop_s=0.2,
            graceful_shutdown_timeout_s=self._options.drain_seconds + _GRACE_SECONDS,
            **self._ray_options.scale(max_num_seqs),
        )(self._serve.ingress()(Replica))
        bound = deployment.bind(model, dict(engine), self._options, default_name)
        try:
            self._handle = self._serve.run(bound, name=APP, route_prefix="/")
        except Exception as error:  # Ray Serve has no narrower one
            raise ConfigError(_reason(f"{error}\n{self._deployment_message()}")) from error

    def _deployment_message(self) -> str:
        """Return what Ray Serve says of the replicas, the traces of those that failed among it."""
        application = self._serve.status().applications.get(APP)
        deployments = application.deployments.values() if application is not None else ()
        return "\n".join(deployment.message for deployment in deployments)

    def _actor_options(self) -> dict[str, Any]:
        """Return what each replica needs; raise `ConfigError` if this machine has not as much."""
        found = self._ray.cluster_resources()
        given = self._ray_options
        gpus = given.gpus_per_replica
        if gpus is None:
            gpus = 1.0 if found.get("GPU", 0) else 0.0
        cpus = 1.0 if given.cpus_per_replica is None else given.cpus_per_replica
        count = given.replicas or given.min_replicas or 1
        for name, each in (("GPU", gpus), ("CPU", cpus)):
            if each * count > found.get(name, 0):
                text = (
                    f"{count} x {each:g} {name}s are asked for, the cluster has "
                    f"{found.get(name, 0):g}: see --{name.lower()}s-per-replica"
                )
                if self._is_local:
                    raise ConfigError(text)
                self._notify(f"{text}; waiting until it grows")
        return {"num_gpus": gpus, "num_cpus": cpus}

    def _watch(self) -> None:
        """Tell of replicas that come and go, until a signal."""
        told = ""
        while True:
            application = self._serve.status().applications.get(APP)
            if application is None:
                self._notify("somebody else took the replicas down")
                return
            states = application.deployments["replica"].replica_states
            text = ", ".join(f"{count} {str(s).lower()}" for s, count in sorted(states.items()))
            if text != told:
                self._notify(f"replicas: {text or 'none'}")
                told = text
            time.sleep(_WATCH_SECONDS)

    def _take_down(self, was_there: bool) -> None:
        """Let what runs end, then remove the replicas; what else runs on the cluster goes on."""
        with contextlib.suppress(_Stopped), self._signals():
            self._drain()
        with contextlib.suppress(_Stopped), self._signals():
            if APP in self._serve.status().applications:
                self._serve.delete(APP)
        if not was_there and not self._serve.status().applications:
            self._serve.shutdown()
        self._ray.shutdown()

    def _drain(self) -> None:
        """Admit nothing more and wait until no answer is open.

        A replica that cannot tell, since it is too busy or about to be replaced, may have open
        answers: it is asked again.
        """
        handle = getattr(self, "_handle", None)
        end = time.monotonic() + self._options.drain_seconds + _GRACE_SECONDS
        told = False
        while handle is not None and time.monotonic() < end:
            seconds = min(_ASK_SECONDS, max(end - time.monotonic(), 0.1))
            counts: list[Any] = [None]
            with contextlib.suppress(TimeoutError):
                counts = handle.broadcast("drain").results(
                    timeout_s=seconds, return_exceptions=True
                )
            known = [count for count in counts if isinstance(count, int)]
            if not sum(known) and len(known) == len(counts):
                return
            if not told:
                some = f"{sum(known)}" if len(known) == len(counts) else f"{sum(known)} or more"
                seconds = self._options.drain_seconds
                self._notify(f"open answers: {some}; they get up to {seconds:g} s to end")
                told = True
            time.sleep(0.1)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Raise `_Stopped` in the main thread at SIGINT and SIGTERM."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.signal = self.signal or number
            raise _Stopped

        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _import_ray() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError("--ray needs Ray Serve: pip install 'looped-spec[ray,serve]'") from error
    return ray, serve


def _reason(report: str) -> str:
    """Return the line of Ray's report that says why a replica did not start."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    named = [line.partition("Error: ")[2] for line in lines if "Error: " in line]
    return (named or lines or ["the replicas did not start"])[-1]
