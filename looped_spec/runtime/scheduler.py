"""Which requests run in a step: continuous batching, chunked prefill, preemption by recompute."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from looped_spec.errors import CapacityError
from looped_spec.runtime.kv_cache import BlockAllocator, blocks_for
from looped_spec.runtime.prefix_cache import PrefixCacheStats, hash_blocks
from looped_spec.runtime.request import Request, Status


@dataclass(frozen=True)
class PrefillChunk:
    """Known tokens `start` to `stop` of a request, to be computed at full depth."""

    request: Request
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the next token is chosen after this chunk."""
        return self.stop == self.request.num_tokens


@dataclass
class Schedule:
    """What one step runs: `decode` in the order of arrival, after the prefill chunks; `budget`
    tokens are left for more of these."""

    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    budget: int = 0


class Scheduler:
    """Owns the queues, the rows and the blocks of requests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        save_cache: Callable[[Request], object] | None = None,
        *,
        prefix_caching: bool = False,
        prefixes_by_seed: bool = True,
    ) -> None:
        """Manage `num_blocks` blocks.

        `save_cache` copies away what a preempted request has computed, where computing it again
        could give another result; without it, preemption is by recompute. With `prefix_caching` a
        request takes over the full blocks at the beginning of its prompt that an earlier one has
        computed; with `prefixes_by_seed` only one of the same seed.
        """
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.allocator = BlockAllocator(num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_cache = PrefixCacheStats() if prefix_caching else None
        self._prefixes_by_seed = prefixes_by_seed
        self._prefix_epoch = 0
        self._save_cache = save_cache
        self._num_rows = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request; refuse one that could not run even alone."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise `CapacityError` with the numbers if a request could not run even alone."""
        needed = blocks_for(request.max_cached_tokens, self.block_size)
        if needed > self.allocator.num_blocks:
            prompt = len(request.prompt_token_ids)
            raise CapacityError(
                f"request {request.request_id} can never fit: {prompt} prompt tokens and "
                f"{request.max_total_tokens - prompt} new ones need {needed} blocks of "
                f"{self.block_size} tokens, the cache has {self.allocator.num_blocks}; "
                "lower max_tokens or raise kv_cache_memory_bytes"
            )

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def has_newcomers(self) -> bool:
        """Whether a prompt is being computed, or somebody waits for whom there is a row."""
        if self.waiting and self._free_rows:
            return True
        prefilling = Status.PREFILLING
        return any([request.status is prefilling for request in self.running])

    def reserve(self, requests: Sequence[Request], count: int) -> bool:
        """Give each request memory for `count` more tokens, or for as many as it may ever cache;
        return False if there is too little. Nobody is preempted for it."""
        for request in requests:
            wanted = min(request.num_tokens + count, request.max_cached_tokens)
            if wanted > request.capacity and not self._grow(request, wanted):
                return False
        return True

    def decode_batch(self) -> list[Request]:
        """Return the requests that run a round in this step, in the order of arrival, each with
        memory for its next token.

        Where memory is short, what was meant for drafts is taken back, and then the newest give up
        theirs; so this is the batch that speculation is planned for: none of them is preempted any
        more before it has run.
        """
        batch: list[Request] = []
        decoding = Status.DECODING
        candidates = [request for request in self.running if request.status is decoding]
        short = [request for request in candidates if request.num_tokens > request.capacity]
        if all(self._grow(request, request.num_tokens) for request in short):
            return candidates
        for request in candidates:
            if request.status is not decoding:  # preempted for an earlier one
                continue
            if request.num_tokens <= request.capacity:
                batch.append(request)
                continue
            while not self._grow(request, request.num_tokens):
                if self._take_back_spare_blocks():
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                batch.append(request)
        return batch

    def schedule(self, decode: list[Request], num_speculative_tokens: int) -> Schedule:
        """Complete the work of a step whose `decode_batch` runs `num_speculative_tokens` drafts.

        Drafts get the memory that is free: nobody is preempted for them, so the last of them may
        find none (`Request.capacity`). Decoding comes first and prefill gets what it leaves of
        `max_num_batched_tokens`, but never less than a block, so that a full decode batch cannot
        starve newcomers.
        """
        step = Schedule(decode=decode)
        if num_speculative_tokens:
            k = num_speculative_tokens
            for request in [r for r in decode if r.num_tokens + k > r.capacity]:
                self._grow_for_drafts(request, k)
        rows = num_speculative_tokens + 1
        least = min(self.block_size, self.max_num_batched_tokens)
        step.budget = max(self.max_num_batched_tokens - rows * len(decode), least)
        prefilling = Status.PREFILLING
        for request in [request for request in self.running if request.status is prefilling]:
            self._add_chunk(step, request)
        self._admit(step, num_speculative_tokens)
        return step

    def admit(self, budget: int, num_speculative_tokens: int) -> list[PrefillChunk]:
        """Let in who waits while a round with so many drafts is under way, as far as rows, memory
        and `budget` tokens go; return what is to be computed of their prompts."""
        step = Schedule(budget=budget)
        self._admit(step, num_speculative_tokens)
        return step.prefill

    def finish(self, request: Request) -> None:
        """Take a request out, whatever its status, and free what it holds."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is not Status.FINISHED:
            self.running.remove(request)
            self._release(request)
        request.saved_cache = None
        request.status = Status.FINISHED

    def note_computed(self, request: Request, num_tokens: int) -> None:
        """Take note that the first `num_tokens` tokens of a request are computed at full depth, in
        every plane; call it once that is known to have gone well."""
        request.num_computed = num_tokens
        if request.prefix_epoch != self._prefix_epoch or request.block_hashes is None:
            return
        full = min(num_tokens // self.block_size, len(request.block_hashes))
        for place in range(request.num_published, full):
            self.allocator.publish(request.blocks[place], request.block_hashes[place])
        request.num_published = max(request.num_published, full)

    def forget_prefixes(self) -> None:
        """Give no computed prompt to later requests: those of today may not be sound. What runs
        keeps what it has, and publishes nothing any more."""
        self.allocator.forget()
        self._prefix_epoch += 1

    @contextlib.contextmanager
    def alone(self, request: Request) -> Iterator[None]:
        """Let only `request` take part in steps for a while; the others keep their places and what
        they hold."""
        running, waiting = self.running, self.waiting
        is_running = request in running
        self.running = [request] if is_running else []
        self.waiting = deque() if is_running else deque([request])
        try:
            yield
        finally:
            left, queued = self.running, self.waiting
            others = [r for r in running if r is not request]
            at = running.index(request) if is_running else len(running)
            self.running = others[:at] + left + others[at:]
            self.waiting = queued + deque(r for r in waiting if r is not request)

    def drop(self, requests: Collection[Request]) -> None:
        """Take requests out in whatever state an interruption left them.

        Free blocks and rows are worked out anew from what the others hold, so that nothing is lost
        even if the interruption came in the middle of the books.
        """
        for request in requests:
            request.status = Status.FINISHED
            request.blocks, request.capacity, request.row = [], 0, -1
            request.num_table_blocks, request.saved_cache = 0, None
        self.waiting = deque(r for r in self.waiting if r.status is Status.WAITING)
        self.running = [r for r in self.running if r.status is not Status.FINISHED]
        held = [block for request in self.running for block in request.blocks]
        self._prefix_epoch += 1  # the books of the prefixes may be in the middle of something too
        self.allocator = BlockAllocator(self.allocator.num_blocks, held)
        rows = {request.row for request in self.running}
        self._free_rows = [row for row in range(self._num_rows - 1, -1, -1) if row not in rows]

    def _admit(self, step: Schedule, num_speculative_tokens: int) -> None:
        """Let in who waits, in the order of arrival, as far as rows, memory and budget go.

        Who could soon take over what another is just computing is held back; rows and memory are
        left for those, so that nobody overtakes them for more than a step.
        """
        held: list[Request] = []
        kept_free = 0
        try:
            while self.waiting and len(self._free_rows) > len(held) and step.budget > 0:
                request = self.waiting[0]
                # With room for its first round too: it would be preempted at once for want of it,
                # and a victim would take back the memory that it has just given.
                tokens = request.num_tokens + 1 + num_speculative_tokens
                found = self._find_prefix(request)
                wanted = blocks_for(request.num_tokens, self.block_size)
                room = blocks_for(min(tokens, request.max_cached_tokens), self.block_size)
                if self._is_being_computed(request, len(found)):
                    held.append(self.waiting.popleft())
                    kept_free += room
                    continue
                spare = room - wanted + kept_free
                # Each row has a part of the cache where its request grows in one piece.
                home = 1 + self._free_rows[-1] * (self.allocator.num_blocks // self._num_rows)
                blocks = self.allocator.claim(found, wanted - len(found), spare, home)
                if blocks is None:
                    return
                request.blocks, request.capacity = blocks, len(blocks) * self.block_size
                request.is_one_piece = _is_one_piece(blocks)
                self._start_from_prefix(request, len(found))
                self.waiting.popleft()
                request.row = self._free_rows.pop()
                self.running.append(request)
                if request.saved_cache is not None:
                    request.status = Status.DECODING
                    continue
                request.status = Status.PREFILLING
                self._add_chunk(step, request)
        finally:
            self.waiting.extendleft(reversed(held))

    def _is_being_computed(self, request: Request, num_found: int) -> bool:
        """Tell whether somebody computes now most of what is missing of a prompt, so that waiting
        for it is the shorter way. It ends when they have computed it, or are gone."""
        hashes = request.block_hashes
        if self.prefix_cache is None or request.saved_cache is not None or hashes is None:
            return False
        # Hashes are of the prompt; who was preempted has to compute its output too.
        most = min((request.num_tokens - 1) // self.block_size, len(hashes))
        missing = request.num_tokens - num_found * self.block_size
        for other in self.running:
            theirs = other.block_hashes
            if other.status is not Status.PREFILLING or theirs is None:
                continue
            if other.prefix_epoch != self._prefix_epoch or other.num_published > num_found:
                continue
            common = num_found
            while common < min(most, len(theirs)) and theirs[common] == hashes[common]:
                common += 1
            if 3 * (common - num_found) * self.block_size >= 2 * missing:
                return True
        return False

    def _find_prefix(self, request: Request) -> list[int]:
        """Return computed blocks for the beginning of a prompt; at least one token is left to
        compute, for the logits of the next."""
        if self.prefix_cache is None or request.saved_cache is not None:
            return []
        if request.block_hashes is None:
            seed = request.seed if self._prefixes_by_seed else None
            request.block_hashes = hash_blocks(request.prompt_token_ids, self.block_size, seed)
        most = (request.num_tokens - 1) // self.block_size
        return self.allocator.find(request.block_hashes[:most])

    def _start_from_prefix(self, request: Request, num_blocks: int) -> None:
        if self.prefix_cache is None or request.saved_cache is not None:
            return
        request.num_computed = num_blocks * self.block_size
        request.num_published = num_blocks
        request.prefix_epoch = self._prefix_epoch
        if not request.metrics.num_preemptions:
            request.num_cached_tokens = request.num_computed
            self.prefix_cache.num_queries += len(request.prompt_token_ids)
            self.prefix_cache.num_hits += request.num_computed

    def _add_chunk(self, step: Schedule, request: Request) -> None:
        stop = min(request.num_tokens, request.num_computed + step.budget)
        if stop > request.num_computed:
            step.prefill.append(PrefillChunk(request, request.num_computed, stop))
        step.budget -= stop - request.num_computed

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give `request` blocks for `num_tokens` tokens; False if there are too few."""
        missing = blocks_for(num_tokens, self.block_size) - len(request.blocks)
        if missing > 0:
            last = request.blocks[-1]
            blocks = self.allocator.allocate(missing, last + 1)
            if blocks is None:
                return False
            request.is_one_piece &= _is_one_piece([last, *blocks])
            request.blocks += blocks
        request.capacity = len(request.blocks) * self.block_size
        return True

    def _grow_for_drafts(self, request: Request, count: int) -> None:
        """Give `request` blocks for `count` more tokens, as many as are free."""
        wanted = min(request.num_tokens + count, request.max_cached_tokens)
        free = self.allocator.num_free * self.block_size
        self._grow(request, min(wanted, request.capacity + free))

    def _take_back_spare_blocks(self) -> bool:
        """Free what only drafts would have used; return whether there was anything."""
        found = False
        for request in self.running:
            needed = blocks_for(request.num_tokens, self.block_size)
            spare = request.blocks[needed:]
            if spare:
                request.blocks = request.blocks[:needed]
                request.capacity = needed * self.block_size
                request.num_table_blocks = 0  # the table names blocks that are no longer its own
                self.allocator.free(spare)
                found = True
        return found

    def _preempt(self, request: Request) -> None:
        """Take a request's memory; it keeps its tokens and computes them again when there is
        room, unless its cache is saved."""
        self.running.remove(request)
        if self._save_cache is not None and request.status is Status.DECODING:
            if request.saved_cache is None:  # else it was not put back yet
                request.saved_cache = self._save_cache(request)
        else:
            request.num_computed = 0
        self._release(request)
        request.status = Status.WAITING
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.allocator.free(request.blocks)
        request.blocks, request.capacity = [], 0
        request.num_table_blocks = 0
        self._free_rows.append(request.row)
        request.row = -1


def _is_one_piece(blocks: Sequence[int]) -> bool:
    """Whether each block lies behind the one before it."""
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))
