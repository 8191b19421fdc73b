"""Native linear layers against fp64, and a row's bits against those that it has alone."""

import pytest
import torch
from torch import nn

from drafttrain.kernels.linear import NativeLinear, make_native, rounds_inputs

SHAPES = [(1, 1), (7, 3), (33, 17), (64, 64), (96, 576), (130, 55)]  # odd inputs, outputs that fill no panel


def layer(out: int, inputs: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, out, bias=bias)
    return made.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_what_fp64_computes(kernels, shape, dtype):
    stock = layer(*shape, dtype)
    native = NativeLinear(stock.weight, stock.bias)
    x = torch.randn(5, shape[1])
    read = x.bfloat16() if rounds_inputs(dtype) else x
    wanted = read.double() @ stock.weight.double().T + stock.bias.double()
    assert (native.product(x).double() - wanted).abs().max() < 1e-5 * max(1.0, wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(130, 55), (96, 576)])
def test_a_row_has_the_same_bits_in_any_company(kernels, shape, dtype):
    native = NativeLinear(layer(*shape, dtype).weight)
    x = torch.randn(64, shape[1])
    alone = torch.cat([native.product(row[None]) for row in x])
    for rows in range(1, 65):
        assert torch.equal(native.product(x[:rows]), alone[:rows]), rows
    assert torch.equal(native.product(x.flip(0)), alone.flip(0))


def test_threads_change_no_bit(kernels):
    native = NativeLinear(layer(200, 64, torch.bfloat16).weight)
    x, before = torch.randn(9, 64), torch.get_num_threads()
    one = native.product(x)
    try:
        for threads in (2, 3, 8, 1):
            torch.set_num_threads(threads)
            assert torch.equal(native.product(x), one), threads
    finally:
        torch.set_num_threads(before)


def test_it_keeps_shape_and_dtype(kernels):
    native = NativeLinear(layer(6, 4, torch.bfloat16).weight)
    assert native(torch.randn(2, 3, 4, dtype=torch.bfloat16)).shape == (2, 3, 6)
    assert native(torch.randn(4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert native(torch.randn(0, 4)).shape == (0, 6)
    wide = torch.randn(3, 8)[:, ::2]  # not contiguous
    assert torch.equal(native(wide), native(wide.contiguous()))


def test_nan_and_infinity_stay(kernels):
    native = NativeLinear(torch.ones(4, 4, dtype=torch.bfloat16))
    assert native(torch.tensor([[1.0, torch.nan, 0.0, 0.0]])).isnan().all()
    assert native(torch.tensor([[1.0, torch.inf, 0.0, 0.0]])).isinf().all()


def test_linear_layers_of_a_module_become_native(kernels):
    class Other(nn.Linear):
        """A linear layer that does something else."""

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4).bfloat16()), Other(8, 8), nn.ReLU())
    half = nn.Linear(8, 8).half()  # a dtype that the library does not multiply
    assert make_native(model) == 2 and isinstance(model[0], NativeLinear)
    assert isinstance(model[1][0], NativeLinear) and type(model[2]) is Other
    assert make_native(nn.Sequential(half)) == 0
