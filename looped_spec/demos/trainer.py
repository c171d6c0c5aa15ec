"""The training loop: one `Trainer` owns the weights, the optimizers and how far it has come."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from looped_spec.demos.recipe import Recipe, S, Stage
from looped_spec.demos.settings import TrainSettings
from looped_spec.demos.vocabulary import RowSampler
from looped_spec.errors import ConfigError

MICRO_BATCH_TOKENS = 1536  # activations of more tokens leave the cache of a small CPU


class Trainer:
    """Train the stages of a recipe one after the other."""

    def __init__(
        self, recipe: Recipe[S], settings: S, sampler: RowSampler, tokenizer: Tokenizer
    ) -> None:
        self.settings: TrainSettings = settings
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.adapter = recipe.build(settings)
        self.stages = recipe.stages(self.adapter, settings)
        self.optimizers = [self._optimizer(stage) for stage in self.stages]
        self.step = 0
        self.seconds = 0.0

    @property
    def total_steps(self) -> int:
        """Count the steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens_seen(self) -> int:
        """Count the tokens that the first stage, the model's body, was trained on so far."""
        return min(self.step, self.stages[0].steps) * self.settings.tokens_per_step

    def train_step(self) -> list[float]:
        """Do one step of the stage that is due; return what it shows of itself."""
        start = time.perf_counter()
        number, left = 0, self.step
        while left >= self.stages[number].steps:
            left -= self.stages[number].steps
            number += 1
        shown = self._step(self.stages[number], self.optimizers[number])
        self.step += 1
        self.seconds += time.perf_counter() - start
        return shown

    def _optimizer(self, stage: Stage) -> torch.optim.AdamW:
        groups = [{"rate_scale": None if "lr" in group else 1.0, **group} for group in stage.groups]
        rate = self.settings.learning_rate
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)

    def _learning_rate(self) -> float:
        """Return the rate of this step: linear warm-up, then a cosine down to a tenth."""
        s = self.settings
        if self.step < s.warmup_steps:
            return s.learning_rate * (self.step + 1) / s.warmup_steps
        done = (self.step - s.warmup_steps) / max(1, s.steps - s.warmup_steps)
        return s.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def _micro_batches(self) -> Sequence[Tensor]:
        s = self.settings
        length = s.row_length(self.step)
        rows = self.sampler.rows(self.step, s.tokens_per_step // length, length)
        return torch.split(rows, max(1, MICRO_BATCH_TOKENS // length))

    def _step(self, stage: Stage, optimizer: torch.optim.AdamW) -> list[float]:
        batches = self._micro_batches()
        num_rows = sum(len(rows) for rows in batches)
        total: Tensor | None = None
        for part, rows in enumerate(batches):
            share = len(rows) / num_rows
            loss, shown = stage.loss(rows, self.step, part)
            (loss * share).backward()  # type: ignore[no-untyped-call]
            total = share * shown if total is None else total + share * shown
        if stage.clip_norm is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, stage.clip_norm)
        for group in optimizer.param_groups:
            if group["rate_scale"] is not None:
                group["lr"] = self._learning_rate() * group["rate_scale"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [] if total is None else [float(x) for x in total]

    def fingerprint(self) -> str:
        """Hash everything that a resumed run must share with the one that was stopped.

        The numbers of steps are left out: a run may be made shorter or longer on the way.
        """
        settings = self.settings.as_dict()
        for name in self.settings.may_change:
            del settings[name]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.sampler.tokens.tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write a state from which `load` continues exactly."""
        state: dict[str, Any] = {
            "fingerprint": self.fingerprint(),
            "step": self.step,
            "seconds": self.seconds,
            "module": self.adapter.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, part)
            part.replace(path)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot write the state to {path}: {error}") from error

    def load(self, path: Path) -> None:
        """Continue from a saved state; refuse one of another run."""
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(f"cannot resume from {path}: {error}") from error
        if state["fingerprint"] != self.fingerprint():
            raise ConfigError(f"cannot resume from {path}: it has other settings or other text")
        self.step, self.seconds = state["step"], state["seconds"]
        self.adapter.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def show(bar: tqdm[Any], numbers: Sequence[float]) -> None:
    """Put what a step showed of itself at the end of the progress bar."""
    bar.set_postfix_str(" ".join(f"{number:.3f}" for number in numbers), refresh=False)
    bar.update()
