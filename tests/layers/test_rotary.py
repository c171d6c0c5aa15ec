"""Rotary embedding of neighbouring channels."""

from __future__ import annotations

import torch

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
