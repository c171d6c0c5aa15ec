"""The flags that say how tokens are chosen and when a text ends."""

from __future__ import annotations

import argparse

from looped_spec.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128
DEFAULT_TEMPERATURE = 0.0


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `SamplingParams`; two defaults differ, as their help says."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="most new tokens of a text (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=DEFAULT_TEMPERATURE,
        metavar="X",
        help="0 always takes the most likely token; a higher one chooses more freely "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="sample among the likeliest tokens that reach this probability together, in (0, 1] "
        "(default: %(default)g, all)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="sample among the N likeliest tokens (default: %(default)s, all)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="leave out tokens less likely than this share of the likeliest, in [0, 1] "
        "(default: %(default)g, none)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's own end token"
    )


def sampling_params(args: argparse.Namespace, count: int) -> list[SamplingParams]:
    """Return the checked parameters of `count` prompts.

    Each prompt gets a seed of its own, so that its text does not depend on what ran before it. At
    temperature 0 all have the same, so that it does not depend on its place either: a model may
    start from a state that the seed decides.
    """
    step = 1 if args.temperature > 0 else 0
    return [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed + step * number,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
        )
        for number in range(count)
    ]
