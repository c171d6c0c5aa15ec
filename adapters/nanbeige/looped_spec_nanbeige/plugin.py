"""What the Nanbeige adapter says of itself; imports nothing heavy."""

from __future__ import annotations

from looped_spec.adapter import AdapterSpec, Capabilities
from looped_spec.hooks import hookimpl

CAPABILITIES = Capabilities(early_exit=(), resumable=True, shadow_depths=True, seed_free=True)


@hookimpl
def looped_spec_adapters() -> list[AdapterSpec]:
    """Declare the Nanbeige family."""
    return [
        AdapterSpec(
            name="nanbeige",
            model_types=("nanbeige",),
            factory="looped_spec_nanbeige.adapter:NanbeigeAdapter",
            capabilities=CAPABILITIES,
            requires=("transformers", "sentencepiece"),
            install_hint="pip install 'looped-spec[nanbeige]'",
            preset_package="looped_spec_nanbeige",
            demo_package="looped_spec_nanbeige.demo",
        )
    ]
