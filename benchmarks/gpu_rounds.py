"""What `gpu.py` measures with: a model of random weights, its rounds, and a clock."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.loading import load_adapter
from looped_spec.runtime.attention import AttentionBackend, AttentionNeeds, choose_attention
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.graphs import CudaGraphs, GraphBackend, TracedGraphs
from looped_spec.runtime.kv_cache import KVPool, blocks_for
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.runtime.scheduler import Scheduler
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.forced_acceptance import ForcedAcceptance

PLAIN = Candidate(0, 0)
GREEDY = SamplingMode.GREEDY

OURO_1_4B: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "total_ut_steps": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 65536,
    "eos_token_id": 0,
}
"""The geometry of ByteDance/Ouro-1.4B; weights are random."""


@dataclass(frozen=True)
class Plan:
    """How much is measured, and where.

    Attributes:
        device: "cuda" or "cpu".
        dtype: of the model and its cache.
        config: config.json of the model.
        batch_sizes: B, ascending.
        contexts: L, tokens of a request when its round begins, ascending.
        draft_tokens: K beside 0.
        draft_loops: d.
        max_model_len: width of the block tables, in tokens.
        wide_model_len: another width, to see what it costs.
        repeats: rounds timed for each cell.
        rounds: engine steps timed for each speed-up.
        exact: (B, K, d) of the comparison bit for bit.
    """

    device: str
    dtype: torch.dtype
    config: dict[str, Any]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    draft_loops: tuple[int, ...]
    max_model_len: int
    wide_model_len: int
    repeats: int
    rounds: int
    exact: tuple[tuple[int, int, int], ...]

    @property
    def candidates(self) -> list[Candidate]:
        """Plain decoding and every (K, d), those with small K first."""
        drafts = [Candidate(k, d) for k in self.draft_tokens for d in self.draft_loops]
        return [PLAIN, *drafts]

    def graphs(self) -> GraphBackend:
        """Return a fresh graph backend: CUDA graphs, or their twin."""
        return CudaGraphs(torch.device(self.device, 0)) if self.is_cuda else TracedGraphs()

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device to wait for."""
        return self.device == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


FULL = Plan(
    device="cuda",
    dtype=torch.bfloat16,
    config=OURO_1_4B,
    batch_sizes=(1, 8, 32),
    contexts=(128, 512),
    draft_tokens=(1, 2, 4, 8),
    draft_loops=(1, 2, 3),
    max_model_len=1024,
    wide_model_len=32768,
    repeats=9,
    rounds=30,
    exact=((1, 0, 0), (1, 2, 1), (4, 0, 0), (4, 4, 1), (8, 1, 1), (8, 8, 1)),
)
DRY = Plan(
    device="cpu",
    dtype=torch.float32,
    config=OURO_1_4B
    | {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "total_ut_steps": 2,
        "max_position_embeddings": 256,
    },
    batch_sizes=(1, 2, 3),
    contexts=(8, 16),
    draft_tokens=(1, 2),
    draft_loops=(1,),
    max_model_len=96,
    wide_model_len=192,
    repeats=2,
    rounds=4,
    exact=((2, 1, 1),),
)


class Clock:
    """Tells how much time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, negative when time is over."""
        return self._end - time.monotonic()


