"""Differences between outputs: where they are, and how sure the target was."""

import dataclasses

import pytest
import torch

from drafttrain.data.prompts import Prompt, Task
from drafttrain.evaluation import exactness
from drafttrain.evaluation.exactness import check_lossless, first_difference
from drafttrain.evaluation.measure import MeasurementLog, generate_batch
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.target_lm import stock_masks
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.stock_masks import allowed_slots
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.lists import tree_of_lists
from drafttrain.utils.errors import UserError

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
    assert found.below_best == pytest.approx((values[0] - logits[[12, 99]].min()).item(), abs=1e-4)
    assert not found.is_tie() and found.gap < found.below_best
    assert 0 < found.noise < 1e-4 * found.logit_std  # fp32
    assert dataclasses.replace(found, below_best=found.noise).is_tie()
    assert not dataclasses.replace(found, below_best=1.01 * found.noise).is_tie()
    assert found.gap == pytest.approx((values[0] - values[1]).item(), abs=1e-4)
    assert found.logit_std == pytest.approx(logits.std().item(), rel=1e-3)


@pytest.fixture
def tiny_bf16(tiny_target_folder):
    return load_target(str(tiny_target_folder), dtype="bfloat16", device="cpu")


def blind_to_branches(lengths, ancestors, view):
    """Every node sees all nodes before it, siblings included."""
    return allowed_slots(lengths, torch.ones_like(ancestors).tril(), view)


def verified_beside_a_sibling(target, prompt: list[int], text: list[int], i: int) -> int:
    """The token that greedy verification takes after `text[: i + 1]` where `text[i]` is the second draft."""
    before = [*prompt, *text[:i]]
    cache = target.new_cache(1, len(before) + 2)
    order = torch.arange(len(before) - 1)
    target.forward(cache, torch.tensor([before[:-1]]), order, order[:, None] >= order)
    cache.commit(order[None], torch.tensor([len(order)]))
    tokens = [before[-1], (text[i] + 7) % target.vocab_size, text[i]]
    tree = tree_of_lists([tokens], [[-1, 0, 0]], target.device)
    states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
    return target.head(states.final)[0, 2].argmax().item()


