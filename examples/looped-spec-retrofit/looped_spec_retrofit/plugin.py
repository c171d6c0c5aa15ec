"""What this plugin says of itself; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looped_spec.adapter import AdapterSpec, Capabilities, ExitCriterion
from looped_spec.hooks import hookimpl

# Thresholds are those of the authors' modelling file. A score must reach its threshold from below,
# so where a small measure means ready both are negated.
CAPABILITIES = Capabilities(
    early_exit=(
        ExitCriterion("latent-diff", default_threshold=-0.03),
        ExitCriterion("entropy-diff", default_threshold=-1e-3),
        ExitCriterion("kl", default_threshold=-5e-4),
        ExitCriterion("argmax-stability", default_threshold=5.0),
    ),
    resumable=True,
    # The readout runs the coda, which writes keys and values of its own.
    shadow_depths=False,
)


def is_retrofitted(config: Mapping[str, Any]) -> bool:
    """Tell a converted model from one that was trained in this form from the start.

    The conversion keeps `model_type` and nearly all fields of the model whose code it borrows. What
    it must change is the scale of the embeddings, which a pretrained Llama does not have.
    """
    scales = config.get("init_values")
    return isinstance(scales, Mapping) and scales.get("embed_scale") == 1.0


@hookimpl
def looped_spec_adapters() -> list[AdapterSpec]:
    """Declare the family."""
    return [
        AdapterSpec(
            name="retrofit",
            model_types=("huginn_raven",),
            accepts="looped_spec_retrofit.plugin:is_retrofitted",
            factory="looped_spec_retrofit.adapter:RetrofitAdapter",
            capabilities=CAPABILITIES,
            preset_package="looped_spec_retrofit",
        )
    ]
