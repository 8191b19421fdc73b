"""Differences between outputs: where they are, and how sure the target was."""

import pytest
import torch

from drafttrain.evaluation import exactness
from drafttrain.evaluation.exactness import check_lossless, first_difference
from drafttrain.evaluation.measure import MeasurementLog, transformers_generate
from drafttrain.evaluation.metrics import MethodRun
from drafttrain.evaluation.prompts import Prompt, Task
from drafttrain.inference.proposer import NoProposer

TASKS = [
    Task("a", [Prompt("1", ["One?", "never put"]), Prompt("2", ["Two?"])], turns=2),
    Task("b", [Prompt("1", ["Three?"])]),
]


def test_equal_outputs(tiny_target):
    assert first_difference(tiny_target, [3, 4], [5, 6], [5, 6]) is None


def test_gap_is_that_of_a_plain_forward(tiny_target):
    prompt, expected = [7, 8, 9], [10, 11, 12, 13]
    found = first_difference(tiny_target, prompt, expected, [10, 11, 99])
    assert (found.position, found.expected, found.found) == (2, 12, 99)
    logits = tiny_target.model(torch.tensor([[7, 8, 9, 10, 11]])).logits[0, -1].float()
    values, tokens = logits.sort(descending=True)
    assert found.top2 == tokens[:2].tolist()
    assert found.gap == pytest.approx((values[0] - values[1]).item(), abs=1e-4)
    assert found.logit_std == pytest.approx(logits.std().item(), rel=1e-3)


@pytest.mark.parametrize("expected, found", [([5, 6], [5]), ([5], [5, 6])])
def test_one_output_may_end_early(tiny_target, expected, found):
    difference = first_difference(tiny_target, [3, 4], expected, found)
    assert difference.position == 1
    assert {difference.expected, difference.found} == {6, -1}


def test_lossless(tiny_target, tmp_path):
    turns = []
    log = MeasurementLog(tmp_path / "m", "key")
    result = check_lossless(tiny_target, NoProposer(), TASKS, 9, log, on_turn=lambda: turns.append(1))
    assert result == {"prompts": 3, "mismatches": 0, "dtype": "float32", "differences": []}
    assert len(turns) == 3  # first turns only


def test_mismatches_are_counted_by_prompt(tiny_target, tmp_path, monkeypatch):
    def lies_about_two(target):
        right, two = transformers_generate(target), TASKS[0].prompts[1].token_ids(target.tokenizer)

        def run(prompt_ids, max_new_tokens):
            output = right(prompt_ids, max_new_tokens)
            wrong = [*output.token_ids[:4], 3]
            return MethodRun(1.0, wrong) if prompt_ids == two else output

        return run

    monkeypatch.setattr(exactness, "transformers_generate", lies_about_two)
    result = check_lossless(tiny_target, NoProposer(), TASKS, 9, MeasurementLog(tmp_path / "m", "key"))
    assert (result["prompts"], result["mismatches"]) == (3, 1)
    [difference] = result["differences"]
    assert (difference["task"], difference["prompt"], difference["method"]) == ("a", "2", "transformers")
    assert difference["position"] == 4 and difference["found"] == 3 and difference["gap"] > 0
