"""What the Huginn adapter says of itself; imports nothing heavy."""

from __future__ import annotations

from looped_spec.adapter import AdapterSpec, Capabilities, ExitCriterion
from looped_spec.hooks import hookimpl

# Thresholds are those of the official code. A score must reach its threshold from below, so where
# a small measure means ready both are negated: "latent-diff below 0.03" is a threshold of -0.03.
CAPABILITIES = Capabilities(
    early_exit=(
        ExitCriterion("latent-diff", default_threshold=-0.03),
        ExitCriterion("entropy-diff", default_threshold=-1e-3),
        ExitCriterion("kl", default_threshold=-1e-3),
        ExitCriterion("argmax-stability", default_threshold=5.0),
    ),
    resumable=True,
    # The readout runs the coda, which writes keys and values of its own.
    shadow_depths=False,
)


@hookimpl
def looped_spec_adapters() -> list[AdapterSpec]:
    """Declare the Huginn family."""
    return [
        AdapterSpec(
            name="huginn",
            model_types=("huginn_raven",),
            factory="looped_spec_huginn.adapter:HuginnAdapter",
            capabilities=CAPABILITIES,
            requires=("transformers",),
            install_hint="pip install 'looped-spec[huginn]'",
            preset_package="looped_spec_huginn",
            demo_package="looped_spec_huginn.demo",
        )
    ]
