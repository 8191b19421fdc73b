"""Heads in int8: what is stored, and what is read."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafttrain.drafters.int8 import int8_rows, with_int8_head
from drafttrain.drafters.weights import HEAD, NUMBERS, SCALES, read_tensors
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_file_with_an_int8_head(dtype, tmp_path):
    tensors = {
        HEAD: torch.randn(30, 16, generator=torch.Generator().manual_seed(1)),
        "fc.weight": torch.ones(3, 2),
    }
    stored = with_int8_head(tensors, dtype)
    assert stored.keys() == {NUMBERS, SCALES, "fc.weight"} and stored[SCALES].dtype == dtype
    save_file(stored, tmp_path / "file.safetensors")
    read = read_tensors(tmp_path / "file.safetensors")
    numbers, scales = int8_rows(tensors[HEAD])
    assert read.keys() == tensors.keys() and torch.equal(read["fc.weight"], tensors["fc.weight"])
    assert torch.equal(read[HEAD], numbers.float() * scales[:, None])


@pytest.mark.parametrize("scales", [None, torch.ones(3), torch.tensor(1.0)])
def test_numbers_without_scales(scales, make_target, make_drafter, tmp_path):
    target = make_target()
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = with_int8_head(read_tensors(file), torch.float32)
    if scales is None:
        del tensors[SCALES]
    else:
        tensors[SCALES] = scales
    save_file(tensors, file)
    with pytest.raises(SafetensorError, match="lm_head.int8 without lm_head.scales for its rows"):
        read_tensors(file)
    with pytest.raises(
        UserError, match="cannot be loaded as a drafter .*lm_head.int8 without lm_head.scales"
    ):
        type(drafter).load(tmp_path, target)
