"""The options of `LLM`, once: the Python signature, the checks and the command-line flags all come
from here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from looped_spec.control.config import POLICIES, AdaptiveSpecConfig
from looped_spec.control.plan import MAX_SPECULATIVE_TOKENS
from looped_spec.errors import (
    ConfigError,
    UnsupportedError,
    check_int,
    closest,
    is_number,
    reject_unknown,
    shown_number,
)

CPU_LINEARS = (
    "auto",
    "plain",
    "transposed",
    "onednn",
    "exact_fp16",
    "native_bf16",
    "native_fp32",
)
FUSED = ("auto", "on", "off")
GRAPH_BACKENDS = ("auto", "cuda", "traced", "eager")
CPU_KERNELS = ("torch", "native", "auto")

ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "varlen", "sdpa")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine; what each means is its help text, `EngineOptions.help_texts()`."""

    device: str = _option("auto", "cpu, cuda, cuda:N, or auto: CUDA where there is one")
    dtype: str = _option(
        "auto",
        "float32, bfloat16, float16, or auto: that of the checkpoint on CUDA, float32 on the CPU",
    )
    num_threads: int | None = _option(
        None,
        "CPU threads of PyTorch; default: 1 for a model too small to gain from more, else as it is",
    )
    num_speculative_tokens: int | None = _option(
        None,
        "K, tokens drafted per round, the same in every round; 0 turns speculation off; default: "
        "K and d are chosen anew for each round, by load and text",
    )
    draft_loops: int | None = _option(
        None, "d, loops per drafted token, 1 to full_loops - 1; default: what the model suggests"
    )
    full_loops: int | None = _option(
        None, "D, loops of the target for every token; default: the depth the model was trained for"
    )
    exit_threshold: float | None = _option(
        None,
        "early exit: a token takes no further loop once its score reaches this; the scale is that "
        "of the criterion; not together with speculation",
    )
    exit_criterion: str | None = _option(
        None, "early exit: the model family's score to use; default: its first"
    )
    min_loops: int | None = _option(None, "early exit: least loops per token; default: 1")
    max_loops: int | None = _option(None, "early exit: most loops per token; default: full_loops")
    policy: str | None = _option(
        None,
        "who chooses K and d: goodput (most expected tokens per second), ema (thresholds of "
        "acceptance) or static (the same in every round); default: static where K is given, else "
        "goodput",
    )
    speculative_adaptive: bool | None = _option(
        None,
        "choose K and d anew for each round, even for a model that suggests no speculation; False "
        "keeps what the model suggests",
    )
    speculative_adaptive_config: AdaptiveSpecConfig | Mapping[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "what may be chosen and how: an AdaptiveSpecConfig, or the JSON of one as a "
            "dict or a file"
        },
    )
    speculative_config: Mapping[str, Any] | str | None = _option(
        None,
        "the same in vLLM's form, a dict or its JSON: num_speculative_tokens, draft_loops, and "
        "num_speculative_tokens_per_batch_size with entries [start, end, K] or [start, end, K, d]",
    )
    preset: str = _option(
        "auto",
        "what was measured before: a preset's file or name, none, or auto: the one of this model "
        "and device, else the nearest as no more than a prior; not looked at where other options "
        "say what runs",
    )
    max_num_seqs: int = _option(32, "most requests that run at once")
    max_model_len: int | None = _option(
        None, "most tokens of prompt and output; default: the model's limit, or what memory holds"
    )
    max_num_batched_tokens: int = _option(
        2048, "most prompt tokens computed in one step, less those that decode"
    )
    enable_prefix_caching: bool | None = _option(
        None,
        "let a request take over what an earlier one has computed of the same beginning of a "
        "prompt, in whole blocks; default: in a server, not elsewhere",
    )
    block_size: int | None = _option(
        None,
        "tokens per block of the key/value cache; default: what the attention backend suits, 16 or "
        "256",
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "bytes for the key/value cache; default: 0.85 of free GPU memory, or a quarter of the RAM",
    )
    attention_backend: str = _option(
        "auto", f"{', '.join(ATTENTION_BACKENDS[:-1])} or {ATTENTION_BACKENDS[-1]}"
    )
    attention_num_splits: int = _option(
        0,
        "parts that a GPU reads a long context in at once; 0 lets the attention backend choose, 1 "
        "keeps a row's attention independent of how many requests share its batch",
    )
    cpu_linear: str = _option(
        "auto",
        "how linear layers keep their weights on the CPU: plain, transposed, onednn (prepacked), "
        "exact_fp16 (stored in half precision where that rounds nothing, computed in float32), "
        "native_bf16 (the same by a kernel of our own, for the numbers of bfloat16), native_fp32 "
        "(that kernel for any float32), or auto: what is fastest, measured for each shape at load; "
        "kernels of our own where cpu_kernels has them",
    )
    cpu_kernels: str = _option(
        "torch",
        "what computes norms, rotations, activations and attention on the CPU in float32: torch, "
        "native (kernels of our own, compiled once by this machine's C compiler), or auto: native "
        "where that works",
    )
    fused: str = _option(
        "auto",
        "small kernels in Triton for norms, rotations, activations and cache writes on CUDA: on, "
        "off, or auto: off, until it is measured where they pay",
    )
    enforce_eager: bool = _option(
        False, "run every round as it comes instead of capturing rounds once per shape"
    )
    graph_backend: str = _option(
        "auto",
        "cuda (CUDA graphs), traced (the same on any device, for tests), eager (none), or auto: "
        "cuda on a CUDA device, without early exit",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = _option(
        None,
        "batch sizes that captured rounds are padded to; default: 1, 2, 4, 8, then steps of 8 up "
        "to max_num_seqs",
    )
    graph_memory_bytes: int | None = _option(
        None,
        "GPU memory that captured rounds may take, those beyond it run eagerly; default: half of "
        "what is free when they are captured",
    )
    async_scheduling: bool = _option(
        False, "submit a round before the one ahead of it is read, where its requests go on"
    )
    load_format: str = _option("auto", "auto reads the checkpoint, dummy makes random weights")
    seed: int = _option(
        0,
        "of dummy weights, and what the seeds of requests that bring none are derived from",
    )
    revision: str | None = _option(None, "branch, tag or commit of a hub model")
    adapter_options: Mapping[str, Any] | None = _option(None, "options of the model family")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_threads", 1, 2**10),
            ("max_num_seqs", 1, 2**16),
            ("max_model_len", 2, 2**31),
            ("max_num_batched_tokens", 1, 2**31),
            ("block_size", 1, 2**16),
            ("kv_cache_memory_bytes", 1, 2**50),
            ("attention_num_splits", 0, 32),
            ("graph_memory_bytes", 0, 2**50),
            ("num_speculative_tokens", 0, MAX_SPECULATIVE_TOKENS),
            ("draft_loops", None, None),  # the range depends on the model
            ("full_loops", None, None),
            ("min_loops", None, None),
            ("max_loops", None, None),
            ("seed", -(2**63), 2**63 - 1),
        ):
            if getattr(self, name) is not None or self._default(name) is not None:
                check_int(name, getattr(self, name), low, high)
        if self.enable_prefix_caching not in (None, True, False):
            raise ConfigError(
                f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}"
            )
        for name, known in (
            ("policy", (None, *POLICIES)),
            ("load_format", ("auto", "dummy")),
            ("attention_backend", ATTENTION_BACKENDS),
            ("cpu_linear", CPU_LINEARS),
            ("cpu_kernels", CPU_KERNELS),
            ("fused", FUSED),
            ("graph_backend", GRAPH_BACKENDS),
        ):
            value, names = getattr(self, name), [word for word in known if word]
            if value not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(names)}, "
                    f"got {value!r}{closest(str(value), names)}"
                )
        if self.draft_loops is not None and self.num_speculative_tokens is None:
            raise ConfigError("draft_loops needs num_speculative_tokens: how many tokens to draft")
        self._check_who_chooses()
        self._check_early_exit()
        self._check_graphs()

    @property
    def adapts(self) -> bool | None:
        """Whether K and d are chosen anew for each round; None where nobody said."""
        if self.speculative_adaptive is not None:
            return self.speculative_adaptive
        if self.speculative_adaptive_config is not None:
            return True
        if self.policy is not None:
            return self.policy != "static"
        given = self.num_speculative_tokens is not None or self.speculative_config is not None
        return False if given else None

    def _check_who_chooses(self) -> None:
        """Raise `ConfigError` for two options that contradict each other, naming both."""
        if self.speculative_adaptive not in (None, True, False):
            raise ConfigError(
                f"speculative_adaptive must be True or False, got {self.speculative_adaptive!r}"
            )
        if not isinstance(self.preset, str) or not self.preset.strip():
            raise ConfigError(f"preset must be auto, none, a file or a name, got {self.preset!r}")
        asked = self.preset not in ("auto", "none")
        if asked and self.ignores_presets:
            raise ConfigError(
                f"preset='{self.preset}' and {self._rival_of_presets()} contradict each other: "
                "both say what runs; leave one of them out"
            )
        fixed = {
            "num_speculative_tokens": self.num_speculative_tokens is not None,
            "speculative_config": self.speculative_config is not None,
            "speculative_adaptive=False": self.speculative_adaptive is False,
            "policy='static'": self.policy == "static",
        }
        chosen = {
            "speculative_adaptive": self.speculative_adaptive is True,
            "speculative_adaptive_config": self.speculative_adaptive_config is not None,
            f"policy={self.policy!r}": self.policy not in (None, "static"),
        }
        one = next((name for name, given in fixed.items() if given), None)
        other = next((name for name, given in chosen.items() if given), None)
        if one and other:
            raise ConfigError(
                f"{one} and {other} contradict each other: with the one K and d are given, with "
                "the other they are chosen anew for each round; leave one of them out"
            )
        if self.speculative_config is not None and self.num_speculative_tokens is not None:
            raise ConfigError(
                "speculative_config and num_speculative_tokens both say what to draft: leave one "
                "of them out"
            )

    def _check_graphs(self) -> None:
        for name in ("enforce_eager", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.enforce_eager and self.graph_backend not in ("auto", "eager"):
            raise ConfigError(
                f"enforce_eager and graph_backend='{self.graph_backend}' contradict each other: "
                "leave one of them out"
            )
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
            raise ConfigError(
                f"cudagraph_capture_sizes must be a list of batch sizes, got {sizes!r:.60}"
            )
        for size in sizes:
            check_int("cudagraph_capture_sizes", size, 1, 2**16)
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sorted(set(sizes))))

    @property
    def ignores_presets(self) -> bool:
        """Whether these options say all of what runs, so that no preset is looked for."""
        if self.early_exit or self.speculative_adaptive_config is not None:
            return True
        if self.policy == "static" and self.preset not in ("auto", "none"):
            return self.num_speculative_tokens is not None or self.speculative_config is not None
        return self.adapts is False

    def _rival_of_presets(self) -> str:
        """Return which option makes these ignore presets, for an error."""
        given = {
            "early exit (exit_threshold)": self.exit_threshold is not None,
            "early exit (exit_criterion)": self.exit_criterion is not None,
            "speculative_adaptive_config": self.speculative_adaptive_config is not None,
            "num_speculative_tokens": self.num_speculative_tokens is not None,
            "speculative_config": self.speculative_config is not None,
            "speculative_adaptive=False": self.speculative_adaptive is False,
        }
        return next(name for name, is_given in given.items() if is_given)

    @property
    def early_exit(self) -> bool:
        """Whether tokens may leave before full depth."""
        return self.exit_threshold is not None or self.exit_criterion is not None

    def _check_early_exit(self) -> None:
        threshold = self.exit_threshold
        if threshold is not None and not is_number(threshold):
            shown = shown_number(threshold)
            raise ConfigError(f"exit_threshold must be a finite number, got {shown}")
        if not self.early_exit and (self.min_loops is not None or self.max_loops is not None):
            raise ConfigError(
                "min_loops and max_loops belong to early exit: give exit_threshold too, or "
                "full_loops to run every token less deep"
            )
        speculates = bool(self.num_speculative_tokens) or self.speculative_config is not None
        if self.early_exit and (speculates or self.adapts):
            raise UnsupportedError(
                "early exit cannot be combined with speculation: a draft is checked by all loops "
                "of every token, which is what early exit leaves out; leave out the options of "
                "one of the two"
            )

    @classmethod
    def from_kwargs(cls, options: Mapping[str, Any]) -> EngineOptions:
        """Make options from keyword arguments; an unknown one is an error that names the
        closest."""
        reject_unknown(options, [f.name for f in dataclasses.fields(cls)], "option")
        return cls(**options)

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Return the meaning of every option by name."""
        return {f.name: f.metadata["help"] for f in dataclasses.fields(cls)}

    @classmethod
    def signature(cls, *leading: inspect.Parameter) -> inspect.Signature:
        """Return a signature of `leading` followed by every option as a keyword."""
        own = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
            )
            for f in dataclasses.fields(cls)
        ]
        return inspect.Signature([*leading, *own])

    @classmethod
    def _default(cls, name: str) -> Any:
        return next(f.default for f in dataclasses.fields(cls) if f.name == name)
