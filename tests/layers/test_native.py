"""The compiled kernels against the plain layers that they stand for."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.native import BuildError, Kernels, build, use_kernels
from looped_spec.layers.native.build import load_library
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles, apply_rotary
from looped_spec.settings import c_compiler

# fp32 roundings of a few hundred terms of size 1
TOLERANCE = 2e-6
SIZES = [2, 6, 64, 90, 512, 1408]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_norm_is_the_plain_one(kernels: Kernels, size: int, scale: float) -> None:
    norm = RMSNorm(size, 1e-6).requires_grad_(False)
    norm.weight.copy_(random(size, seed=1))
    x, residual = scale * random(3, 2, size), random(3, 2, size, seed=2)
    with torch.no_grad():
        plain, added = norm(x), norm.added(residual, x)
        assert use_kernels(norm, kernels) == 1
        torch.testing.assert_close(norm(x), plain, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(norm.added(residual, x), added, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
def test_a_feed_forward_layer_is_the_plain_one(kernels: Kernels, size: int) -> None:
    layer = SwiGLU(16, size).requires_grad_(False)
    x = 3 * random(3, 2, 16)
    with torch.no_grad():
        plain = layer(x)
        use_kernels(layer, kernels)
        torch.testing.assert_close(layer(x), plain, atol=TOLERANCE, rtol=1e-5)


def test_the_activation_is_right_from_end_to_end_and_shows_what_is_not_finite(
    kernels: Kernels,
) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 5000), torch.tensor([0.0, -0.0, 1e30, -1e30])))
    with torch.no_grad():
        out = kernels.silu_mul(torch.cat((gate, torch.ones_like(gate))))
        expected = nn.functional.silu(gate.double())
        # exp is clamped at 88, which leaves 6e-9 of -1e30 where nothing should be left
        torch.testing.assert_close(out.double(), expected, atol=1e-8, rtol=1e-6)
        torch.testing.assert_close(out[:-1].double(), expected[:-1], atol=1e-30, rtol=1e-6)
        for bad in (float("nan"), float("inf"), float("-inf")):
            assert not kernels.silu_mul(torch.tensor([bad, 1.0])).isfinite().any()


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_a_rotation_is_the_plain_one_and_leaves_the_values(kernels: Kernels, heads: int) -> None:
    x = random(3, 4, 4, 10)
    cos, sin = RotaryAngles(10, 1e4).cos_sin(torch.arange(12).view(3, 4) * 7, torch.float32)
    expected = torch.cat((apply_rotary(x[:, :, :heads], cos, sin), x[:, :, heads:]), dim=2)
    out = x.clone()
    kernels.rotate_(out, heads, cos, sin)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    column = x[:, 2:3].contiguous()  # its angles are a part of those of more rows
    kernels.rotate_(column, heads, cos[:, 2:3], sin[:, 2:3])
    assert torch.equal(column, out[:, 2:3])


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_address(kernels: Kernels) -> None:
    weight = random(330, seed=1)
    x = random(9, 660)
    with torch.no_grad():
        normed = kernels.rms_norm(x[:, :330].contiguous(), weight, 1e-6)
        mixed = kernels.silu_mul(x)
        for row in range(9):
            store = torch.empty(660 + row)
            alone = store[row:].copy_(x[row])  # four bytes further each time
            assert torch.equal(kernels.rms_norm(alone[:330], weight, 1e-6), normed[row])
            assert torch.equal(kernels.silu_mul(alone), mixed[row])


def test_they_serve_float32_on_the_cpu_without_gradients() -> None:
    x = torch.ones(2, 4)
    assert not Kernels.serves(x)
    with torch.no_grad():
        assert Kernels.serves(x)
        assert (
            not Kernels.serves(x.bfloat16())
            and not Kernels.serves(x.t())
            and not Kernels.serves(x.to("meta"))
        )


def test_layers_leave_to_torch_what_the_kernels_do_not_take(kernels: Kernels) -> None:
    norm, plain = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6)
    use_kernels(norm, kernels)
    x = random(2, 8)
    assert norm(x).requires_grad
    with torch.no_grad():
        assert torch.equal(norm(x.bfloat16()), plain(x.bfloat16()))
        assert norm(x.t().contiguous().t()).shape == x.shape
    assert use_kernels(norm, None) == 1 and norm.kernels is None


def test_a_part_whose_kernels_are_something_else_keeps_them() -> None:
    part = nn.Module()
    part.kernels = [3, 5]  # type: ignore[assignment]
    assert use_kernels(nn.Sequential(part), None) == 0
    assert part.kernels == [3, 5]


def test_a_copy_of_a_layer_shares_them(kernels: Kernels) -> None:
    norm = RMSNorm(8, 1e-6)
    use_kernels(norm, kernels)
    assert copy.deepcopy(norm).kernels is kernels


def test_they_are_compiled_once_for_a_cache(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.__wrapped__()
    (library,) = (tmp_path / "looped-spec").iterdir()
    made = library.stat().st_mtime_ns
    load_library.__wrapped__()
    assert library.stat().st_mtime_ns == made


@pytest.mark.parametrize("kept", [0, 8000])
def test_half_a_library_in_the_cache_is_made_anew(
    kept: int, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.__wrapped__()
    (library,) = (tmp_path / "looped-spec").iterdir()
    whole = library.read_bytes()
    library.unlink()  # it is mapped into this process
    library.write_bytes(whole[:kept])
    load_library.__wrapped__()
    (library,) = (tmp_path / "looped-spec").iterdir()
    assert library.read_bytes() == whole


def test_a_cache_that_others_may_write_to_is_not_used(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "looped-spec"
    folder.mkdir()
    folder.chmod(0o777)
    load_library.__wrapped__()
    assert not list(folder.iterdir())
    assert list(tmp_path.iterdir()) == [folder], "what it was compiled in stayed behind"


def test_no_kernels_are_made_on_a_system_that_is_not_posix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "os", SimpleNamespace(name="nt"))
    with pytest.raises(BuildError, match="POSIX systems only, and this one is 'nt'"):
        load_library.__wrapped__()


def test_a_compiler_that_is_more_than_a_word_links_too(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", f"env {c_compiler() or 'cc'}")  # as in CC="ccache gcc"
    load_library.__wrapped__()
    assert len(list((tmp_path / "looped-spec").iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-cc-1", "no-such-cc-1"),
        ("false", "false cannot build"),
        ("cc '", "CC is no command: No closing"),
    ],
)
def test_without_a_compiler_it_says_so(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BuildError, match=message):
        load_library.__wrapped__()
