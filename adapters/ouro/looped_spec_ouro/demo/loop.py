"""The training loop: one `Trainer` owns the weights, the optimizer and how far it has come."""

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

from looped_spec.errors import ConfigError
from looped_spec_ouro.adapter import OuroAdapter
from looped_spec_ouro.demo import objective
from looped_spec_ouro.demo.export import config_json
from looped_spec_ouro.demo.settings import TrainSettings
from looped_spec_ouro.demo.vocabulary import RowSampler

MICRO_BATCH_TOKENS = 1536  # activations of more tokens leave the cache of a small CPU


class Trainer:
    """Train the model for `settings.steps` steps, then its gate alone for `settings.gate_steps`."""

    def __init__(self, settings: TrainSettings, sampler: RowSampler, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.adapter = OuroAdapter(config_json(settings.model), {})
        objective.initialize(self.adapter, settings.seed)
        named = dict(self.adapter.module.named_parameters())
        gate = [p for n, p in named.items() if "early_exit_gate" in n]
        self.body = [p for n, p in named.items() if "early_exit_gate" not in n]
        decayed = [p for n, p in named.items() if p.ndim == 2 and _decays(n)]
        others = [p for n, p in named.items() if not (p.ndim == 2 and _decays(n))]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.gate_optimizer = torch.optim.AdamW(gate, lr=1e-2, weight_decay=0.0, fused=True)
        self.step = 0
        self.seconds = 0.0
        self._losses = (
            torch.compile(self._eager_losses) if settings.compiled else self._eager_losses
        )

    @property
    def total_steps(self) -> int:
        """Count the steps of both stages."""
        return self.settings.steps + self.settings.gate_steps

    @property
    def tokens_seen(self) -> int:
        """Count the tokens that the body of the model was trained on so far."""
        return min(self.step, self.settings.steps) * self.settings.tokens_per_step

    def train_step(self) -> list[float]:
        """Do one step of the stage that is due; return a loss per loop, or the gate's alone."""
        start = time.perf_counter()
        losses = self._body_step() if self.step < self.settings.steps else self._gate_step()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return losses

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

    def _eager_losses(self, rows: Tensor) -> list[Tensor]:
        """Return the loss per loop of rows [B, T + 1]."""
        states = objective.states_after_each_loop(self.adapter, rows[:, :-1])
        return objective.losses_per_loop(self.adapter, states, rows[:, 1:])

    def _body_step(self) -> list[float]:
        weights = self.settings.loop_weights(self.step)
        batches = self._micro_batches()
        total = torch.zeros(len(weights))
        for rows in batches:
            share = len(rows) / sum(len(batch) for batch in batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.autocast):
                losses = self._losses(rows)
            (objective.weighted(losses, weights) * share).backward()  # type: ignore[no-untyped-call]
            total += share * torch.stack(losses).detach()
        torch.nn.utils.clip_grad_norm_(self.body, self.settings.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return [float(x) for x in total]

    def _gate_step(self) -> list[float]:
        batches = self._micro_batches()
        total = 0.0
        for rows in batches:
            with (
                torch.no_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=self.settings.autocast),
            ):
                states = objective.states_after_each_loop(self.adapter, rows[:, :-1])
                losses, _ = objective.token_losses(self.adapter, states, rows[:, 1:])
            loss = objective.gate_loss(self.adapter, states, losses) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.gate_optimizer.step()
        self.gate_optimizer.zero_grad(set_to_none=True)
        return [total]

    def fingerprint(self) -> str:
        """Hash everything that a resumed run must share with the one that was stopped.

        The numbers of steps are left out: a run may be made shorter or longer on the way.
        """
        settings = self.settings.as_dict()
        del settings["steps"], settings["gate_steps"]
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
            "optimizer": self.optimizer.state_dict(),
            "gate_optimizer": self.gate_optimizer.state_dict(),
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.gate_optimizer.load_state_dict(state["gate_optimizer"])


def show(bar: tqdm[Any], losses: Sequence[float]) -> None:
    """Put the losses per loop (or the gate's) at the end of the progress bar."""
    bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses), refresh=False)
    bar.update()


def _decays(name: str) -> bool:
    return "embed_tokens" not in name and "early_exit_gate" not in name
