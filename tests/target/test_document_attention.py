"""Packed rows in one forward give what each document gives by itself, whichever path attention takes."""

import pytest
import torch

from drafttrain.target.document_attention import causal_document_mask, document_stretches, usable
from drafttrain.target.frozen import FrozenTarget
from tests.target.test_probe import EXACT, tiny

CLOSE = dict(rtol=1e-4, atol=1e-4)
ROWS = ([9, 1, 12, 3], [1, 1, 1, 20], [25])  # lengths of documents; the rest of a row of 25 is padding


def starts_of(lengths: list[int], width: int = 25) -> list[int]:
    starts = [start for i, n in enumerate(lengths) for start in [sum(lengths[:i])] * n]
    return starts + list(range(len(starts), width))


STARTS = torch.tensor([starts_of(lengths) for lengths in ROWS])


def check(target: FrozenTarget) -> None:
    target.tap([1])
    ids = torch.randint(3, 160, STARTS.shape, generator=torch.Generator().manual_seed(0))
    packed = target.encode(ids, STARTS)
    assert packed.final.shape == (*ids.shape, target.hidden_size)
    for row, lengths in enumerate(ROWS):
        at = 0
        for n in lengths:
            with torch.no_grad():
                alone = target.base(input_ids=ids[row : row + 1, at : at + n], use_cache=False)
            tapped = target._states(alone.last_hidden_state).tapped[0]
            torch.testing.assert_close(packed.final[row, at : at + n], alone.last_hidden_state[0], **CLOSE)
            torch.testing.assert_close(packed.tapped[row, at : at + n], tapped, **CLOSE)
            at += n


@pytest.mark.parametrize("name", EXACT)
def test_packed_equals_alone(name):
    check(tiny(name, EXACT[name]))


def test_only_plain_causal_sdpa_takes_the_short_way():
    ways = {name: usable(tiny(name, settings).config) for name, settings in EXACT.items()}
    assert ways == dict.fromkeys(EXACT, False) | dict.fromkeys(("llama", "qwen2", "qwen3", "gpt2"), True)
    eager = tiny("llama", EXACT["llama"])
    eager.model.set_attn_implementation("eager")
    assert not usable(eager.config)
    check(eager)


def test_implementation_is_restored_after_an_error(monkeypatch):
    target = tiny("llama", EXACT["llama"])

    def broken(**kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target.base, "forward", broken)
    with pytest.raises(RuntimeError):
        target.encode(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    assert target.config._attn_implementation == "sdpa"


def test_stretches():
    assert document_stretches(STARTS) == [
        (0, 0, 9, False), (0, 9, 10, True), (0, 10, 22, False), (0, 22, 25, False),
        (1, 0, 3, True), (1, 3, 23, False), (1, 23, 25, True),
        (2, 0, 25, False),
    ]  # fmt: skip


def test_causal_document_mask():
    document = torch.tensor([starts_of([3, 2], 6)])
    expected = [[document[0, q] == document[0, k] and k <= q for k in range(6)] for q in range(6)]
    assert torch.equal(causal_document_mask(document), torch.tensor([expected]))
