"""The front of Ray Serve without its processes: options, refusals, and waiting for the end."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from looped_spec.cli.main import main
from looped_spec.errors import ConfigError
from looped_spec.serve.options import ServeOptions
from looped_spec.serve.ray_deployment import RayServer
from looped_spec.serve.ray_options import RayOptions


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand in for Ray; whoever is asked to come to its cluster does."""
    fake = ModuleType("ray")
    fake.serve = ModuleType("ray.serve")  # type: ignore[attr-defined]
    fake.init = lambda **options: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.serve", fake.serve)
    return fake


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'looped-spec[ray]'"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # which Ray's own modules give
def test_ray_serve_takes_the_options_of_a_deployment_as_they_are_meant() -> None:
    from ray.serve.config import AutoscalingConfig

    options = RayOptions(min_replicas=2, max_replicas=5, target_ongoing_requests=8)
    config = AutoscalingConfig(**options.scale(32)["autoscaling_config"])
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (2, 2, 5)
    assert config.target_ongoing_requests == 8
    assert (config.upscale_delay_s, config.downscale_delay_s) == (30, 600)  # as the help says
    quick = RayOptions(max_replicas=5, upscale_delay_seconds=1, downscale_delay_seconds=2.5)
    config = AutoscalingConfig(**quick.scale(32)["autoscaling_config"])
    assert (config.upscale_delay_s, config.downscale_delay_s) == (1, 2.5)


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "demo:ouro", "--ray"]) == 2
    assert "pip install 'looped-spec[ray,serve]'" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_one_line(
    fake_ray: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:

    def init(**options: object) -> None:
        raise ConnectionError(f"nobody at\n{options['address']}")

    fake_ray.init = init  # type: ignore[attr-defined]
    assert main(["serve", "demo:ouro", "--ray", "10.0.0.1:6379"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert (
        "--ray 10.0.0.1:6379: no cluster there, or none that lets us in (nobody at 10.0.0.1" in line
    )


class Replicas:
    """A handle of two replicas that tell at each question what is next."""

    def __init__(self, answers: list[list[object] | None]) -> None:
        self.answers = answers

    def broadcast(self, method: str) -> Replicas:
        assert method == "drain"
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert return_exceptions
        answer = self.answers.pop(0)
        if answer is None:
            raise TimeoutError
        return answer


@pytest.mark.usefixtures("fake_ray")
def test_replicas_are_waited_for_until_each_says_that_nothing_is_open() -> None:
    told: list[str] = []
    server = RayServer("10.0.0.1:6379", ServeOptions(), RayOptions(), told.append)
    lost = RuntimeError("this replica is being replaced")
    server._handle = Replicas([None, [lost, 2], [lost, 0], [1, 0], [0, 0], [9, 9]])
    server._drain()
    assert server._handle.answers == [[9, 9]]
    assert told == ["open answers: 0 or more; they get up to 30 s to end"]
    server._handle = Replicas([[]])  # none is left
    server._drain()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 2", "--replicas needs --ray"),
        ("--gpus-per-replica 1", "--gpus-per-replica needs --ray"),
        ("--ray --port 0", "--port 0 does not go with --ray"),
        ("--ray --replicas 0", "replicas must be between 1 and 4096, got 0"),
        ("--ray --replicas 2 --max-replicas 3", "replicas is a fixed number"),
        ("--ray --min-replicas 3 --max-replicas 2", "max_replicas must be at least"),
        ("--ray --target-ongoing-requests 8", "target_ongoing_requests needs max_replicas"),
        ("--ray --upscale-delay-seconds 8", "upscale_delay_seconds needs max_replicas"),
        ("--ray --replicas 2 --downscale-delay-seconds 8", "replicas is a fixed number"),
        ("--ray --max-replicas 2 --upscale-delay-seconds -1", "upscale_delay_seconds must be"),
    ],
)
@pytest.mark.usefixtures("fake_ray")
def test_flags_that_do_not_go_together_are_refused_by_name(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo:ouro", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_autoscaling_options_are_passed_through() -> None:
    assert RayOptions().scale(32) == {"num_replicas": 1}
    assert RayOptions(replicas=3).scale(32) == {"num_replicas": 3}
    scaled = RayOptions(min_replicas=2, max_replicas=5).scale(32)["autoscaling_config"]
    assert (scaled["min_replicas"], scaled["max_replicas"]) == (2, 5)
    assert scaled["target_ongoing_requests"] == 32
    own = RayOptions(max_replicas=5, target_ongoing_requests=8).scale(32)["autoscaling_config"]
    assert (own["min_replicas"], own["target_ongoing_requests"]) == (1, 8)
    with pytest.raises(ConfigError, match="at least min_replicas = 4"):
        RayOptions(min_replicas=4, max_replicas=3)
