"""Matrices in int8: what is stored, and what is read."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafttrain.drafters.int8 import HEAD, int8_names, int8_rows, with_int8
from drafttrain.drafters.weights import NUMBERS, SCALES, read_tensors
from drafttrain.utils.errors import UserError


def test_numbers_and_scales():
    """Each number is off by at most half a step of its row; what was rounded stays."""
    head = (
        torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    )
    head[7] = 0
    numbers, scales = int8_rows(head)
    assert (
        numbers.dtype == torch.int8
        and scales.shape == (40,)
        and torch.equal(scales, scales.bfloat16().float())
    )
    assert (numbers.abs().amax(1) == torch.where(torch.arange(40) == 7, 0, 127)).all()
    rounded = numbers.float() * scales[:, None]
    largest = head.abs().amax(1, keepdim=True)
    # half a step, and a largest number whose scale bf16 has rounded down
    assert ((rounded - head).abs() <= largest * (0.5 / 127 + 2**-9) * 1.001).all()
    again = int8_rows(rounded)
    assert torch.equal(again[0], numbers) and torch.equal(again[1], scales)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, []),
        ({"head_dtype": "int8"}, ["lm_head.weight"]),
        ({"layers_dtype": "int8"}, ["fc.weight", "layers.0.k_proj.weight"]),
        (
            {"head_dtype": "int8", "layers_dtype": "int8"},
            ["fc.weight", "layers.0.k_proj.weight", "lm_head.weight"],
        ),
    ],
)
def test_which_weights_are_int8(config, names):
    """No norm, no bias, no embeddings, no map of the draft vocabulary."""
    shapes = {"embed_tokens.weight": (9, 4), "fc.weight": (4, 8), "draft_to_target": (5,)}
    shapes |= {"layers.0.k_proj.weight": (2, 4), "layers.0.k_proj.bias": (2,), "norm.weight": (4,)}
    tensors = {name: torch.zeros(shape) for name, shape in {**shapes, "lm_head.weight": (5, 4)}.items()}
    assert int8_names(tensors, config) == names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_file_with_int8_matrices(dtype, tmp_path):
    rows = torch.randn(30, 16, generator=torch.Generator().manual_seed(1))
    tensors = {HEAD: rows, "fc.weight": torch.ones(3, 2), "layers.0.k_proj.weight": rows[:4]}
    stored = with_int8(tensors, [HEAD, "layers.0.k_proj.weight"], dtype)
    matrices = ["lm_head", "layers.0.k_proj"]
    assert stored.keys() == {"fc.weight", *(name + end for name in matrices for end in (NUMBERS, SCALES))}
    assert {stored[name + SCALES].dtype for name in matrices} == {dtype}
    save_file(stored, tmp_path / "file.safetensors")
    read = read_tensors(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys() and torch.equal(read["fc.weight"], tensors["fc.weight"])
    for name in matrices:
        numbers, scales = int8_rows(tensors[f"{name}.weight"])
        assert torch.equal(read[f"{name}.weight"], numbers.float() * scales[:, None])


@pytest.mark.parametrize("scales", [None, torch.ones(3), torch.tensor(1.0)])
def test_numbers_without_scales(scales, make_target, make_drafter, tmp_path):
    target = make_target()
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = with_int8(read_tensors(file), [HEAD], torch.float32)
    if scales is None:
        del tensors["lm_head.scales"]
    else:
        tensors["lm_head.scales"] = scales
    save_file(tensors, file)
    with pytest.raises(SafetensorError, match="lm_head.int8 without lm_head.scales for its rows"):
        read_tensors(file)
    with pytest.raises(
        UserError, match="cannot be loaded as a drafter .*lm_head.int8 without lm_head.scales"
    ):
        type(drafter).load(tmp_path, target)
