"""The dtype in which transformers is measured: what is tried, what is chosen, kept and loaded."""

import pytest
import torch

from drafttrain.evaluation import stock as module
from drafttrain.evaluation.metrics import MethodRun
from drafttrain.evaluation.stock import PROMPT, convert, load_stock
from drafttrain.kernels import dtype as probe
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.utils.files import read_json

IDS = list(range(3, 203))


@pytest.fixture
def rates(monkeypatch):
    """Decoding takes as long as these tokens per second say; returns what was asked of each dtype."""
    asked: dict[str, list[tuple[int, int]]] = {}

    def stub(**tokens_per_second: float) -> dict[str, list[tuple[int, int]]]:
        def generate(target, model):
            def run(prompt_ids, max_new_tokens):
                name = probe.dtype_name(model.dtype)
                asked.setdefault(name, []).append((len(prompt_ids), max_new_tokens))
                return MethodRun(max_new_tokens / tokens_per_second[name], [0] * max_new_tokens)

            return run

        asked.clear()
        monkeypatch.setattr(module, "transformers_generate", generate)
        return asked

    return stub


@pytest.fixture
def probed(monkeypatch):
    """Milliseconds of 128 rows in both dtypes; None: it was too slow to be timed."""

    def stub(float32: float, bfloat16: float | None) -> None:
        ms = {"float32": {1: 1.0, 128: float32}, "bfloat16": {1: 1.0}}
        if bfloat16 is not None:
            ms["bfloat16"][128] = bfloat16
        monkeypatch.setattr(probe, "timed", lambda *sizes: probe.Timings(ms))

    return stub


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
@pytest.mark.parametrize("best", ["float32", "bfloat16"])
def test_the_faster_dtype_with_the_weights_of_the_target(own, best, tiny_target_folder, rates, tmp_path):
    target = load_target(str(tiny_target_folder), dtype=own, device="cpu")
    tried = rates(**{"float32": 0.5, "bfloat16": 0.5, best: 100.0})
    found = load_stock(target, True, IDS, tmp_path / "out")
    assert found.dtype == best and found.model is not target.model
    assert found.tokens_per_second == {"float32": 0.5, "bfloat16": 0.5, best: 100.0}
    slow = "bfloat16" if best == "float32" else "float32"
    assert tried[slow] == [(PROMPT, 4)]  # a slow one is asked for little
    assert [tokens for _, tokens in tried[best]] == [4, 8, 16, 32, 64]
    expected = convert(load_stock_model(target), getattr(torch, best))
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight), name
    found.model.generate(torch.tensor([IDS[:9]]), max_new_tokens=2)
    assert target.model.dtype == getattr(torch, own)  # the target itself is left alone

    rates()  # nothing more can be measured
    again = load_stock(target, True, IDS, tmp_path / "out")
    assert again.describe() == found.describe() and again.model.dtype == found.model.dtype
    record = tmp_path / "out" / module.FILE
    assert read_json(record)["dtype"] == best
    record.write_text(record.read_text().replace(read_json(record)["made_for"], "another"))
    with pytest.raises(KeyError, match="float32|bfloat16"):  # of another machine: it would be measured again
        load_stock(target, True, IDS, tmp_path / "out")


@pytest.mark.parametrize(("float32", "bfloat16", "tried"), [(1, None, ["float32"]), (4, 1, ["bfloat16"])])
def test_a_hopeless_dtype_is_not_tried(float32, bfloat16, tried, tiny_target, rates, probed):
    rates(float32=5.0, bfloat16=5.0)
    probed(float32, bfloat16)
    assert list(load_stock(tiny_target, True, IDS).tokens_per_second) == tried


def test_an_explicit_dtype_is_kept(tiny_target, rates, tmp_path):
    rates()
    found = load_stock(tiny_target, False, IDS, tmp_path)
    assert found.describe() == {"dtype": "float32", "tokens_per_second": {}} and not list(tmp_path.iterdir())


def test_a_target_without_files_is_its_own_rival(tiny_llama, rates):
    from drafttrain.target_lm.model import FrozenTarget

    rates()
    model, tokenizer = tiny_llama
    found = load_stock(FrozenTarget(model, tokenizer, "tiny"), True, IDS)
    assert found.model is model and found.dtype == "float32"


def test_positions_are_not_rounded(tiny_target):
    model = convert(load_stock_model(tiny_target), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
