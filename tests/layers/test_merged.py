"""Merged projections compute what the separate ones of a checkpoint would, from the named rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from looped_spec.adapter import WeightTarget
from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.merged import MergedLinear, merged_layout
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.rotary import RotaryAngles
from looped_spec.testing.dense import DenseContext


def _separate(module: nn.Module) -> dict[str, torch.Tensor]:
    """Cut the parameters into the tensors that a checkpoint would hold."""
    state = module.state_dict()
    return {
        name: state[target.parameter][target.start : target.stop]
        for name, target in merged_layout(module).items()
    }


def test_rows_follow_the_order_of_the_parts_and_other_names_stay() -> None:
    module = nn.ModuleDict({"a": MergedLinear(3, {"x": 2, "y": 5}), "b": nn.Linear(3, 4)})
    assert merged_layout(module) == {
        "x.weight": WeightTarget("a.weight", 0, 2),
        "y.weight": WeightTarget("a.weight", 2, 7),
        "b.weight": WeightTarget("b.weight"),
        "b.bias": WeightTarget("b.bias"),
    }


def test_parts_stand_beside_each_other_where_the_merged_layer_stands() -> None:
    layout = merged_layout(nn.ModuleDict({"mlp": SwiGLU(4, 6)}))
    assert list(layout) == ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    assert layout["mlp.up_proj.weight"] == WeightTarget("mlp.gate_up_proj.weight", 6, 12)


@torch.no_grad()
def test_swiglu_equals_its_formula_on_separate_weights() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(4, 6)
    w = _separate(mlp)
    x = torch.randn(2, 3, 4)
    gated = F.silu(x @ w["gate_proj.weight"].T) * (x @ w["up_proj.weight"].T)
    torch.testing.assert_close(mlp(x), gated @ w["down_proj.weight"].T)


@torch.no_grad()
def test_attention_equals_a_loop_over_heads_and_positions() -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 8  # 48 wide, where the hidden size is 12
    attention = RotaryAttention(12, heads, kv_heads, head_dim)
    w = _separate(attention)
    x = torch.randn(1, 5, 12)
    ctx = DenseContext(1, 5, 1)
    angles = RotaryAngles(head_dim, 1e4)
    got = attention(x, angles.cos_sin(ctx.positions, x.dtype), 0, ctx)[0]

    def turned(row: torch.Tensor, position: int) -> torch.Tensor:
        half = head_dim // 2
        out = row.clone()
        for i in range(half):
            angle = torch.tensor(position * 1e4 ** (-2 * i / head_dim))
            first, second = row[i], row[half + i]
            out[i] = first * angle.cos() - second * angle.sin()
            out[half + i] = second * angle.cos() + first * angle.sin()
        return out

    def rows(name: str, count: int) -> torch.Tensor:
        return (x[0] @ w[f"{name}.weight"].T).view(5, count, head_dim)

    q, k, v = rows("q_proj", heads), rows("k_proj", kv_heads), rows("v_proj", kv_heads)
    out = torch.zeros(5, heads, head_dim)
    for t in range(5):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            query = turned(q[t, head], t)
            scores = torch.stack([query @ turned(k[s, kv_head], s) for s in range(t + 1)])
            weights = (scores * head_dim**-0.5).softmax(dim=0)
            out[t, head] = weights @ v[: t + 1, kv_head]
    torch.testing.assert_close(got, out.flatten(1) @ w["o_proj.weight"].T, atol=1e-5, rtol=0)
