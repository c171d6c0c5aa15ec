"""`LLM`: a model ready to generate."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from looped_spec.adapter import ModelAdapter
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.explain import Explanation
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import UnsupportedError
from looped_spec.layers.native import use_kernels
from looped_spec.loading import ModelOrigin, load_adapter
from looped_spec.options import EngineOptions
from looped_spec.presets.lookup import PresetChoice
from looped_spec.presets.match import RunIdentity
from looped_spec.runtime.assembly import engine_stats, make_engine
from looped_spec.runtime.attention import AttentionChoice, AttentionNeeds, choose_attention
from looped_spec.runtime.checked_prompts import CheckedPrompt, check_prompts, no_tokenizer
from looped_spec.runtime.cost_estimate import with_estimated_cost
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.fused import choose_fused
from looped_spec.runtime.graphs import linear_layout, padded_sizes, reachable_shapes
from looped_spec.runtime.identity import run_identity
from looped_spec.runtime.kernels import choose_kernels
from looped_spec.runtime.linears import arrange_linears, check_linears
from looped_spec.runtime.outputs import RequestOutput, StreamChunk
from looped_spec.runtime.policy import SpeculationPolicy
from looped_spec.runtime.preset_use import find_preset, preset_config
from looped_spec.runtime.prompts import Prompts
from looped_spec.runtime.request import Request
from looped_spec.runtime.run_plan import RunPlan, plan_run
from looped_spec.runtime.speculation import (
    Speculation,
    check_config,
    complete_candidate,
    default_config,
)
from looped_spec.runtime.threads import set_threads
from looped_spec.sampling_params import SamplingParams
from looped_spec.tokenization import (
    IncrementalDetokenizer,
    Tokenizer,
    load_tokenizer,
    stop_token_ids,
)

logger = logging.getLogger(__name__)


class LLM:
    """A looped model with its cache and engine.

    Args:
        model: `demo:<name>`, a local folder, or a hub id.
        **options: see `looped_spec.options.EngineOptions`; an unknown one is an error.

    Raises:
        ConfigError: an option is unknown or out of range.
        PluginError: no adapter takes the model, or the one that does is broken or lacks its extra.
        ModelLoadError: the checkpoint cannot be read or does not fit its adapter.
        UnsupportedError: the model enables something that its adapter does not implement.
        CapacityError: the memory given holds no sequence of the length asked for.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.options = EngineOptions.from_kwargs(options)
        opts = self.options
        plans: list[tuple[RunPlan, AttentionChoice, RunIdentity]] = []

        def check(
            adapter: ModelAdapter, origin: ModelOrigin, device: torch.device, dtype: torch.dtype
        ) -> None:
            kernels = choose_kernels(opts, device, dtype)
            fused = choose_fused(opts, device)

            def identity(full_loops: int) -> RunIdentity:
                return run_identity(
                    opts, adapter, origin, device, dtype, full_loops, kernels, fused
                )

            def find(full_loops: int) -> PresetChoice:
                return find_preset(opts, identity(full_loops), origin.spec.preset_package)

            plan = plan_run(opts, adapter, find)
            needs = AttentionNeeds.of(opts, adapter.kv_planes(plan.full_loops), device, dtype)
            use_kernels(adapter.module, fused or kernels)
            choice = choose_attention(opts.attention_backend, needs, kernels)
            choice.backend.fused = fused
            plans.append((plan, choice, identity(plan.full_loops)))
            check_linears(opts.cpu_linear, device)

        self.loaded = load_adapter(
            model if isinstance(model, str) else Path(model),
            device=opts.device,
            dtype=opts.dtype,
            load_format=opts.load_format,
            adapter_options=opts.adapter_options,
            seed=opts.seed,
            revision=opts.revision,
            check=check,
        )
        ((plan, attention, self.identity),) = plans
        set_threads(opts.num_threads, self.loaded)
        self.linears = arrange_linears(
            self.loaded.adapter.module,
            linear_layout(opts),
            use_native=self.identity.cpu_kernels == "native",
        )
        self.full_loops, self.preset = plan.full_loops, plan.preset
        self._lock = threading.RLock()  # calls from several threads take turns, step by step
        self._tokenizer = load_tokenizer(self.loaded.folder)
        stops = stop_token_ids(
            self.loaded.config,
            self.loaded.generation_config,
            self._tokenizer,
            self.loaded.adapter.ignored_stop_token_ids,
        )
        self.stop_token_ids = tuple(sorted({*stops, *self.loaded.adapter.extra_stop_token_ids}))
        self._plan, self._attention = plan, attention
        self.engine = self.another_engine()
        self.max_model_len = self.engine.max_model_len
        self._use(plan.speculation)

    @property
    def speculation(self) -> Candidate:
        """The (K, d) of the newest round; before the first, what a lone request starts from."""
        policy = self.engine.policy
        if isinstance(policy, StaticPolicy):
            return policy.candidate
        newest = self.engine.newest_candidate
        if newest is not None or not isinstance(policy, AdaptiveController):
            return newest or PLAIN
        first = policy.config.buckets[0]
        return first.candidates[first.initial]

    def set_speculation(self, num_speculative_tokens: int, draft_loops: int | None = None) -> None:
        """Use another (K, d) from the next round on; moves no tensors and changes no text.

        `draft_loops` left out is what the model family suggests.
        """
        if num_speculative_tokens:
            self._refuse_with_early_exit()
        self._use(
            complete_candidate(
                num_speculative_tokens, draft_loops, self.loaded.adapter, self.full_loops
            )
        )

    def set_adaptive_speculation(
        self, config: AdaptiveSpecConfig | None = None, *, policy: str = "goodput"
    ) -> None:
        """Choose (K, d) anew for each round from the next one on, having learnt nothing yet.

        `config` left out is what the preset says and suits the model, with `policy` to choose.
        """
        self._refuse_with_early_exit()
        max_num_seqs = self.options.max_num_seqs
        if config is None:
            adapter = self.loaded.adapter
            config = preset_config(self.preset, adapter, max_num_seqs, policy) or default_config(
                adapter, self.full_loops, max_num_seqs, policy
            )
        self._use(check_config(config, self.full_loops, max_num_seqs))

    @property
    def policy(self) -> SpeculationPolicy:
        """Who chooses (K, d); setting it back to an earlier one goes on with what that had
        learnt."""
        return self.engine.policy

    @policy.setter
    def policy(self, policy: SpeculationPolicy) -> None:
        candidates: Collection[Candidate] = ()
        config = self._config_of(policy)
        if config is not None:
            candidates = config.candidates
        with self._lock:
            if config is not None and self.engine.runner.graphs.is_active:
                self._capture(config)
            self.engine.policy, self.engine.candidates = policy, frozenset(candidates)
            self.engine.newest_candidate = None

    def explain(self) -> Explanation:
        """Return what would run now at each batch size, and why; `str()` of it is for reading."""
        policy = self.engine.policy
        if not isinstance(policy, AdaptiveController):
            policy = AdaptiveController(self._pinned(self.speculation))
        explanation = policy.explain()
        if self.preset.preset is None:
            return explanation
        return dataclasses.replace(explanation, notes=(*explanation.notes, self.preset.line))

    def _config_of(self, policy: SpeculationPolicy) -> AdaptiveSpecConfig | None:
        """Return what a policy chooses from, None if it is one of somebody else's."""
        if isinstance(policy, StaticPolicy):
            return self._pinned(policy.candidate)
        return policy.config if isinstance(policy, AdaptiveController) else None

    def _pinned(self, candidate: Candidate) -> AdaptiveSpecConfig:
        return AdaptiveSpecConfig.pinned(candidate, self.full_loops, self.options.max_num_seqs)

    def _graph_sizes(self, config: AdaptiveSpecConfig) -> tuple[int, ...]:
        """Return the batch sizes that captured rounds are padded to under a configuration."""
        given = self.options.cudagraph_capture_sizes or config.padded_batch_sizes
        return padded_sizes(self.options.max_num_seqs, given)

    def _capture(self, config: AdaptiveSpecConfig) -> None:
        """Capture what can be run under a configuration and is not captured yet."""
        runner, sizes = self.engine.runner, self._graph_sizes(config)
        runner.graphs.pad_to(sizes)
        runner.capture(reachable_shapes(config, sizes))

    def _use(self, speculation: Speculation) -> None:
        """Let the engine run the same (K, d) always, or what a new controller chooses."""
        if isinstance(speculation, Candidate):
            self.policy = StaticPolicy(speculation)
            return
        loaded = self.loaded
        config = with_estimated_cost(speculation, loaded.adapter, loaded.dtype, loaded.device)
        config = dataclasses.replace(
            config, shadow_depths_available=self.engine.runner.can_read_shadows
        )
        if self.engine.runner.graphs.is_active:  # costs are those of the padded batch
            config = dataclasses.replace(config, padded_batch_sizes=self._graph_sizes(config))
        self.policy = AdaptiveController(config)

    def _refuse_with_early_exit(self) -> None:
        if self.options.early_exit:
            raise UnsupportedError("early exit cannot be combined with speculation")

    def another_engine(self) -> Engine:
        """Return another engine over the same weights, with its own cache; it decodes plainly."""
        parts = (self.options, self.loaded, self._plan, self._attention)
        return make_engine(*parts, self.stop_token_ids)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raise `ConfigError` if the model folder has none."""
        if self._tokenizer is None:
            raise no_tokenizer(self.loaded.name)
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
        checked = self._check(prompts, sampling_params)
        requests: list[Request] = []
        with _progress(len(checked), use_tqdm) as bar:
            for running in self._run(checked, requests):
                bar.update(sum(request.finish_reason is not None for request in running))
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete prompts and yield new text as it is committed.

        A wrong call is refused at once; work begins when the iterator is first read, and closing it
        aborts the rest.
        """
        checked = self._check(prompts, sampling_params)
        return self._stream(checked)

    def _stream(self, checked: Sequence[CheckedPrompt]) -> Iterator[StreamChunk]:
        requests: list[Request] = []
        for running in self._run(checked, requests):
            with self._lock:
                index = {request.request_id: number for number, request in enumerate(requests)}
                news = [(request, *request.take_new()) for request in running]
            for request, text, tokens in news:
                if tokens:
                    number = index[request.request_id]
                    yield StreamChunk(number, text, tokens, request.finish_reason)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, rendered by the model's own chat template.

        `messages` are mappings with `role` and `content`; `chat_template_kwargs` are variables of
        the template, such as `enable_thinking`.
        """
        prompt = self.get_tokenizer().apply_chat_template(messages, **(chat_template_kwargs or {}))
        return self.generate(prompt, sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Let later requests compute all of their prompts; what runs is left alone."""
        with self._lock:
            self.engine.scheduler.forget_prefixes()

    def stats(self) -> dict[str, Any]:
        """Return the engine's counts since it was made, and what chooses (K, d) and why."""
        policy = self.policy
        return engine_stats(self.engine) | {
            "preset": self.preset.as_dict(),
            "speculation": self.explain().as_dict(),
            "controller": (
                policy.stats().as_dict() if isinstance(policy, AdaptiveController) else None
            ),
        }

    def _run(
        self, checked: Sequence[CheckedPrompt], requests: list[Request]
    ) -> Iterator[list[Request]]:
        """Queue every prompt, appending to `requests`, and step until all are finished; after each
        step yield those that were not before it.

        On any failure or Ctrl-C what is left of them is dropped. Another call that runs meanwhile
        (two streams read in turn, another thread) may have stepped for these requests already.
        """
        try:
            with self._lock:
                for one in checked:
                    requests.append(self._make_request(one))
                for request in requests:
                    self.engine.scheduler.add(request)
            running = list(requests)
            while running:
                with self._lock:
                    if all(request.finish_reason is None for request in running):
                        self.engine.step()
                    unfinished = [r for r in running if r.finish_reason is None]
                yield running
                running = unfinished
        finally:
            with self._lock:
                left = [request for request in requests if request.finish_reason is None]
                if left:
                    self.engine.drop(left)

    def _check(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[CheckedPrompt]:
        vocab_size = self.loaded.adapter.geometry.vocab_size
        return check_prompts(
            prompts, sampling_params, self._tokenizer, vocab_size, self.loaded.name
        )

    def _make_request(self, one: CheckedPrompt) -> Request:
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=one.params.skip_special_tokens
            )
        return self.engine.make_request(
            one.tokens, one.params, prompt=one.text, detokenizer=detokenizer
        )


def _progress(total: int, wanted: bool) -> tqdm[Any]:
    """Return a progress bar, without one where there is nothing to draw it on."""
    try:
        return tqdm(total=total, desc="Requests", disable=not wanted or sys.stderr is None)
    except (OSError, ValueError):  # a closed or full stderr
        return tqdm(total=total, disable=True)


_model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str")
LLM.__signature__ = EngineOptions.signature(_model)  # type: ignore[attr-defined]
