"""A trace against decoding without one, and against the target asked token by token."""

import json
from dataclasses import replace

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.inference.decode import decode_all
from drafttrain.inference.per_sequence import PerSequence
from drafttrain.inference.proposer import NoProposer
from drafttrain.report.trace import Trace, trace
from drafttrain.run.cli import main
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.trees.lists import tree_of_lists
from drafttrain.utils.errors import UserError

PROMPT = "Could you please explain how the lazy dog makes a model faster?"
TREES = ["chain:length=3", "eagle2:top_k=4,max_depth=3,total=9", "vct:width=3,depth=2", "ngram", "prophet"]


@pytest.fixture(scope="module")
def loaded(tiny_bundle):
    return load_bundle(tiny_bundle, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def ids(loaded):
    return loaded.target.tokenizer(PROMPT)["input_ids"]


class Prophet(PerSequence):
    """Drafts what decoding will say, wrong siblings before it, and nonsense from depth 3 on."""

    def __init__(self, output: list[int], begin: int):
        self.output, self.begin = output, begin  # tokens of the prompt

    def new_state(self, batch, max_len):
        return [[] for _ in range(batch)]

    def update(self, state, tokens, tapped, counts):
        state[0] += tokens[0, : int(counts[0])].tolist()

    def propose(self, state, root):
        at = len(state[0]) - self.begin + 1  # of the token after the root in the output
        right = [*self.output[at : at + 2], 0, 0][:2]
        wrong = [(token + 1) % 512 for token in right]
        # two siblings hold the first right token, and only the second of them has children
        tokens = [int(root), wrong[0], right[0], right[0], wrong[1], wrong[1], right[1], 5, 6]
        return tree_of_lists([tokens], [[-1, 0, 0, 0, 1, 3, 3, 5, 6]], root.device)


def prophet(loaded, ids) -> Prophet:
    [output], _ = decode_all(loaded.target, NoProposer(), [ids], 40)
    return Prophet(output, len(ids))


def greedy_next(target, ids: list[int]) -> int:
    """The target's choice after some tokens, by the bare model."""
    with torch.no_grad():
        return int(target.model(torch.tensor([ids])).logits[0, -1].argmax())


@pytest.mark.parametrize("tree", TREES)
def test_trace_is_what_decoding_does(loaded, ids, tree):
    def proposer():
        return prophet(loaded, ids) if tree == "prophet" else loaded.proposer(tree)

    [output], stats = decode_all(loaded.target, proposer(), [ids], 24)
    found = trace(loaded.target, proposer(), ids, 24)
    steps = found.iterations[1:]
    assert [token for step in found.iterations for token in step.emitted] == output
    assert found.text == loaded.target.tokenizer.decode(output, skip_special_tokens=True)
    assert len(steps) == stats.steps and found.accept_len == pytest.approx(stats.accept_len)
    assert sum(len(step.tokens) - 1 for step in steps) == stats.verify_tokens
    assert sum(max(step.depths) for step in steps) == stats.tree_depths  # cut where the output ends
    assert found.prompt_tokens == len(ids) and found.iterations[0].tokens == []
    accepted = [len(step.path) - 1 for step in steps]
    assert accepted == [step.drafted for step in steps] and sum(stats.granted) == sum(accepted)


def test_accepted_path_is_the_targets_own(loaded, ids):
    found = trace(loaded.target, prophet(loaded, ids), ids, 16)
    text = list(ids)
    for step in found.iterations:
        if step.tokens:
            walked = [[0]]
            while True:  # down the tree, as long as a child is the target's choice
                drafted = [step.tokens[i] for i in walked[-1][1:]]
                wanted = greedy_next(loaded.target, text + drafted)
                below = [
                    [*path, i]
                    for path in walked
                    for i, parent in enumerate(step.parents)
                    if parent == path[-1] and step.tokens[i] == wanted
                ]
                if not below:
                    break
                walked = below
            assert step.tokens[0] == text[-1] and step.path in walked
            assert len(step.path) < 3 or step.path == [0, 3, 6]
        text += step.emitted
    assert [step.drafted for step in found.iterations[:4]] == [0, 2, 2, 2]


def test_probabilities_are_the_drafters(loaded, ids):
    step = trace(loaded.target, loaded.proposer("chain:length=2"), ids, 8).iterations[1]
    assert step.log_probs[0] == 0 and all(-100 <= p < 0 for p in step.log_probs[1:])


def test_nothing_of_a_proposer_is_hidden(loaded, ids):
    def branches() -> SelfDraft:
        config = SelfDraftConfig(branches=2, branch_length=3, gram=2, budget=6)
        return SelfDraft(
            config, loaded.target.vocab_size, loaded.target.tokenizer.all_special_ids, None, None
        )

    for make in (branches, lambda: HybridProposer(branches(), loaded.proposer("chain:length=2"), 2.0, 0.2)):
        [output], stats = decode_all(loaded.target, make(), [ids], 24)
        found = trace(loaded.target, make(), ids, 24)
        assert [token for step in found.iterations for token in step.emitted] == output
        assert (
            len(found.iterations) - 1 == stats.steps
        )  # the same drafts were accepted: it had learned as much


def test_written_and_read(loaded, ids, tmp_path):
    found = trace(loaded.target, loaded.proposer(TREES[1]), ids, 8)
    found.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == found


def no_version(value):
    return {**value, "format_version": 99}


def no_tree(value):
    value["iterations"][1]["parents"][1:] = [7] * (len(value["iterations"][1]["parents"]) - 1)
    return value


def short(value):
    value["iterations"][1]["texts"].pop()
    return value


def other_path(value):
    value["iterations"][1]["path"] = [0, 99]
    return value


def lost_path(value):
    value["iterations"][1]["path"] = []
    return value


def no_text(value):
    value["iterations"][1]["pieces"][0] = None
    return value


def no_probability(value):
    value["iterations"][1]["log_probs"][1] = None
    return value


def no_drafts(value):
    value["iterations"][0]["drafted"] = -1
    return value


@pytest.mark.parametrize(
    "change, expected",
    [
        (no_version, "no trace of format 1"),
        (no_tree, "a node comes before its parent"),
        (short, "a tree is incomplete"),
        (other_path, "damaged"),
        (lost_path, "a path is not that of the drafted tokens"),
        (no_text, "a text is none"),
        (no_probability, "damaged"),
        (no_drafts, "damaged"),
        (lambda value: {**value, "prompt": 5}, "damaged"),
        (lambda value: {**value, "more": 1}, "damaged"),
        (lambda value: [], "no trace of format 1"),
    ],
)
def test_damage_is_an_error(loaded, ids, tmp_path, change, expected):
    place = tmp_path / "trace.json"
    trace(loaded.target, loaded.proposer(TREES[0]), ids, 6).save(place)
    place.write_text(json.dumps(change(json.loads(place.read_text()))))
    with pytest.raises(UserError, match=expected) as caught:
        Trace.load(place)
    assert "\n" not in str(caught.value) and "drafttrain report --prompt" in str(caught.value)


def test_command(tiny_bundle, tmp_path, capsys):
    out = tmp_path / "new" / "trace.json"
    words = [
        "report",
        "--bundle",
        str(tiny_bundle),
        "--dtype",
        "float32",
        "--prompt",
        PROMPT,
        "--trace",
        str(out),
    ]
    assert main([*words, "--tree", TREES[0], "--max-new-tokens", "10"]) == 0
    found = Trace.load(out)
    assert (found.prompt, found.tree, found.dtype) == (PROMPT, TREES[0], "float32")
    assert f"{len(found.iterations)} iterations" in capsys.readouterr().out
    assert main([*words[:-1], str(tmp_path)]) == 2 and "is a folder" in capsys.readouterr().err
    assert replace(found, iterations=found.iterations[:1]).accept_len == 0