@torch.no_grad()
def differences_of_trees(target) -> list[exactness.Difference]:
    """Where verification of a draft that has a sibling departs from plain decoding, in eight answers."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(8):
        prompt = torch.randint(3, target.vocab_size, (9,), generator=generator).tolist()
        [text] = decode_all(target, NoProposer(), [prompt], 16)[0]
        for i in range(len(text) - 1):
            drafted = [*text[: i + 1], verified_beside_a_sibling(target, prompt, text, i)]
            found.append(first_difference(target, prompt, text[: i + 2], drafted))
    return [difference for difference in found if difference]


def test_a_wrong_mask_is_no_tie(tiny_bf16, monkeypatch):
    assert all(difference.is_tie() for difference in differences_of_trees(tiny_bf16))
    monkeypatch.setattr(stock_masks, "allowed_slots", blind_to_branches)
    wrong = differences_of_trees(tiny_bf16)
    bugs = [difference for difference in wrong if not difference.is_tie()]
    assert len(wrong) > 20 and len(bugs) > 0.8 * len(wrong)


@pytest.mark.parametrize("expected, found", [([5, 6], [5]), ([5], [5, 6])])
def test_one_output_may_end_early(tiny_target, expected, found):
    difference = first_difference(tiny_target, [3, 4], expected, found)
    assert difference.position == 1
    assert {difference.expected, difference.found} == {6, -1}
    assert difference.below_best is None and not difference.is_tie()


def test_lossless(tiny_target, tmp_path):
    turns = []
    log = MeasurementLog(tmp_path / "m", "key")
    result = check_lossless(tiny_target, NoProposer(), TASKS, 9, log, on_turn=lambda: turns.append(1))
    assert result == {
        **{"prompts": 3, "mismatches": 0, "transformers_mismatches": 0},
        **{"dtype": "float32", "differences": []},
    }
    assert len(turns) == 3  # first turns only


def test_batches_and_resuming(tiny_target, tmp_path, monkeypatch):
    """More prompts than a batch, of unequal length; what the log holds is not decoded again."""
    task = Task("c", [Prompt(str(i), [f"Why {'very ' * i}?"]) for i in range(11)])
    log = MeasurementLog(tmp_path / "m", "key")
    proposer = TreeProposer(Guessing(tiny_target.vocab_size), ChainPolicy(3))
    result = check_lossless(tiny_target, proposer, [task], 9, log)
    assert (result["prompts"], result["mismatches"]) == (11, 0)
    monkeypatch.setattr(exactness, "decode_all", None)
    again = check_lossless(tiny_target, proposer, [task], 9, MeasurementLog(tmp_path / "m", "key"))
    assert again == result
    lines = (tmp_path / "m").read_text().splitlines(keepends=True)
    (tmp_path / "m").write_text("".join(lines[:3] + lines[4:]))  # a line is removed by hand
    monkeypatch.undo()
    for _ in range(2):  # the one that is missing is added, and no other twice
        log = MeasurementLog(tmp_path / "m", "key")
        assert check_lossless(tiny_target, proposer, [task], 9, log) == result
    assert len((tmp_path / "m").read_text().splitlines()) == len(lines)


def test_a_log_that_two_processes_wrote_is_refused(tiny_target, tmp_path):
    check_lossless(tiny_target, NoProposer(), TASKS, 9, MeasurementLog(tmp_path / "m", "key"))
    lines = (tmp_path / "m").read_text().splitlines(keepends=True)
    (tmp_path / "m").write_text("".join([*lines, lines[1]]))
    with pytest.raises(
        UserError, match=rf"m: line {len(lines) + 1}: must not repeat an earlier line, got prompt"
    ):
        MeasurementLog(tmp_path / "m", "key")


class Guessing(Drafter):
    """Drafts at random."""

    def __init__(self, size: int):
        self.draft_vocab_size = size

    def new_state(self, batch, max_len):
        return None

    def update(self, state, tokens, tapped, counts):
        pass

    def expand(self, state, tree, frontier):
        return torch.randn(*frontier.shape, self.draft_vocab_size).log_softmax(-1)

    def to_target(self, ids):
        return ids


def test_mismatches_are_counted_by_prompt(tiny_target, tmp_path, monkeypatch):
    two = TASKS[0].prompts[1].token_ids(tiny_target.tokenizer)

    def lies_about_two(model, target, prompts, max_new_tokens):
        rows = generate_batch(model, target, prompts, max_new_tokens)
        return [[*row[:4], 3] if prompt == two else row for prompt, row in zip(prompts, rows)]

    monkeypatch.setattr(exactness, "generate_batch", lies_about_two)
    result = check_lossless(tiny_target, NoProposer(), TASKS, 9, MeasurementLog(tmp_path / "m", "key"))
    assert [result[key] for key in ("prompts", "mismatches", "transformers_mismatches")] == [3, 0, 1]
    [difference] = result["differences"]
    assert (difference["task"], difference["prompt"], difference["method"]) == ("a", "2", "transformers")
    assert difference["position"] == 4 and difference["found"] == 3 and difference["gap"] > 0


def test_a_draft_that_changes_the_text_is_a_mismatch(tiny_target, tmp_path, monkeypatch):
    def decoded(target, proposer, prompts, max_new_tokens):
        rows, stats = decode_all(target, proposer, prompts, max_new_tokens)
        if not isinstance(proposer, NoProposer):
            rows = [[*row[:4], (row[4] + 1) % target.vocab_size] for row in rows]
        return rows, stats

    monkeypatch.setattr(exactness, "decode_all", decoded)
    proposer = TreeProposer(Guessing(tiny_target.vocab_size), ChainPolicy(3))
    result = check_lossless(tiny_target, proposer, TASKS, 9, MeasurementLog(tmp_path / "m", "key"))
    assert [result[key] for key in ("prompts", "mismatches", "transformers_mismatches")] == [3, 3, 0]
    assert {difference["method"] for difference in result["differences"]} == {"drafting"}
