"""Native linear layers against fp64, and a row's bits against those that it has alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafttrain.kernels.linear import ZERO, NativeLinear, make_native, rounds_inputs, to_bytes

GROUP = 64  # of cpp/linear.h
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


def head_of(row: torch.Tensor) -> NativeLinear:
    """A layer whose products with 1 are a row."""
    return NativeLinear(row[:, None])


@pytest.mark.parametrize("width", [1, 3, 17, 63, 64, 65, 4096, 4097, 12289])  # vectors, and parts of 4096
@pytest.mark.parametrize("rounded", [False, True])  # many ties
def test_the_most_probable_outputs_are_those_of_a_sort(kernels, width, rounded):
    row = torch.randn(width, generator=torch.Generator().manual_seed(width)) * 3
    row = row.round() if rounded else row
    wanted, head = row.double().log_softmax(-1), head_of(row)  # [width]
    for k in {1, min(3, width), min(70, width), min(4100, width)}:
        values, places = head.top_log_probs(torch.ones(1, 1), k)
        assert places[0].tolist() == sorted(range(width), key=lambda i: (-row[i].item(), i))[:k]
        torch.testing.assert_close(values[0].double(), wanted[places[0]], atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "strange", [[(4500, math.nan), (77, math.nan)], [(4500, math.inf)], "all", "none", "part"]
)
def test_the_most_probable_outputs_with_nan_and_infinity(kernels, strange):
    row = torch.randn(5000)
    if strange == "part":
        row[:4900] = -torch.inf  # a whole part of what is looked at together
    elif isinstance(strange, str):
        row[:] = torch.nan if strange == "all" else -torch.inf
    else:
        for place, value in strange:
            row[place] = value
    values, places = head_of(row).top_log_probs(torch.ones(1, 1), 3)
    first = sorted(range(5000), key=lambda i: (not math.isnan(row[i]), -row[i].item(), i))[:3]
    assert places[0].tolist() == first
    torch.testing.assert_close(values[0], row.log_softmax(-1)[first], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_most_probable_outputs_have_the_same_bits_in_any_company(kernels, dtype):
    native, x, before = (
        NativeLinear(layer(9000, 65, dtype).weight),
        torch.randn(2, 7, 65),
        torch.get_num_threads(),
    )
    values, places = native.top_log_probs(x, 5)
    wanted = native.product(x).log_softmax(-1)
    torch.testing.assert_close(values, wanted.gather(-1, places))
    assert torch.equal(places[..., 0], native.product(x).max(-1).indices)
    for i, row in enumerate(x.flatten(0, 1)):
        alone = native.top_log_probs(row, 5)
        assert torch.equal(alone[0], values.flatten(0, 1)[i]) and torch.equal(
            alone[1], places.flatten(0, 1)[i]
        )
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            again = native.top_log_probs(x, 5)
            assert torch.equal(again[0], values) and torch.equal(again[1], places), threads
    finally:
        torch.set_num_threads(before)
    assert native.top_log_probs(x[:0], 5)[0].shape == (0, 7, 5)


def test_linear_layers_of_a_module_become_native(kernels):
    class Other(nn.Linear):
        """A linear layer that does something else."""

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4).bfloat16()), Other(8, 8), nn.ReLU())
    half = nn.Linear(8, 8).half()  # a dtype that the library does not multiply
    assert make_native(model) == 2 and isinstance(model[0], NativeLinear)
    assert isinstance(model[1][0], NativeLinear) and type(model[2]) is Other
    assert make_native(nn.Sequential(half)) == 0


def to_groups_of_bytes(x: torch.Tensor) -> torch.Tensor:
    """Round inputs [rows, in] to 8 bits with a scale for each GROUP of them."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).flatten(1)[:, : x.shape[1]]


