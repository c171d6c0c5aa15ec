"""Acceptance of one draft token at a temperature, beside that of the optimal coupling.

A draft and the target choose their tokens with the same noise, so that a request's text does not
depend on the draft. The price is an acceptance below the best that any rule can have, which knows
both distributions: 1 - TV. Reported is, for every draft depth d, the mean over positions of

- 1 - TV(p, q), p and q the distributions of the next token after d loops and after all;
- the expected acceptance with shared noise, exactly;
- the acceptance measured with the engine's own noise, over several seeds;
- how often the most likely tokens agree, which is the acceptance at temperature 0.

The last rows are of text that the engine itself wrote with K = 1, beside the share of drafts it
accepted. Behind each mean stands the half-width of its 95 % interval, positions taken as
independent. Runs on the CPU in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from demo import PROMPTS
from results import add_workload_flag, run_command
from torch import Tensor
from tqdm import tqdm

from looped_spec import LLM, ModelAdapter, SamplingParams
from looped_spec.errors import ConfigError, LoopedSpecError, UnsupportedError, check_int
from looped_spec.offline.documents import Document, Documents, decode, read_bytes, read_documents
from looped_spec.offline.machine import machine
from looped_spec.offline.workloads import named_paths
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors, choose_tokens
from looped_spec.testing.dense import DenseContext

ENGINE_TEXT = "written by the engine"
ROW_TOKENS = 256
Z95 = 1.96


def optimal_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_i min(p_i, q_i) = 1 - TV(p, q) over the last axis."""
    return torch.minimum(p, q).sum(dim=-1)


