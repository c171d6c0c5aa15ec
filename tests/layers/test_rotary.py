"""Rotary embedding of neighbouring channels, and frequencies that are scaled."""

from __future__ import annotations

import math

import pytest
import torch

from looped_spec.errors import ModelLoadError
from looped_spec.layers.rope_scaling import Llama3Scaling
from looped_spec.layers.rotary import RotaryAngles, apply_rotary_to_pairs


def test_neighbouring_channels_turn_as_complex_numbers() -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    angles = RotaryAngles(8, 100.0)
    rotated = apply_rotary_to_pairs(x, *angles.cos_sin_of_pairs(positions))
    frequency = 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    phase = positions[..., None, None] * frequency
    turned = torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * torch.exp(1j * phase)
    torch.testing.assert_close(
        rotated, torch.view_as_real(turned).flatten(-2).float(), atol=1e-6, rtol=0
    )


def test_rotation_in_half_precision_is_computed_in_single_precision() -> None:
    x = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = RotaryAngles(8, 100.0).cos_sin_of_pairs(torch.tensor([[4001]]))
    rotated = apply_rotary_to_pairs(x, *angles)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary_to_pairs(x.float(), *angles).bfloat16())


LLAMA_3_2 = Llama3Scaling(32.0, 1.0, 4.0, 8192)


def scaled_by_wavelength(inv_freq: float, rule: Llama3Scaling) -> float:
    """Scale one frequency by the length of its wave, case by case, in double precision."""
    wave, context = 2 * math.pi / inv_freq, rule.original_max_position_embeddings
    if wave < context / rule.high_freq_factor:
        return inv_freq
    if wave > context / rule.low_freq_factor:
        return inv_freq / rule.factor
    low, high = rule.low_freq_factor, rule.high_freq_factor
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * inv_freq / rule.factor + smooth * inv_freq


def test_llama3_scaling_slows_long_waves_and_blends_those_between() -> None:
    plain = RotaryAngles(64, 500000.0).inv_freq(torch.device("cpu"))
    scaled = RotaryAngles(64, 500000.0, LLAMA_3_2).inv_freq(torch.device("cpu"))
    expected = [scaled_by_wavelength(500000.0 ** (-i / 32), LLAMA_3_2) for i in range(32)]
    torch.testing.assert_close(scaled, torch.tensor(expected), rtol=2e-6, atol=0)
    ratio = (plain / scaled).tolist()
    assert ratio[0] == 1.0
    assert ratio[-1] == 32.0
    assert any(1.1 < value < 31 for value in ratio), "no frequency is between"


def test_llama3_scaling_refuses_borders_that_are_no_range() -> None:
    with pytest.raises(ModelLoadError, match=r"low_freq_factor .* below high_freq_factor = 4\.0"):
        Llama3Scaling(8.0, 4.0, 4.0, 8192)
