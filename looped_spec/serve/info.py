"""The document of /server_info: what runs, how busy it is, what speculation does and why."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from looped_spec.plugins import PluginManager
from looped_spec.serve.front import Front, Stage
from looped_spec.serve.snapshot import EngineSnapshot
from looped_spec.serve.speculation import num_drafting_rounds
from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.runtime.llm import LLM


class ServerInfo:
    """Writes the document; what cannot change is worked out once."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._fixed: dict[str, Any] | None = None

    def document(self, snapshot: EngineSnapshot | None) -> dict[str, Any]:
        """Return the document, without what only a loaded model can tell if there is none."""
        front = self._front
        document: dict[str, Any] = {
            "version": __version__,
            "stage": front.stage.value,
            "models": list(front.model_names),
            "uptime_seconds": round(time.time() - front.started, 3),
            "num_open_answers": front.num_open,
        }
        if snapshot is None or front.stage in (Stage.LOADING, Stage.FAILED):
            return document
        if self._fixed is None:
            self._fixed = {
                "model": _model(front.llm, front.encoder.max_prompt_tokens),
                "preset": front.llm.preset.as_dict(),
                "plugins": _plugins(),
            }
        document |= self._fixed
        document["engine"] = {
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "num_blocks": snapshot.num_blocks,
            "num_free_blocks": snapshot.num_free_blocks,
            "num_preemptions": snapshot.num_preemptions,
            "prefix_cache": (
                dataclasses.asdict(snapshot.prefix_cache) if snapshot.prefix_cache else None
            ),
            "num_generation_tokens": front.latencies.num_generation_tokens,
            "failed_answers": snapshot.failed_answers,
        }
        document["speculation"] = _speculation(snapshot)
        shown: dict[str, Any] = finite(document)
        return shown


def finite(value: Any) -> Any:
    """Copy a document with None for floats that are no number, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _model(llm: LLM, max_prompt_tokens: int) -> dict[str, Any]:
    options = llm.options
    return {
        "full_loops": llm.full_loops,
        "device": str(llm.loaded.device),
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "max_model_len": llm.max_model_len,
        "max_prompt_tokens": max_prompt_tokens,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }


def _plugins() -> list[dict[str, str]]:
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "status": record.status,
        }
        for record in PluginManager().records()
    ]


def _speculation(snapshot: EngineSnapshot) -> dict[str, Any]:
    metrics, candidate = snapshot.metrics, snapshot.candidate
    rounds = num_drafting_rounds(metrics)
    explanation, controller = snapshot.explanation, snapshot.controller
    return {
        "policy": explanation.policy,
        "num_speculative_tokens": candidate.num_speculative_tokens if candidate else None,
        "draft_loops": candidate.draft_loops if candidate else None,
        "num_rounds": metrics.num_rounds,
        "num_drafts": rounds,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "mean_acceptance_length": 1 + metrics.num_accepted_tokens / rounds if rounds else None,
        "acceptance_by_position": metrics.acceptance_by_position,
        "rounds_by_candidate": [
            [c.num_speculative_tokens, c.draft_loops, count]
            for c, count in metrics.rounds_by_candidate.items()
        ],
        "explanation": explanation.as_dict(),
        "controller": controller.as_dict() if controller else None,
    }
