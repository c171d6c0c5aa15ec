"""Owns the tensors: weights, cache, block tables; turns requests into rows and runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.runtime.attention import AttentionBackend, PagedContext, PagedRows
from looped_spec.runtime.batch import DecodeBatch, span_of, upload, upload_floats
from looped_spec.runtime.early_exit import ExitRule, exit_round
from looped_spec.runtime.graphs import GraphBackend, GraphRunner
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool, blocks_for
from looped_spec.runtime.logprobs import LogprobReader
from looped_spec.runtime.readback import Readback
from looped_spec.runtime.request import Request
from looped_spec.runtime.round import can_read_shadows, prefill
from looped_spec.runtime.round_program import RoundProgram, RoundShape
from looped_spec.runtime.round_result import RoundResult
from looped_spec.runtime.row_state import RowState
from looped_spec.runtime.sampler import NOT_FINITE, SamplingMode
from looped_spec.runtime.scheduler import PrefillChunk
from looped_spec.runtime.token_logprobs import TokenLogprobs

# A batch of prompts is padded to its longest chunk; below this share of real rows it is run in
# parts.
_MIN_FILL = 0.5


class RoundTicket:
    """A round that was submitted; `result` waits for it."""

    def __init__(
        self,
        runner: ModelRunner,
        requests: Sequence[Request],
        candidate: Candidate,
        shadow_depths: tuple[int, ...],
        numbers: Tensor,
        number: int,
        logprobs: LogprobReader | None = None,
    ) -> None:
        """Begin to read `numbers` ([B, K + 2 + S] int64); rounds count up by `number`."""
        self.requests = requests
        self.candidate = candidate
        self.shadow_depths = shadow_depths
        self.number = number
        self.logprobs = logprobs
        self._runner = runner
        self._readback = Readback(numbers)

    def result(self) -> RoundResult:
        """Wait, and return what came of it. To be called in the order of submission, before what
        came of it is committed."""
        return self._runner.finish(self, self._readback.wait().tolist())


class ModelRunner:
    """Runs prefill passes and rounds of one model over one cache."""

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        backend: AttentionBackend,
        *,
        full_loops: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        exit_rule: ExitRule | None = None,
        graph_backend: GraphBackend | None = None,
        graph_sizes: Sequence[int] = (),
        graph_memory_bytes: int | None = None,
        graphs_may_fail: bool = False,
    ) -> None:
        """Run `full_loops` deep, or as `exit_rule` says (then without speculation); `GraphRunner`
        explains what concerns graphs."""
        self.adapter = adapter
        self.pool = pool
        self.full_loops = full_loops
        self.device = device
        self.exit_rule = exit_rule
        self._readout_has_planes = any(p.kind == "readout" for p in adapter.kv_planes(full_loops))
        width = blocks_for(max_model_len, pool.block_size)
        self.state = RowState(max_num_seqs, width, device)
        self._table_width = width
        self._written = [0] * max_num_seqs  # columns of each table row that may name a block
        self._batch = DecodeBatch(self.state, device)
        self.program = RoundProgram(adapter, pool, backend, self.state, full_loops)
        self.graphs = GraphRunner(
            self.program,
            graph_backend,
            sizes=graph_sizes,
            memory_limit=graph_memory_bytes,
            may_fail=graphs_may_fail,
        )
        self._num_rounds = 0

    @property
    def backend(self) -> AttentionBackend:
        """What computes attention."""
        return self.program.backend

    @backend.setter
    def backend(self, backend: AttentionBackend) -> None:
        self.program.backend = backend

    @property
    def can_read_shadows(self) -> bool:
        """Whether a round can tell what drafts of another depth would have been."""
        return self.exit_rule is None and can_read_shadows(self.adapter)

    @property
    def can_interrupt(self) -> bool:
        """Whether something else can be run between two passes of a round: not where the device
        runs ahead of the host, which knows no more then what took how long."""
        return self.exit_rule is None and self.device.type == "cpu"

    def prepare(self, requests: Sequence[Request]) -> None:
        """Bring tables and cache in line with what the requests hold now; call it before they run.

        It compares states instead of being told of changes, so a step that failed halfway is made
        good by the next one.
        """
        grown = [r for r in requests if r.num_table_blocks < len(r.blocks)]
        if not grown:
            return
        new = [request for request in grown if not request.num_table_blocks]
        if new:
            self._write_params(new)
            for request in new:
                if request.saved_cache is not None:
                    self._restore_cache(request)
        self.write_tables([(r.row, r.num_table_blocks, r.blocks) for r in grown])
        for request in grown:
            request.num_table_blocks = len(request.blocks)

    def write_tables(self, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Write block tables: (row, first column that changed, all blocks of the row) for each.

        Where the row named more blocks before, these are cleared, so that no table names a block of
        the row's former request.
        """
        places: list[int] = []
        values: list[int] = []
        for row, start, blocks in changes:
            stop = len(blocks)
            former = self._written[row]
            self._written[row] = max(former, stop)
            values += blocks[start:] if start else blocks
            if former > stop:
                values += [TRASH_BLOCK] * (former - stop)
                stop = former
            begin = row * self._table_width
            places += range(begin + start, begin + stop)
        where, what = upload((places, values), self.device)
        self.state.tables.view(-1).index_copy_(0, where, what)
        for row, _, blocks in changes:
            self._written[row] = len(blocks)

    def _write_params(self, requests: Sequence[Request]) -> None:
        """Write what stays the same of requests while they run, into their rows."""
        params = [request.params for request in requests]
        vocab_size = self.adapter.geometry.vocab_size
        numbers = upload(
            (
                [request.row for request in requests],
                [request.max_cached_tokens for request in requests],
                [request.seed for request in requests],
                [min(max(p.top_k, 0), vocab_size) for p in params],
            ),
            self.device,
        )
        floats = upload_floats(
            ([p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]),
            self.device,
        )
        self.state.set_params(numbers[0], numbers[1:], floats)

    @torch.inference_mode()
    def prefill(
        self,
        chunks: Sequence[PrefillChunk],
        logprobs: dict[int, TokenLogprobs] | None = None,
    ) -> list[int | None]:
        """Compute chunks of known tokens; return the next token of each chunk that ends its
        prompt, or `NOT_FINITE` for any chunk.

        `logprobs` gets what belongs to the tokens of requests that ask, by place in `chunks`.
        """
        tokens: list[int | None] = [None] * len(chunks)
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].stop - chunks[i].start)
        while order:
            longest = chunks[order[-1]].stop - chunks[order[-1]].start
            group = [order.pop()]
            while order and chunks[order[-1]].stop - chunks[order[-1]].start >= _MIN_FILL * longest:
                group.append(order.pop())
            chosen, found = self._prefill_group([chunks[i] for i in group])
            for place, index in enumerate(group):
                tokens[index] = chosen[place]
                if logprobs is not None and found and (own := found[place]) is not None:
                    logprobs[index] = own[0]
        return tokens

    def round(
        self,
        requests: Sequence[Request],
        candidate: Candidate,
        shadow_depths: Sequence[int] = (),
        between_passes: Callable[[], None] | None = None,
    ) -> RoundResult:
        """Run one round of `candidate` for requests whose newest token has no keys and values
        yet.

        Shadow depths that the model cannot tell of, or that are no other draft depth, are left
        out. `between_passes` may prefill other requests; it is called only if `can_interrupt`, and
        not in a round that was captured.
        """
        if self.exit_rule is not None:
            assert candidate.num_speculative_tokens == 0, "early exit runs without speculation"
            return self._exit_round(requests, self.exit_rule)
        self.program.between_passes = between_passes
        try:
            return self.submit(requests, candidate, shadow_depths).result()
        finally:
            self.program.between_passes = None

    @torch.inference_mode()
    def submit(
        self,
        requests: Sequence[Request],
        candidate: Candidate,
        shadow_depths: Sequence[int] = (),
        *,
        unread_tokens: int = 0,
    ) -> RoundTicket:
        """Submit a round without waiting for it; see `round`.

        `unread_tokens` is how many tokens the round before, which nobody has read yet, may have
        added to each of `requests`; all of them must have been in it. The table rows must have room
        for these and for the round's own.
        """
        mode = self._batch.load(requests, follows=unread_tokens > 0)
        longest = max([request.num_tokens for request in requests]) + unread_tokens
        depths = self._other_depths(candidate, shadow_depths)
        shape = RoundShape.of(len(requests), candidate, mode)
        reader = LogprobReader.of(requests)
        num_positions = longest + candidate.num_speculative_tokens
        knows = self.backend.wants_spans(self.device) and not unread_tokens
        spans = [span_of(request) for request in requests] if knows else []
        numbers = self.graphs.run(shape, depths, num_positions, reader, spans)
        self._num_rounds += 1
        return RoundTicket(self, requests, candidate, depths, numbers, self._num_rounds, reader)

    def finish(self, ticket: RoundTicket, rows: list[list[int]]) -> RoundResult:
        """Return the result of a round whose numbers are `rows`, one of K + 2 + S per request."""
        k = ticket.candidate.num_speculative_tokens
        accepted = [row[k + 1] for row in rows]
        if ticket.number == self._num_rounds:
            self._batch.expect(
                [row[count] for row, count in zip(rows, accepted, strict=True)],
                [r.num_tokens + n for r, n in zip(ticket.requests, accepted, strict=True)],
            )
        work = [self._loop_rows(ticket.candidate)] * len(rows)
        shadow = [row[k + 2 :] for row in rows] if ticket.shadow_depths else []
        tokens = [row[: k + 1] for row in rows]
        logprobs = ticket.logprobs.rows() if ticket.logprobs else []
        return RoundResult(tokens, accepted, work, ticket.shadow_depths, shadow, logprobs)

    def capture(self, shapes: Iterable[RoundShape], *, show_progress: bool = True) -> None:
        """Capture rounds of these shapes; see `GraphRunner.capture`."""
        self.graphs.capture(shapes, show_progress=show_progress)
        self._batch.forget()

    @torch.inference_mode()
    def _exit_round(self, requests: Sequence[Request], rule: ExitRule) -> RoundResult:
        """Run a token of each request, deep enough for the rule."""
        mode = self._batch.load(requests)
        width = self.program.width_for(max([request.num_tokens for request in requests]))
        rows = self.state.rows(len(requests), width)
        paged = PagedRows(rows.tables, rows.limits, rows.sampling.seeds)
        positions = rows.positions[:, None]
        reader = LogprobReader.of(requests)
        left = exit_round(
            self.adapter,
            PagedContext(self.pool, self.backend, paged, positions, self.full_loops),
            self.pool,
            rows.tokens,
            rows.sampling,
            rule=rule,
            mode=mode,
            on_targets=reader,
        )
        rows.advance(left.next_token, rows.positions + 1)
        chosen, loops = torch.stack((left.next_token, left.loops)).tolist()
        self._batch.expect(chosen, [request.num_tokens for request in requests])
        logprobs = reader.rows() if reader else []
        tokens = [[token] for token in chosen]
        return RoundResult(tokens, [0] * len(chosen), loops, logprobs=logprobs)

    def _other_depths(self, candidate: Candidate, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return those of `wanted` that can be told of beside a round of `candidate`."""
        if not wanted or not self.can_read_shadows:
            return ()
        own = candidate.draft_loops if candidate.num_speculative_tokens else 0
        return tuple(d for d in sorted(set(wanted)) if 1 <= d < self.full_loops and d != own)

    def save_cache(self, request: Request) -> object:
        """Copy what a request has computed to the host; `prepare` puts it back."""
        used = blocks_for(request.num_computed, self.pool.block_size)
        return self.pool.save(request.blocks[:used])

    def clean_cache(self) -> None:
        """Put zeros for what is not finite anywhere in the cache: what is masked still meets a zero
        weight, and 0 * NaN is NaN, in whatever request holds the block next."""
        self.pool.clean()

    def _restore_cache(self, request: Request) -> None:
        """Put a saved cache into the blocks that the request holds now."""
        saved = cast("list[tuple[Tensor, Tensor]]", request.saved_cache)
        used = blocks_for(request.num_computed, self.pool.block_size)
        self.pool.restore(request.blocks[:used], saved)
        request.saved_cache = None

    def _loop_rows(self, candidate: Candidate) -> int:
        """Return the rows times loops of one request's round."""
        k = candidate.num_speculative_tokens
        again = 0 if self.adapter.capabilities.resumable else k * candidate.draft_loops
        return self.full_loops * (k + 1) + again

    def _prefill_group(
        self, chunks: Sequence[PrefillChunk]
    ) -> tuple[list[int | None], list[list[TokenLogprobs] | None]]:
        requests = [chunk.request for chunk in chunks]
        length = max([chunk.stop - chunk.start for chunk in chunks])
        known = [chunk.request.known_tokens(chunk.start, chunk.stop) for chunk in chunks]
        tokens = upload([ids + [0] * (length - len(ids)) for ids in known], self.device)
        rows, starts, stops, last = upload(
            (
                [request.row for request in requests],
                [chunk.start for chunk in chunks],
                [chunk.stop for chunk in chunks],
                [len(ids) - 1 for ids in known],
            ),
            self.device,
        )
        _, sampling = self.state.sampling(rows)
        num_positions = max([chunk.start for chunk in chunks]) + length
        width = min(blocks_for(num_positions, self.pool.block_size), self._table_width)
        tables = self.state.tables[:, :width].index_select(0, rows)
        # Padding stands behind its chunk, so the limit sends it to the trash block.
        paged = PagedRows(tables, stops, sampling.seeds)
        positions = starts[:, None] + torch.arange(length, device=self.device)
        ctx = PagedContext(self.pool, self.backend, paged, positions, self.full_loops, last)
        want = any([chunk.ends_prompt for chunk in chunks])
        reader = LogprobReader.of(requests) if want else None
        out = prefill(
            self.adapter,
            ctx,
            tokens,
            stops,
            sampling,
            full_loops=self.full_loops,
            mode=SamplingMode.of([request.params for request in requests]),
            want_tokens=want,
            readout_has_planes=self._readout_has_planes,
            on_targets=reader,
        )
        tokens_or_none = [
            token if chunk.ends_prompt or token == NOT_FINITE else None
            for token, chunk in zip(out.tolist(), chunks, strict=True)
        ]
        return tokens_or_none, reader.rows() if reader else []
