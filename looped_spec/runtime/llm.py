"""`LLM`: a model ready to generate."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from looped_spec.control.plan import Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.loading import load_adapter
from looped_spec.options import EngineOptions
from looped_spec.runtime.attention import make_backend
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.runtime.outputs import RequestOutput, StreamChunk
from looped_spec.runtime.request import Request
from looped_spec.runtime.run_plan import RunPlan, plan_run
from looped_spec.runtime.runner import ModelRunner
from looped_spec.runtime.scheduler import Scheduler
from looped_spec.runtime.sizing import size_cache
from looped_spec.sampling_params import SamplingParams
from looped_spec.tokenization import (
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
    stop_token_ids,
)

logger = logging.getLogger(__name__)

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A looped model with its cache and engine.

    Args:
        model: `demo:<name>`, a local folder, or a hub id.
        **options: see `looped_spec.options.EngineOptions`; an unknown one is an error.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelLoadError: the checkpoint cannot be read or does not fit its adapter.
        UnsupportedError: the model enables something that its adapter does not implement.
        CapacityError: the memory given holds no sequence of the length asked for.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options = EngineOptions.from_kwargs(options)
        opts = self.options
        backend = make_backend(opts.attention_backend)
        self.loaded = load_adapter(
            model,
            device=opts.device,
            dtype=opts.dtype,
            load_format=opts.load_format,
            adapter_options=opts.adapter_options,
            seed=opts.seed,
            revision=opts.revision,
            check=lambda adapter: plan_run(opts, adapter),
        )
        adapter = self.loaded.adapter
        plan = plan_run(opts, adapter)
        self.full_loops, self._candidate = plan.full_loops, plan.candidate
        size = size_cache(opts, adapter, self.full_loops, self.loaded.dtype, self.loaded.device)
        self.max_model_len = size.max_model_len
        logger.info(
            "%s: %d loops, cache of %d tokens in %d blocks (%.0f MiB), %s",
            self.loaded.name,
            self.full_loops,
            size.num_blocks * opts.block_size,
            size.num_blocks,
            size.num_bytes / 2**20,
            _how(plan),
        )
        pool = KVPool(
            adapter.kv_planes(self.full_loops),
            size.num_blocks,
            opts.block_size,
            self.loaded.dtype,
            self.loaded.device,
        )
        runner = ModelRunner(
            adapter,
            pool,
            backend,
            full_loops=self.full_loops,
            max_num_seqs=opts.max_num_seqs,
            max_model_len=self.max_model_len,
            device=self.loaded.device,
            exit_rule=plan.exit_rule,
        )
        scheduler = Scheduler(
            size.num_blocks,
            opts.block_size,
            opts.max_num_seqs,
            opts.max_num_batched_tokens,
            # Computing a prompt again at full depth would undo the exits of the tokens behind it.
            save_cache=runner.save_cache if plan.exit_rule else None,
        )
        self._tokenizer = load_tokenizer(self.loaded.folder)
        self.engine = Engine(
            runner,
            scheduler,
            StaticPolicy(plan.candidate),
            max_model_len=self.max_model_len,
            eos_token_ids={
                *stop_token_ids(self.loaded.config, self.loaded.generation_config, self._tokenizer),
                *adapter.extra_stop_token_ids,
            },
            seed=opts.seed,
        )

    @property
    def speculation(self) -> Candidate:
        """The (K, d) that the next round runs."""
        return self._candidate

    def set_speculation(self, num_speculative_tokens: int, draft_loops: int = 0) -> None:
        """Use another (K, d) from the next round on; moves no tensors and changes no text."""
        if num_speculative_tokens and self.options.early_exit:
            raise UnsupportedError("early exit cannot be combined with speculation")
        candidate = Candidate(num_speculative_tokens, draft_loops).check(self.full_loops)
        self._candidate = candidate
        self.engine.policy = StaticPolicy(candidate)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raise `ConfigError` if the model folder has none."""
        if self._tokenizer is None:
            raise ConfigError(
                f"{self.loaded.name} has no tokenizer files: give prompts as lists of token ids"
            )
        return self._tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts and return the results in their order.

        Args:
            prompts: a text or a list of token ids, or a list of either.
            sampling_params: one for all, or one per prompt; the defaults of `SamplingParams` if
                None.
            use_tqdm: show a progress bar.

        Raises:
            ConfigError: a prompt is empty or holds an unknown token id; nothing was run.
            CapacityError: a prompt can never fit; nothing was run.
        """
        requests = self._submit(prompts, sampling_params)
        with tqdm(total=len(requests), desc="Requests", disable=not use_tqdm) as bar:
            for running in self._run(requests):
                bar.update(sum(request.finish_reason is not None for request in running))
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete prompts and yield new text as it is committed; closing the iterator aborts the
        rest."""
        requests = self._submit(prompts, sampling_params)
        index = {request.request_id: number for number, request in enumerate(requests)}
        for running in self._run(requests):
            for request in running:
                text, tokens = request.take_new()
                if tokens:
                    number = index[request.request_id]
                    yield StreamChunk(number, text, tokens, request.finish_reason)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, rendered by the model's own chat template.

        `messages` are mappings with `role` and `content`; `template_options` are variables of the
        template, such as `enable_thinking`.
        """
        prompt = self.get_tokenizer().apply_chat_template(messages, **template_options)
        return self.generate(prompt, sampling_params, use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts since it was made."""
        metrics, scheduler = self.engine.metrics, self.engine.scheduler
        return {
            "num_rounds": metrics.num_rounds,
            "num_loop_rows": metrics.num_loop_rows,
            "loops_per_round": metrics.loops_per_round,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "draft_acceptance_rate": metrics.draft_acceptance_rate,
            "acceptance_by_position": metrics.acceptance_by_position,
            "num_preemptions": scheduler.num_preemptions,
            "num_free_blocks": scheduler.allocator.num_free,
            "num_blocks": scheduler.allocator.num_blocks,
        }

    def _run(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Step until `requests` are finished, and yield those that were not before each step.

        On any failure or Ctrl-C what is left of them is aborted. Another call that runs meanwhile
        (two streams read in turn) may have stepped for these requests already.
        """
        running = list(requests)
        try:
            while running:
                if all(request.finish_reason is None for request in running):
                    self.engine.step()
                unfinished = [request for request in running if request.finish_reason is None]
                yield running
                running = unfinished
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort(request)

    def _submit(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        items = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = list(sampling_params)
            if len(params) != len(items):
                raise ConfigError(
                    f"sampling_params must be one, or one per prompt: got {len(params)} for "
                    f"{len(items)} prompts"
                )
        encoded = [self._encode(number, item) for number, item in enumerate(items)]
        requests: list[Request] = []
        try:
            for item, token_ids, param in zip(items, encoded, params, strict=True):
                requests.append(self._add(item, token_ids, param))
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return requests

    def _add(self, item: str | list[int], token_ids: list[int], params: SamplingParams) -> Request:
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        elif params.stop_strings:
            raise ConfigError("stop strings need a tokenizer, and this model folder has none")
        return self.engine.add_request(
            token_ids,
            params,
            prompt=item if isinstance(item, str) else None,
            detokenizer=detokenizer,
        )

    def _encode(self, number: int, item: str | list[int]) -> list[int]:
        token_ids = self.get_tokenizer().encode(item) if isinstance(item, str) else item
        if not token_ids:
            raise ConfigError(f"prompt {number} is empty: give at least one token")
        vocab_size = self.loaded.adapter.geometry.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"prompt {number}: token id must be between 0 and {vocab_size - 1}, "
                    f"got {token_id}"
                )
        return token_ids


def _how(plan: RunPlan) -> str:
    if plan.exit_rule is not None:
        rule = plan.exit_rule
        return f"early exit by {rule.criterion} at {rule.threshold:g}"
    k, d = plan.candidate.num_speculative_tokens, plan.candidate.draft_loops
    return f"speculation K={k} d={d}" if k else "speculation off"


def _as_list(prompts: Prompts) -> list[str | list[int]]:
    """Return prompts one by one, each a text or a list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[object] = list(prompts)
    alone = _as_tokens(items)
    if alone:
        return [alone]
    result: list[str | list[int]] = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            result.append(item)
            continue
        tokens = _as_tokens(item) if isinstance(item, Sequence) else None
        if tokens is None:
            raise ConfigError(
                f"prompt {number} must be a text or a list of token ids, got {type(item).__name__}"
            )
        result.append(tokens)
    return result


def _as_tokens(items: Sequence[object]) -> list[int] | None:
    """Return token ids if that is what all of `items` are."""
    tokens = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    return tokens if len(tokens) == len(items) else None


_model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str")
LLM.__signature__ = EngineOptions.signature(_model)  # type: ignore[attr-defined]
