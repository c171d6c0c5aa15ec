"""Finding the request that a failing step is due to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looped_spec.runtime.engine import Engine
    from looped_spec.runtime.request import Request


def step_alone(engine: Engine, request: Request) -> Exception | None:
    """Run a step in which only `request` takes part; return what it raised, unless it made
    progress all the same, in which case something else than the request is at fault."""
    before = _progress(request)
    try:
        with engine.scheduler.alone(request):
            engine.step()
    except Exception as error:
        return error if _progress(request) == before else None
    return None


def _progress(request: Request) -> tuple[int, int, bool]:
    return len(request.output_token_ids), request.num_computed, request.finish_reason is not None
