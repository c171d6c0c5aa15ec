"""What the Ouro adapter says of itself; imports nothing heavy."""

from __future__ import annotations

from looped_spec.adapter import AdapterSpec, Capabilities, ExitCriterion
from looped_spec.hooks import hookimpl

CAPABILITIES = Capabilities(
    early_exit=(ExitCriterion("gate", default_threshold=1.0, monotone=True),),
    resumable=True,
    shadow_depths=True,
    seed_free=True,
)


@hookimpl
def looped_spec_adapters() -> list[AdapterSpec]:
    """Declare the Ouro family."""
    return [
        AdapterSpec(
            name="ouro",
            model_types=("ouro",),
            factory="looped_spec_ouro.adapter:OuroAdapter",
            capabilities=CAPABILITIES,
            requires=("transformers",),
            install_hint="pip install 'looped-spec[ouro]'",
            preset_package="looped_spec_ouro",
            demo_package="looped_spec_ouro.demo",
        )
    ]