def without_ties(x: torch.Tensor) -> torch.Tensor:
    """Leave out inputs that are half-way between two bytes, as those of bf16 can be: either is right."""
    groups = F.pad(x.double(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    steps = groups / (groups.abs().amax(-1, keepdim=True) / 127)
    ties = ((steps.abs() % 1 - 0.5).abs() < 1e-4).flatten(1)[:, : x.shape[1]]
    assert ties.float().mean() < 0.01
    return x.masked_fill(ties, 0)


@pytest.mark.parametrize(("out", "inputs"), [(40, 7), (33, 64), (130, 96), (64, 33), (70, 200)])
def test_narrow_weights_are_bytes(kernels, out, inputs):
    random = torch.Generator().manual_seed(out)
    weight = torch.randn(out, inputs, generator=random).bfloat16()
    bias = torch.randn(out, generator=random)
    narrow, x = NativeLinear(weight, bias, narrow=True), torch.randn(30, inputs, generator=random) * 3 + 1
    assert (narrow.scales is not None) == (kernels != "generic")
    if narrow.scales is None:
        assert torch.equal(narrow.product(x), NativeLinear(weight, bias).product(x))
        return
    numbers, scales = to_bytes(weight)
    rounded = (numbers.double() - ZERO) * scales[:, None].double()  # [out, in]
    assert (rounded - weight).abs().le(scales[:, None] / 2 + 1e-6).all()
    x = without_ties(x.bfloat16().float() if rounds_inputs(torch.bfloat16) else x)
    read = x.double() if kernels == "amx_bf16" else to_groups_of_bytes(x.double())
    expected = read @ rounded.T + bias
    # AMX's bytes are raised by 192, and what is taken off again is rounded; elsewhere groups' sums are exact
    atol = (2e-3 if kernels == "amx_bf16" else 1e-5) * float(expected.std())
    torch.testing.assert_close(narrow.product(x).double(), expected, rtol=1e-3, atol=atol)
    for rows in (1, 2, 7, 12, 13):
        assert torch.equal(narrow.product(x[:rows]), narrow.product(x)[:rows])
    values, places = narrow.top_log_probs(x, 5)
    best = narrow.product(x).log_softmax(-1).topk(5)
    assert torch.equal(places, best.indices)
    torch.testing.assert_close(values, best.values)


def test_bytes_lose_little_of_inputs_of_very_different_sizes(kernels):
    """A group of inputs has a scale of its own, so that one large input costs its neighbours alone."""
    random = torch.Generator().manual_seed(3)
    weight, x = torch.randn(64, 512, generator=random).bfloat16(), torch.randn(8, 512, generator=random)
    x[:, 17] = 1000.0
    quiet = weight.clone()
    quiet[:, :GROUP] = 0  # what the other groups give
    narrow, exact = NativeLinear(quiet, narrow=True), x.double() @ quiet.double().T
    assert (narrow.product(x) - exact).std() < 0.02 * exact.std()


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_bytes_keep_what_is_not_finite_and_zeros(kernels, strange):
    narrow, x = NativeLinear(torch.ones(4, 130).bfloat16(), narrow=True), torch.zeros(3, 130)
    x[1, 100] = strange
    product = narrow.product(x)
    assert not product[1].isfinite().any() and not product[[0, 2]].any()


def test_inputs_of_another_width_are_an_error(kernels):
    native = NativeLinear(layer(6, 8, torch.float32).weight)
    for call in (native, native.product, lambda x: native.top_log_probs(x, 2)):
        for width in (0, 4, 16):
            with pytest.raises(ValueError, match=r"x: must be \[..., 8\], got \[3, "):
                call(torch.zeros(3, width))


def test_many_rows_are_those_of_few(kernels):
    """Threads take them in parts."""
    native = NativeLinear(layer(40, 24, torch.bfloat16).weight)
    x = torch.randn(500, 24)
    expected = torch.cat([native.product(part) for part in x.split(7)])
    assert torch.equal(native.product(x), expected)
    values, places = native.top_log_probs(x, 3)
    few = [native.top_log_probs(part, 3) for part in x.split(7)]
    assert torch.equal(values, torch.cat([one for one, _ in few]))
    assert torch.equal(places, torch.cat([one for _, one in few]))