@dataclass
class Bench:
    """A model with forced acceptance, its cache, and a runner whose rounds can be captured."""

    plan: Plan
    model: ForcedAcceptance
    attention: AttentionBackend
    runner: ModelRunner
    num_blocks: int
    load_seconds: float
    plain_adapter: ModelAdapter
    captured: set[RoundShape] = field(default_factory=set)

    @classmethod
    def load(cls, plan: Plan, probability: float) -> Bench:
        """Make the model and a cache for the largest batch at full length."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(plan.config))
            loaded = load_adapter(
                Path(folder), device=plan.device, dtype=plan.dtype, load_format="dummy"
            )
        model = ForcedAcceptance(loaded.adapter, probability)
        loops = model.geometry.default_full_loops
        attention = choose_attention("auto", needs_of(plan, model))
        block_size, most = attention.block_size, plan.batch_sizes[-1]
        num_blocks = most * blocks_for(plan.max_model_len, block_size)
        device = loaded.device
        pool = KVPool(model.kv_planes(loops), num_blocks, block_size, plan.dtype, device)
        runner = make_runner(plan, model, pool, attention.backend, plan.max_model_len)
        plan.synchronize()
        seconds = time.perf_counter() - start
        return cls(plan, model, attention.backend, runner, num_blocks, seconds, loaded.adapter)

    @property
    def full_loops(self) -> int:
        """D."""
        return self.runner.full_loops

    def shape(self, batch_size: int, candidate: Candidate) -> RoundShape:
        """Return the shape of a greedy round."""
        return RoundShape.of(batch_size, candidate, GREEDY)

    def capture(self, batch_size: int, candidate: Candidate) -> float:
        """Capture a round if it is not yet; return seconds."""
        start = time.perf_counter()
        self.runner.capture([self.shape(batch_size, candidate)], show_progress=False)
        self.plan.synchronize()
        return time.perf_counter() - start

    def place(self, runner: ModelRunner, batch_size: int, context: int) -> None:
        """Let `batch_size` rows decode at `context` tokens, each in blocks of its own."""
        state, per_row = runner.state, blocks_for(self.plan.max_model_len, runner.pool.block_size)
        state.empty_batch()
        device = state.tables.device
        blocks = torch.arange(1, per_row * state.padding_row + 1, device=device)
        state.tables[: state.padding_row, :per_row] = blocks.view(state.padding_row, per_row)
        state.numbers.zero_()
        state.numbers[0] = torch.arange(state.padding_row + 1, device=device) % 50
        state.numbers[1] = context - 1
        state.numbers[2] = self.plan.max_model_len - 1
        state.numbers[3] = torch.arange(state.padding_row + 1, device=device)
        state.numbers[:, -1] = 0
        state.params.zero_()
        state.batch[:batch_size] = torch.arange(batch_size, device=device)

    @torch.inference_mode()
    def time_round(
        self,
        batch_size: int,
        context: int,
        candidate: Candidate,
        *,
        eager: bool = False,
        runner: ModelRunner | None = None,
        repeats: int | None = None,
    ) -> float:
        """Return the median milliseconds of a round, as captured or eager, of the device's time."""
        runner = runner or self.runner
        shape = self.shape(batch_size, candidate)
        self.place(runner, batch_size, context)
        start = runner.state.numbers.clone()
        if not eager:
            assert runner.graphs.covers(shape), f"{shape} was not captured"

        def run() -> None:
            if eager:
                runner.program(shape, has_padding=False)
            else:
                runner.graphs.run(shape)

        times = []
        for _ in range((repeats or self.plan.repeats) + 2):
            runner.state.numbers.copy_(start)
            times.append(self._time(run))
        return statistics.median(times[2:])

    def _time(self, run: Callable[[], None]) -> float:
        if not self.plan.is_cuda:
            clock = time.perf_counter()
            run()
            return 1000.0 * (time.perf_counter() - clock)
        event = partial(torch.cuda.Event, enable_timing=True)
        before, after = event(), event()
        before.record()
        run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after))

    def engine(self, candidate: Candidate, *, async_scheduling: bool) -> Engine:
        """Return an engine over the same runner, with all memory free."""
        scheduler = Scheduler(
            self.num_blocks, self.runner.pool.block_size, self.runner.state.padding_row, 1 << 16
        )
        return Engine(
            self.runner,
            scheduler,
            StaticPolicy(candidate),
            max_model_len=self.plan.max_model_len,
            candidates=(candidate, PLAIN),
            async_scheduling=async_scheduling,
        )

    def weight_bytes(self) -> int:
        """Bytes of weights that a plain round reads: those of the looped layers once per loop, the
        rest once, and of the embedding next to nothing."""
        total = 0
        for name, parameter in self.model.module.named_parameters():
            if "embed" in name:
                continue
            times = self.full_loops if "layers." in name else 1
            total += times * parameter.numel() * parameter.element_size()
        return total

    def cache_bytes(self, batch_size: int, context: int) -> int:
        """Bytes of keys and values that a plain round reads."""
        planes = self.model.kv_planes(self.full_loops)
        numbers = sum(2 * plane.num_kv_heads * plane.head_dim for plane in planes)
        return batch_size * context * numbers * self.plan.dtype.itemsize


def needs_of(plan: Plan, model: ModelAdapter, **changes: Any) -> AttentionNeeds:
    """Say what the model asks of an attention backend."""
    planes = model.kv_planes(model.geometry.default_full_loops)
    heads = frozenset(plane.head_dim for plane in planes)
    device = torch.device(plan.device, 0) if plan.is_cuda else torch.device(plan.device)
    return AttentionNeeds(device, plan.dtype, heads, **changes)


def make_runner(
    plan: Plan,
    model: ModelAdapter,
    pool: KVPool,
    attention: AttentionBackend,
    max_model_len: int,
    num_rows: int | None = None,
) -> ModelRunner:
    """Return a runner whose rounds are captured at the plan's batch sizes."""
    num_rows = num_rows or plan.batch_sizes[-1]
    return ModelRunner(
        model,
        pool,
        attention,
        full_loops=model.geometry.default_full_loops,
        max_num_seqs=num_rows,
        max_model_len=max_model_len,
        device=pool.planes[0][0].device,
        graph_backend=plan.graphs(),
        graph_sizes=[size for size in plan.batch_sizes if size <= num_rows],
    )


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, the same ones every time."""
    dice = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab_size, (count, length), generator=dice)
    found: list[list[int]] = tokens.tolist()
    return found


@contextmanager
def decoding(engine: Engine, prompts: list[list[int]], max_tokens: int) -> Iterator[list[Any]]:
    """Start requests and step until all of them decode; at the end nobody is left."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=number)
        for number in range(len(prompts))
    ]
    requests = [engine.add_request(p, one) for p, one in zip(prompts, params, strict=True)]
    try:
        while any(r.finish_reason is None and r.metrics.num_rounds < 2 for r in requests):
            engine.step()
        yield requests
    finally:
        engine.drop([request for request in requests if request.finish_reason is None])
