"""The Ouro family (ByteDance/Ouro-*) for looped-spec."""
