"""Linear layers that have given their weight away, and what is left to see of it."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn

from looped_spec.layers.merged import MergedLinear
from looped_spec.layers.packed import (
    PACKINGS,
    HalfPacked,
    Packed,
    PackedLinear,
    can_pack,
    use_packed,
    use_transposed,
)

# fp32, other orders of a sum of some hundred products of numbers about 1
TOLERANCE = 1e-4


def bf16_numbers(out_features: int, in_features: int, size: float = 1.0) -> Tensor:
    """A weight as a bf16 checkpoint has it, in fp32."""
    generator = torch.Generator().manual_seed(out_features)
    weight = size * torch.randn(out_features, in_features, generator=generator)
    return weight.bfloat16().float()


def layer_of(weight: Tensor, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias).requires_grad_(False)
    layer.weight.copy_(weight)
    return layer


def pack(name: str, weight: Tensor) -> Packed:
    """Pack, or skip where this build of torch or this processor lacks the kernel."""
    try:
        packed = PACKINGS[name].of(weight)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"{name} does not work here: {str(error).splitlines()[0]}")
    assert packed is not None
    return packed


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(96, 64), (61, 33), (200, 128)])
def test_a_packed_layer_computes_what_the_layer_did(
    name: str, bias: bool, sizes: tuple[int, int]
) -> None:
    layer = layer_of(bf16_numbers(*sizes), bias)
    xs = [torch.randn(*shape, sizes[1]) for shape in ((1, 1), (1, 5), (8, 1), (3, 40), (7,))]
    want = [layer(x) for x in xs]
    use_packed(layer, pack(name, layer.weight))
    for x, expected in zip(xs, want, strict=True):
        torch.testing.assert_close(layer(x), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", PACKINGS)
def test_inputs_that_are_views_are_read_in_their_own_order(name: str) -> None:
    layer = layer_of(bf16_numbers(48, 32))
    wide = torch.randn(4, 6, 64)
    views = [wide[..., ::2], wide[:, 1:2, 32:], wide.transpose(0, 1)[..., :32]]
    want = [layer(view) for view in views]
    use_packed(layer, pack(name, layer.weight))
    for view, expected in zip(views, want, strict=True):
        torch.testing.assert_close(layer(view), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e5])
def test_unpacking_gives_every_number_back(name: str, size: float) -> None:
    weight = bf16_numbers(70, 50, size)
    assert torch.equal(pack(name, weight).unpack(), weight)


def test_half_precision_holds_scaled_what_it_cannot_hold_as_it_is() -> None:
    weight = bf16_numbers(64, 64, 1e-6)
    assert not torch.equal(weight.half().float(), weight)
    packed = pack("exact_fp16", weight)
    assert torch.equal(packed.unpack(), weight)
    assert packed.num_bytes == 2 * weight.numel()


@pytest.mark.parametrize(
    "number", [1.0 + 2.0**-20, 2.0**-60, math.inf, math.nan], ids=["digits", "tiny", "inf", "nan"]
)
def test_half_precision_refuses_a_matrix_with_one_number_that_it_would_change(
    number: float,
) -> None:
    weight = bf16_numbers(64, 64)
    weight[3, 5] = number
    assert HalfPacked.of(weight) is None


def test_half_precision_is_for_fp32_alone() -> None:
    assert HalfPacked.of(bf16_numbers(64, 64).bfloat16()) is None


def test_half_precision_holds_zeros() -> None:
    assert torch.equal(pack("exact_fp16", torch.zeros(64, 32)).unpack(), torch.zeros(64, 32))


@pytest.mark.parametrize("columns", [64, 224, 320])
def test_bits_of_a_row_in_half_precision_do_not_depend_on_the_other_rows(columns: int) -> None:
    packed = pack("exact_fp16", bf16_numbers(160, columns, 0.02))
    x = torch.randn(64, columns)
    together = packed.linear(x, None)
    for rows in (1, 2, 3, 5, 8, 13, 32):
        for start in (0, 7, 64 - rows):
            part = slice(start, start + rows)
            assert torch.equal(packed.linear(x[part], None), together[part]), (rows, start)


def test_a_packed_layer_stays_the_object_that_others_refer_to() -> None:
    merged = MergedLinear(32, {"a": 40, "b": 24}).requires_grad_(False)
    merged.weight.copy_(bf16_numbers(64, 32))
    parent = nn.Sequential(merged)
    use_packed(merged, pack("exact_fp16", merged.weight))
    assert parent[0] is merged
    assert isinstance(merged, PackedLinear) and isinstance(merged, MergedLinear)
    assert merged.parts == {"a": 40, "b": 24}


@pytest.mark.parametrize("name", PACKINGS)
def test_the_original_is_let_go_and_the_numbers_stay_to_be_had(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = bf16_numbers(48, 32)
    layer = layer_of(weight, bias=True)
    packed = pack(name, layer.weight)
    use_packed(layer, packed)
    (held,) = (p for key, p in layer.named_parameters() if key == "weight")
    assert held.shape == weight.shape and held.dtype == weight.dtype
    assert held.untyped_storage().nbytes() == 4 and held.isnan().all()
    assert torch.equal(layer.state_dict()["weight"], weight)
    assert torch.equal(layer.state_dict()["bias"], layer.bias)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.weight, weight)
    (record,) = caplog.records
    assert "48 x 32 is read" in record.message and "cpu_linear='plain'" in record.message


def test_a_packed_layer_refuses_another_weight() -> None:
    layer = layer_of(bf16_numbers(48, 32))
    use_packed(layer, pack("exact_fp16", layer.weight))
    with pytest.raises(AttributeError, match="takes no new weight"):
        layer.weight = nn.Parameter(torch.zeros(48, 32))
    with pytest.raises(AttributeError, match="takes no new weight"):
        layer.load_state_dict({"weight": torch.zeros(48, 32)})


@pytest.mark.parametrize("name", PACKINGS)
def test_a_copy_of_a_packed_model_computes_the_same(name: str) -> None:
    layer = layer_of(bf16_numbers(48, 32))
    use_packed(layer, pack(name, layer.weight))
    x = torch.randn(2, 32)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_transposed_layer_keeps_the_same_tensor_in_another_order() -> None:
    weight = bf16_numbers(48, 32)
    layer = layer_of(weight)
    x = torch.randn(3, 2, 32)
    want = layer(x)
    use_transposed(layer)
    assert torch.equal(layer.weight, weight) and layer.weight.t().is_contiguous()
    torch.testing.assert_close(layer(x), want, atol=TOLERANCE, rtol=0)


class Doubled(nn.Linear):
    """Computes something else than a linear layer does."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_layers_that_compute_in_their_own_way_are_left_alone() -> None:
    assert can_pack(nn.Linear(8, 8)) and can_pack(MergedLinear(8, {"a": 8}))
    assert not can_pack(Doubled(8, 8)) and not can_pack(nn.Embedding(8, 8))
    assert not can_pack(nn.Linear(8, 8, device="meta"))
