"""Owns the tensors: weights, cache, block tables; turns requests into rows and runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.runtime.attention import AttentionBackend, PagedContext, PagedRows
from looped_spec.runtime.early_exit import ExitRule, exit_round
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool, blocks_for
from looped_spec.runtime.request import Request
from looped_spec.runtime.round import prefill, speculative_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.runtime.scheduler import PrefillChunk

# A batch of prompts is padded to its longest chunk; below this share of real rows it is run in
# parts.
_MIN_FILL = 0.5


@dataclass(frozen=True)
class RoundResult:
    """A round on the host, per request: the target's tokens, how many drafts were accepted, and
    the work done, in rows times loops."""

    tokens: list[list[int]]
    accepted: list[int]
    loop_rows: list[int]


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
    ) -> None:
        """Run `full_loops` deep, or as `exit_rule` says (then without speculation)."""
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.full_loops = full_loops
        self.device = device
        self.exit_rule = exit_rule
        self._readout_has_planes = any(p.kind == "readout" for p in adapter.kv_planes(full_loops))
        width = blocks_for(max_model_len, pool.block_size)
        self._tables = torch.zeros(max_num_seqs, width, dtype=torch.int64, device=device)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Bring tables and cache in line with what the requests hold now; call it before they run.

        It compares states instead of being told of changes, so a step that failed halfway is made
        good by the next one.
        """
        for request in requests:
            start, stop = request.num_table_blocks, len(request.blocks)
            if start < stop:
                self.write_table(request.row, start, request.blocks[start:])
                request.num_table_blocks = stop
            if request.saved_cache is not None:
                self._restore_cache(request)

    def write_table(self, row: int, column: int, blocks: Sequence[int]) -> None:
        """Set block-table entries of `row` from `column` on; a row begun anew is cleared first, so
        that no table names a block of the row's former request."""
        if column == 0:
            self._tables[row] = TRASH_BLOCK
        entries = torch.tensor(blocks, dtype=torch.int64)
        self._tables[row, column : column + len(blocks)] = entries.to(self.device)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        """Compute chunks of known tokens; return the next token of each chunk that ends its
        prompt."""
        tokens: list[int | None] = [None] * len(chunks)
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].stop - chunks[i].start)
        while order:
            longest = chunks[order[-1]].stop - chunks[order[-1]].start
            group = [order.pop()]
            while order and chunks[order[-1]].stop - chunks[order[-1]].start >= _MIN_FILL * longest:
                group.append(order.pop())
            for index, token in zip(
                group, self._prefill_group([chunks[i] for i in group]), strict=True
            ):
                tokens[index] = token
        return tokens

    @torch.inference_mode()
    def round(self, requests: Sequence[Request], candidate: Candidate) -> RoundResult:
        """Run one round of `candidate` for requests whose newest token has no keys and values
        yet."""
        positions = [request.num_tokens - 1 for request in requests]
        limits = [request.max_cached_tokens for request in requests]
        last = max(positions) + candidate.num_speculative_tokens
        rows, sampling, mode = self._rows(requests, limits, last + 1)
        packed = self._int_tensor([[request.last_token for request in requests], positions])

        def context(where: Tensor, loops: int) -> PagedContext:
            return PagedContext(self.pool, self.backend, rows, where, loops)

        if self.exit_rule is not None:
            assert candidate.num_speculative_tokens == 0, "early exit runs without speculation"
            left = exit_round(
                self.adapter,
                context(packed[1][:, None], self.full_loops),
                self.pool,
                packed[0],
                sampling,
                rule=self.exit_rule,
                mode=mode,
            )
            tokens, loops = torch.stack((left.next_token, left.loops)).tolist()
            return RoundResult([[token] for token in tokens], [0] * len(tokens), loops)
        out = speculative_round(
            self.adapter,
            context,
            packed[0],
            packed[1],
            sampling,
            num_speculative_tokens=candidate.num_speculative_tokens,
            draft_loops=candidate.draft_loops,
            full_loops=self.full_loops,
            mode=mode,
        )
        # One copy brings everything that the host needs.
        host = torch.cat((out.accepted[:, None], out.tokens), dim=1).tolist()
        work = [self._loop_rows(candidate)] * len(host)
        return RoundResult([row[1:] for row in host], [row[0] for row in host], work)

    def save_cache(self, request: Request) -> object:
        """Copy what a request has computed to the host; `prepare` puts it back."""
        used = blocks_for(request.num_computed, self.pool.block_size)
        return self.pool.save(request.blocks[:used])

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

    def _prefill_group(self, chunks: Sequence[PrefillChunk]) -> list[int | None]:
        requests = [chunk.request for chunk in chunks]
        length = max(chunk.stop - chunk.start for chunk in chunks)
        known = [chunk.request.known_tokens(chunk.start, chunk.stop) for chunk in chunks]
        tokens = self._int_tensor([ids + [0] * (length - len(ids)) for ids in known])
        bounds = self._int_tensor(
            [[c.start for c in chunks], [c.stop for c in chunks], [len(ids) - 1 for ids in known]]
        )
        # Padding stands behind its chunk, so the limit sends it to the trash block.
        longest = max(chunk.start for chunk in chunks) + length
        rows, sampling, mode = self._rows(requests, [c.stop for c in chunks], longest)
        positions = bounds[0][:, None] + torch.arange(length, device=self.device)
        ctx = PagedContext(self.pool, self.backend, rows, positions, self.full_loops, bounds[2])
        want = any(chunk.ends_prompt for chunk in chunks)
        out = prefill(
            self.adapter,
            ctx,
            tokens,
            bounds[1],
            sampling,
            full_loops=self.full_loops,
            mode=mode,
            want_tokens=want,
            readout_has_planes=self._readout_has_planes,
        )
        if out is None:
            return [None] * len(chunks)
        chosen: list[int] = out.tolist()
        return [token if c.ends_prompt else None for token, c in zip(chosen, chunks, strict=True)]

    def _rows(
        self, requests: Sequence[Request], limits: list[int], num_positions: int
    ) -> tuple[PagedRows, SamplingTensors, SamplingMode]:
        """Gather what the rows share; block tables are cut to the blocks that `num_positions`
        reach."""
        vocab = self.adapter.geometry.vocab_size
        params = [request.params for request in requests]
        packed = self._int_tensor(
            [
                [request.row for request in requests],
                limits,
                [request.seed for request in requests],
                [min(max(p.top_k, 0), vocab) for p in params],
            ]
        )
        width = min(blocks_for(num_positions, self.pool.block_size), self._tables.shape[1])
        tables = self._tables[:, :width].index_select(0, packed[0])
        mode = SamplingMode.of(params)
        floats = torch.tensor(
            [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
            dtype=torch.float32,
        ).to(self.device)
        sampling = SamplingTensors(packed[2], floats[0], packed[3], floats[1], floats[2])
        return PagedRows(tables, packed[1], packed[2]), sampling, mode

    def _int_tensor(self, values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)