def shared_noise_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return P(argmax(log p + g) = argmax(log q + g)), g standard Gumbel noise, over the last axis.

    With E_j = exp(-g_j), exponential of rate 1, the choices are argmin E_j / p_j and
    argmin E_j / q_j. Both are i if and only if E_j >= E_i m_j for all j, m_j = max(p_j / p_i,
    q_j / q_i). Given E_i = x that has the probability exp(-x sum_{j != i} m_j); the mean over x,
    where m_i = 1, is 1 / sum_j m_j. The sum over i is the acceptance, which is at least
    (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, arXiv 2408.07978).

    In the order of p_j / q_j the maximum is q_j / q_i before i and p_j / p_i from i on, so two
    running sums do instead of V^2 terms.
    """
    p, q = p.double(), q.double()
    order = (p / q).nan_to_num(nan=0.0, posinf=torch.inf).argsort(dim=-1)  # 0 / 0 adds nothing
    p, q = p.gather(-1, order), q.gather(-1, order)
    below = q.cumsum(dim=-1) - q
    above = p.flip(-1).cumsum(dim=-1).flip(-1)
    product = p * q
    terms = product / (above * q + below * p)
    return torch.where(product > 0, terms, 0.0).sum(dim=-1)


@dataclass(frozen=True)
class Span:
    """Token ids, computed from their own beginning; the rows from `first` on are measured."""

    tokens: list[int]
    first: int = 0


@dataclass(frozen=True)
class Rates:
    """Of every measured position, [N] fp64: what the table shows the means of."""

    optimal: Tensor
    expected: Tensor
    measured: Tensor
    greedy: Tensor


@dataclass(frozen=True)
class Drafts:
    """What the engine did with one draft depth."""

    proposed: int
    accepted: int


def cut(documents: Iterable[Sequence[int]], row_tokens: int, max_positions: int) -> list[Span]:
    """Cut token ids into spans, until `max_positions` are reached exactly or no text is left."""
    spans, left = [], max_positions
    for ids in documents:
        for begin in range(0, len(ids), row_tokens):
            tokens = list(ids[begin : begin + min(row_tokens, left)])
            left -= len(tokens)
            spans.append(Span(tokens))
            if not left:
                return spans
    return spans


@torch.no_grad()
def logits_by_depth(
    adapter: ModelAdapter, tokens: Sequence[int], depths: Iterable[int], full_loops: int
) -> dict[int, Tensor]:
    """Return the logits [T, V] that drafts of each depth and the target are chosen from."""
    ctx = DenseContext(1, len(tokens), full_loops)
    state = adapter.prelude(torch.tensor([list(tokens)]), ctx)
    logits = {}
    for index in range(full_loops):
        state = adapter.loop(state, index, ctx)
        if index + 1 in depths:
            logits[index + 1] = adapter.draft_readout(state, ctx)[0].float()
    return logits | {full_loops: adapter.readout(state, ctx)[0].float()}


def engine_choices(logits: Tensor, first: int, temperature: float, seeds: Sequence[int]) -> Tensor:
    """Return the tokens [seeds, T] that the engine chooses after rows at positions `first` on."""
    positions = torch.arange(first + 1, first + 1 + len(logits))[None]
    chosen = []
    for seed in seeds:
        one = torch.ones(1)
        params = SamplingTensors(
            torch.tensor([seed]), temperature * one, torch.tensor([0]), one, 0 * one
        )
        chosen.append(choose_tokens(logits[None], positions, params, SamplingMode.RANDOM))
    return torch.cat(chosen)


def measure(
    adapter: ModelAdapter,
    spans: Sequence[Span],
    depths: Sequence[int],
    full_loops: int,
    temperature: float,
    num_seeds: int,
    advance: Callable[[int], object],
) -> dict[int, Rates]:
    """Measure every position of `spans` at every depth; a span has seeds of its own."""
    parts: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    for number, span in enumerate(spans):
        logits = logits_by_depth(adapter, span.tokens, depths, full_loops)
        rows = {depth: every[span.first :] for depth, every in logits.items()}
        seeds = range(number * num_seeds, (number + 1) * num_seeds)
        chosen = {d: engine_choices(x, span.first, temperature, seeds) for d, x in rows.items()}
        probability = {d: (x.double() / temperature).softmax(-1) for d, x in rows.items()}
        target = rows[full_loops].argmax(-1)
        for depth in depths:
            pair = probability[depth], probability[full_loops]
            values = (
                optimal_acceptance(*pair),
                shared_noise_acceptance(*pair),
                (chosen[depth] == chosen[full_loops]).double().mean(dim=0),
                (rows[depth].argmax(-1) == target).double(),
            )
            parts[depth].append(torch.stack(values))
        advance(len(target))
    return {depth: Rates(*torch.cat(part, dim=1)) for depth, part in parts.items()}


def run_engine(
    llm: LLM,
    prompts: Sequence[str],
    depths: Sequence[int],
    params: Sequence[SamplingParams],
    advance: Callable[[int], object],
) -> tuple[list[Span], dict[int, Drafts]]:
    """Complete `prompts` with K = 1 at every depth; return the text and what became of drafts.

    The spans begin with the second new token: the first comes from prefill, without a draft.
    """
    texts, drafts = [], {}
    for depth in depths:
        llm.set_speculation(1, depth)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        drafts[depth] = Drafts(
            sum(output.metrics.num_draft_tokens for output in outputs),
            sum(output.metrics.num_accepted_tokens for output in outputs),
        )
        texts.append(
            [
                Span([*output.prompt_token_ids, *output.outputs[0].token_ids][:-1], first)
                for output in outputs
                if (first := len(output.prompt_token_ids)) and len(output.outputs[0].token_ids) > 1
            ]
        )
        advance(len(outputs))
    if any(text != texts[0] for text in texts):
        raise LoopedSpecError("the text depends on draft_loops: please report this as a bug")
    return texts[0], drafts


def mean(values: Tensor) -> dict[str, float]:
    """Return the mean, and the half-width of its 95 % interval."""
    spread = values.std().item() if len(values) > 1 else math.nan
    half = Z95 * spread / math.sqrt(len(values))
    return {"mean": round(values.mean().item(), 6), "half_width": round(half, 6)}


def summary(text: str, depth: int, rates: Rates, drafts: Drafts | None = None) -> dict[str, Any]:
    """Reduce the positions of one text at one depth."""
    row: dict[str, Any] = {"text": text, "draft_loops": depth, "positions": len(rates.optimal)}
    row |= {name: mean(getattr(rates, name)) for name in ("optimal", "expected", "measured")}
    row |= {"greedy": mean(rates.greedy)}
    row |= {"measured_minus_expected": mean(rates.measured - rates.expected)}
    if drafts is not None and drafts.proposed:
        rate = drafts.accepted / drafts.proposed
        half = Z95 * math.sqrt(rate * (1 - rate) / drafts.proposed)
        row |= {"engine": {"mean": round(rate, 6), "half_width": round(half, 6)} | asdict(drafts)}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the summaries out as a Markdown table."""
    lines = [
        "| text | d | positions | optimal, 1 - TV | shared noise, expected | "
        "shared noise, measured | engine | greedy agreement |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["text"], str(row["draft_loops"]), str(row["positions"])]
        for name in ("optimal", "expected", "measured", "engine", "greedy"):
            value = row.get(name)
            cells.append(f"{value['mean']:.3f} ± {value['half_width']:.3f}" if value else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read_plain(path: Path) -> Documents:
    """Read a file as one document."""
    raw = read_bytes(path)
    text = decode(raw, path)
    if not text.strip():
        raise ConfigError(f"{path} holds no text")
    digest = hashlib.sha256(raw).hexdigest()
    return Documents(path.name, digest, len(raw), (Document(text, 1),))


def read_sources(args: argparse.Namespace) -> dict[str, Documents]:
    """Read every text that was named."""
    sources: dict[str, Documents] = {}
    for path in args.text:
        if path.name in sources:
            raise ConfigError(f"two texts are named {path.name}: measure them in turn")
        sources[path.name] = read_plain(path)
    for name, path in named_paths(args.workload).items() if args.workload else ():
        if name in sources:
            raise ConfigError(f"two texts are named {name}: measure them in turn")
        sources[name] = read_documents(path)
    if not sources:
        raise ConfigError("nothing to measure: name at least one text, for instance --text FILE")
    return sources


def provenance(source: Documents) -> dict[str, Any]:
    """Say which file it was, without its text and its folder."""
    return {
        "file": source.file,
        "sha256": source.sha256,
        "documents": len(source.items),
        "bytes": source.num_bytes,
    }


def check_model(llm: LLM) -> None:
    """Refuse a model whose drafts are not those of a plain run of d loops over the whole text."""
    planes = llm.loaded.adapter.kv_planes(llm.full_loops)
    if not llm.loaded.adapter.capabilities.resumable:
        raise UnsupportedError(f"the shallow run of {llm.loaded.name} is no prefix of its deep run")
    if any(plane.kind == "readout" for plane in planes):
        raise UnsupportedError(
            f"the readout of {llm.loaded.name} has keys and values of its own: its drafts see "
            "those of full depth, which is not measured here"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="demo:ouro", help="default: %(default)s")
    add_workload_flag(parser)
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="one document each")
    add("--draft-loops", type=int, nargs="+", metavar="d", help="default: all, 1 to D - 1")
    add("--temperature", type=float, default=1.0, help="default: %(default)g")
    add("--positions", type=int, default=5000, help="at most, of each text: %(default)s")
    add("--seeds", type=int, default=8, help="seeds of noise at each position: %(default)s")
    add("--engine-seeds", type=int, default=4, help="completions of each prompt: %(default)s")
    add("--max-tokens", type=int, default=64, help="of each completion: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads: %(default)s")
    add("--json", type=Path, metavar="FILE", help="file to write the numbers to")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, print the table, and return what the JSON file holds of it."""
    for name in ("positions", "seeds", "engine_seeds", "threads"):
        check_int(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    check_int("--max-tokens", args.max_tokens, 2)
    if not (args.temperature > 0 and math.isfinite(args.temperature)):
        raise ConfigError(f"--temperature must be above 0, got {args.temperature:g}")
    torch.set_num_threads(args.threads)
    sources = read_sources(args)
    llm = LLM(args.model, device="cpu", dtype="float32", num_threads=args.threads, max_num_seqs=32)
    check_model(llm)
    facts = machine(llm)
    depths = sorted(set(args.draft_loops or range(1, llm.full_loops))) or [1]
    for depth in depths:
        llm.set_speculation(1, depth)  # refuses a depth that is out of range
    tokenizer, row_tokens = llm.get_tokenizer(), min(ROW_TOKENS, llm.max_model_len)
    texts = {}
    for name, source in sources.items():
        documents = (tokenizer.encode(document.text) for document in source.items)
        texts[name] = cut(documents, row_tokens, args.positions)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    params = [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(args.engine_seeds)
        for _ in prompts
    ]
    prompts *= args.engine_seeds
    with tqdm(total=len(depths) * len(prompts), desc="engine", unit="request") as bar:
        texts[ENGINE_TEXT], drafts = run_engine(llm, prompts, depths, params, bar.update)
    rows = []
    for name, spans in texts.items():
        total = sum(len(span.tokens) - span.first for span in spans)
        with tqdm(total=total, desc=name, unit="position") as bar:
            rates = measure(
                llm.loaded.adapter,
                spans,
                depths,
                llm.full_loops,
                args.temperature,
                args.seeds,
                bar.update,
            )
        for depth in depths:
            row = summary(name, depth, rates[depth], drafts[depth] if name == ENGINE_TEXT else None)
            rows.append(row)
    print(table(rows))
    return {
        "model": args.model,
        "full_loops": llm.full_loops,
        "temperature": args.temperature,
        "row_tokens": row_tokens,
        "noise_seeds_per_position": args.seeds,
        "engine_seeds": list(range(args.engine_seeds)),
        "engine_requests": len(prompts),
        "max_tokens": args.max_tokens,
        "texts": {name: provenance(source) for name, source in sources.items()},
        "machine": facts,
        "results": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parse(argv)
    return run_command("benchmarks/coupling.py", argv, args.json, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
