"""The decode loop gives what transformers' greedy search gives, with any drafts."""

import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.inference.acceptance import AcceptanceRule, accept_greedy
from drafttrain.inference.decode import decode, decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.session import DRAFT_SLOTS, NOT_FINITE
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.c2t import Plain
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from tests.policies import EVERY_POLICY

NEW = 24
QUALITIES = {
    "perfect": lambda row, position: True,
    "wrong": lambda row, position: False,
    "half": lambda row, position: (3 * row + position) % 4 < 2,
    "random": lambda row, position: random.Random(row * 1000 + position).random() < 0.6,
}


@pytest.fixture(scope="session")
def texts(greedy, prompts):
    """Prompts with their greedy continuations by transformers; long enough for drafts to be
    accepted."""
    return lambda target: [prompt + greedy(target, prompt, NEW + 8) for prompt in prompts]


def test_the_reference_text_is_no_triviality(target, texts, prompts):
    for text, prompt in zip(texts(target), prompts):
        assert len(set(text[len(prompt) :])) > NEW // 2


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_chains_are_exact(target, texts, prompts, replay, quality, length, batch):
    drafter = replay(target, texts(target)[:batch], QUALITIES[quality])
    proposer = TreeProposer(drafter, ChainPolicy(length))
    outputs, stats = decode_all(target, proposer, prompts[:batch], NEW, stop=())
    for text, prompt, output in zip(texts(target), prompts, outputs):
        assert output == text[len(prompt) :][:NEW]
    assert stats.new_tokens == batch * NEW
    if quality == "perfect":
        assert stats.steps == batch * -(-(NEW - 1) // (length + 1))
    if quality == "wrong":
        assert stats.steps == batch * (NEW - 1)


@pytest.mark.parametrize("batch", [2, 3])
def test_without_drafts(target, texts, prompts, batch):
    outputs, stats = decode_all(target, NoProposer(), prompts[:batch], NEW, stop=())
    for text, prompt, output in zip(texts(target), prompts, outputs):
        assert output == text[len(prompt) :][:NEW]
    assert stats.accept_len == 1 and stats.verify_tokens == stats.tree_depths == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_trees_are_exact(target, texts, prompts, replay, random_trees, seed):
    drafter = replay(target, texts(target), QUALITIES["random"])
    outputs, stats = decode_all(target, random_trees(drafter, seed, width=4), prompts, NEW, stop=())
    for text, prompt, output in zip(texts(target), prompts, outputs):
        assert output == text[len(prompt) :][:NEW]
    assert stats.accept_len > 1.2  # or the test has no accepted branches in it


CURVE = CostCurve((1, 8, 64), (0.02, 0.025, 0.1))
COSTS = Costs(CostCurve((1,), (0.001,)), CURVE, CURVE, 60.0, (0.6,), AcceptanceCurve())


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("tree", ["chain:length=0", *EVERY_POLICY])
def test_every_policy_is_exact(llama, texts, prompts, greedy, replay, tree, batch):
    """Drafts are accepted and rejected, and rows end at different times, at a stop token or the limit."""
    stop = texts(llama)[0][len(prompts[0]) + 7]
    wanted = [greedy(llama, prompt, NEW, stop) for prompt in prompts[:batch]]
    drafter = replay(llama, texts(llama)[:batch], QUALITIES["half"])
    proposer = TreeProposer(drafter, parse_policy(tree, COSTS, Plain("P")))
    outputs, stats = decode_all(llama, proposer, prompts[:batch], NEW, stop={stop})
    assert outputs == wanted
    assert stats.accept_len == 1 if tree == "chain:length=0" else stats.accept_len > 1.2


class Charged(NoProposer):
    """Says that reading a prompt takes 100 seconds and an update 1."""

    def update(self, state, tokens, tapped, counts):
        self.model_seconds += 100.0 if tokens.shape[1] > 1 else 1.0


def test_the_drafters_seconds_are_those_of_steps(llama, prompts):
    """Not of prompts, nor of what another run does with the same proposer between two steps."""
    proposer, stats = Charged(), DecodeStats()
    steps = decode(llama, proposer, prompts[:1], 4, stop=(), stats=stats)
    next(steps), next(steps)
    decode_all(llama, proposer, prompts[2:3], 3, stop=())
    assert len(list(steps)) == 2 and stats.steps == 3
    assert stats.draft_model_seconds == 2  # the last step's update is left out


def test_a_tree_larger_than_the_cache_was_made_for(llama, texts, prompts, replay, random_trees):
    proposer = random_trees(replay(llama, texts(llama), QUALITIES["perfect"]), 0, width=90)
    steps = list(decode(llama, proposer, prompts, NEW, stop=()))
    assert max(steps[1].verified) > NEW + DRAFT_SLOTS
    for row, (text, prompt) in enumerate(zip(texts(llama), prompts)):
        assert [token for step in steps for token in step.tokens[row]] == text[len(prompt) :][:NEW]


def test_verified_logits_are_those_of_plain_forwards(target, texts, prompts, replay, random_trees):
    """Compared by value: equal argmaxes would not show a slightly wrong mask."""
    plain = [target.model(input_ids=torch.tensor([text])).logits[0] for text in texts(target)]
    position = [len(prompt) - 1 for prompt in prompts]  # of the root

    class Compare(AcceptanceRule):
        def __init__(self):
            self.compared, self.rows = 0, list(range(len(prompts)))

        def set_active(self, numbers):
            self.rows = list(numbers)

        def __call__(self, tree, logits):
            accepted = accept_greedy(tree, logits)
            for place, count in enumerate(accepted.counts.tolist()):
                row = self.rows[place]
                for node in accepted.path[place, :count]:
                    if position[row] < len(prompts[row]) + NEW - 1:  # the last path may go beyond the limit
                        expected = plain[row][position[row]]
                        torch.testing.assert_close(logits[place, node], expected, atol=2e-4, rtol=1e-4)
                        self.compared += 1
                    position[row] += 1
            return accepted

    drafter, compare = replay(target, texts(target), QUALITIES["half"]), Compare()
    decode_all(target, random_trees(drafter, 3, width=3), prompts, NEW, stop=(), accept=compare)
    assert compare.compared == len(prompts) * NEW


@pytest.mark.parametrize("limit", range(1, 10))
def test_the_length_limit_inside_a_draft(llama, texts, prompts, replay, limit):
    proposer = TreeProposer(replay(llama, texts(llama), QUALITIES["perfect"]), ChainPolicy(5))
    steps = list(decode(llama, proposer, prompts, limit, stop=()))
    for row, (text, prompt) in enumerate(zip(texts(llama), prompts)):
        assert [token for step in steps for token in step.tokens[row]] == text[len(prompt) :][:limit]
        assert [step.finish_reason[row] for step in steps] == [None] * (len(steps) - 1) + ["length"]
        assert max(step.verified[row] for step in steps) <= max(
            limit - 2, 0
        )  # nothing that could not be emitted


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("index", [0, 1, 3, 4, 7, 11])
def test_a_stop_token_inside_a_draft(target, texts, prompts, greedy, replay, quality, index):
    """Each row has this token at another place, or nowhere."""
    stop = texts(target)[0][len(prompts[0]) + index]
    wanted = [greedy(target, prompt, NEW, stop) for prompt in prompts]
    assert wanted[0][-1] == stop and len(wanted[0]) <= index + 1
    proposer = TreeProposer(replay(target, texts(target), QUALITIES[quality]), ChainPolicy(5))
    stats = DecodeStats()
    steps = list(decode(target, proposer, prompts, NEW, stop={stop}, stats=stats))
    for row, output in enumerate(wanted):
        assert [token for step in steps for token in step.tokens[row]] == output
        reasons = [step.finish_reason[row] for step in steps]
        last = max(i for i, step in enumerate(steps) if step.tokens[row])
        assert reasons[last] == ("stop" if output[-1] == stop else "length")
        assert set(reasons[:last] + reasons[last + 1 :]) <= {None}
        assert all(step.drafted[row] <= len(step.tokens[row]) for step in steps)
    assert stats.new_tokens == sum(map(len, wanted))


def test_the_targets_own_stop_tokens_are_the_default(llama, texts, prompts, monkeypatch):
    wanted = texts(llama)[0][len(prompts[0]) :][:NEW]
    monkeypatch.setattr(FrozenTarget, "eos_token_ids", {wanted[4]})
    assert decode_all(llama, NoProposer(), prompts[:1], NEW)[0] == [wanted[: wanted.index(wanted[4]) + 1]]


def test_counts_of_a_run_that_can_be_worked_out(llama, texts, prompts, replay):
    """Right at even distances from the prompt's end: chains of 3 offer right, wrong, right from an odd
    root."""
    start = len(prompts[0])
    drafter = replay(llama, texts(llama)[:1], lambda row, position: (position - start) % 3 != 0)
    stats = DecodeStats()
    steps = list(decode(llama, TreeProposer(drafter, ChainPolicy(4)), prompts[:1], 10, stop=(), stats=stats))
    # output token 0 from the prompt; then 1, 2 accepted, 3 is the target's, and so on; the last tree has room
    # for 2
    assert [len(step.tokens[0]) for step in steps] == [1, 3, 3, 3]
    assert [step.drafted[0] for step in steps] == [0, 2, 2, 2]
    assert [step.verified[0] for step in steps] == [0, 4, 4, 2]
    assert (stats.steps, stats.new_tokens, stats.verify_tokens, stats.tree_depths) == (3, 10, 10, 10)
    assert stats.offered == [3, 3, 2] and stats.granted == [3, 3, 0]
    assert stats.accept_len == 3 and stats.accept_rate == 0.9
    assert stats.prompts == 1 and stats.prompt_tokens == start
    assert 0 < stats.verify_seconds < stats.seconds and 0 < stats.prefill_seconds < stats.seconds


def test_rows_do_not_depend_on_their_batch(llama, texts, prompts, replay):
    def run(rows):
        drafter = replay(
            llama, [texts(llama)[row] for row in rows], lambda row, p: QUALITIES["half"](rows[row], p)
        )
        proposer = TreeProposer(drafter, ChainPolicy(4))
        steps = list(decode(llama, proposer, [prompts[row] for row in rows], NEW, stop=()))
        return [[step.tokens[i] for step in steps if step.tokens[i]] for i in range(len(rows))]

    together = run([0, 1, 2, 3])
    assert [together[row] for row in (2, 0)] == run([2, 0])
    assert [together[3]] == run([3])


@pytest.mark.parametrize("max_rows", [1, 2, 3])
@pytest.mark.parametrize("tree", ["chain:length=0", "chain:length=3", "eagle2:top_k=2,max_depth=3,total=5"])
def test_prompts_that_wait_take_the_place_of_those_that_end(
    llama, texts, prompts, greedy, replay, tree, max_rows
):
    """With places for fewer prompts than there are, each has the text that it has alone; some end at once."""
    stop = texts(llama)[1][len(prompts[1])]
    wanted = [greedy(llama, prompt, NEW, stop) for prompt in prompts]
    assert len(wanted[1]) == 1
    proposer = TreeProposer(replay(llama, texts(llama), QUALITIES["half"]), parse_policy(tree, COSTS))
    steps = list(decode(llama, proposer, prompts, NEW, stop={stop}, max_rows=max_rows))
    assert [[token for step in steps for token in step.tokens[row]] for row in range(4)] == wanted
    assert all(sum(map(bool, step.tokens)) <= max_rows for step in steps)
    # nobody waits for longer than needed
    begun = [next(i for i, step in enumerate(steps) if step.tokens[row]) for row in range(4)]
    for i in range(max(begun)):
        assert i in begun or len(steps[i].rows) == max_rows
    assert sum(reason is not None for step in steps for reason in step.finish_reason) == 4


def test_positions_are_never_exceeded(replay):
    """GPT-2 looks positions up in a table, so a draft beyond the last one would fail."""
    config = GPT2Config(
        vocab_size=97,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    target = FrozenTarget(GPT2LMHeadModel(config).eval(), None, "gpt2", tapped_blocks=[0, 1])
    prompt = [5] * 20
    [text], _ = decode_all(target, NoProposer(), [prompt], 12, stop=())
    proposer = TreeProposer(replay(target, [prompt + text], QUALITIES["half"]), ChainPolicy(7))
    assert decode_all(target, proposer, [prompt], 12, stop=())[0] == [text]
    # a row that has finished must not run on while another is still busy
    drafter = replay(target, [prompt + text] * 2, lambda row, position: row == 0)
    assert (
        decode_all(target, TreeProposer(drafter, ChainPolicy(7)), [prompt] * 2, 12, stop=())[0] == [text] * 2
    )
    with pytest.raises(UserError, match="prompt 0: .* the 32 positions of gpt2, got 21"):
        decode_all(target, proposer, [[5] * 21], 12)


@pytest.mark.parametrize(
    "bad, new, message",
    [
        ([[3], []], 4, "prompt 1: must have at least one token, got none"),
        ([[3]], 0, "max_new_tokens: must be at least 1, got 0"),
    ],
)
def test_bad_requests(llama, bad, new, message):
    with pytest.raises(UserError, match=message):
        decode_all(llama, NoProposer(), bad, new)


def test_nan_is_an_error(tiny_llama, llama, monkeypatch):
    monkeypatch.setattr(llama, "head", lambda final: torch.full((*final.shape[:-1], 512), torch.nan))
    for stop in ((), (NOT_FINITE,)):  # -1 in a config stands for no stop token
        with pytest.raises(UserError, match="NaN"):
            decode_all(llama, NoProposer(), [[3]], 4, stop=stop)


def test_a_stream_can_be_left_early(llama, texts, prompts, replay):
    proposer = TreeProposer(replay(llama, texts(llama)[:1], QUALITIES["half"]), ChainPolicy(3))
    hooks = len(llama.base._forward_hooks)
    steps = decode(llama, proposer, prompts[:1], NEW, stop=())
    next(steps), next(steps)
    assert torch.is_grad_enabled()  # the loop's own setting stays inside it
    steps.close()
    assert len(llama.base._forward_hooks) == hooks
    assert (
        decode_all(llama, proposer, prompts[:1], NEW, stop=())[0][0]
        == texts(llama)[0][len(prompts[0]) :][:NEW]
    )


@torch.no_grad()
def test_edd_drafts_the_same_in_every_batch(tiny_llama, texts, prompts):
    """The real drafter through the real loop: exact, and each row's drafts are what they are alone."""
    target = FrozenTarget(*tiny_llama, "llama")
    settings = DrafterConfig(tapped_blocks=[-2, -4], layers=2)
    drafter = EddModel(EddConfig.for_target(target, settings, 400)).eval()
    drafter.initialize_from(target, settings, torch.arange(100, 500))
    proposer = TreeProposer(drafter, ChainPolicy(3))

    class Record(AcceptanceRule):
        def __init__(self, rows):
            self.drafts, self.places = [[] for _ in rows], list(range(len(rows)))

        def set_active(self, numbers):
            self.places = list(numbers)

        def __call__(self, tree, logits):
            for i, place in enumerate(self.places):
                self.drafts[place].append(tree.tokens[i, : tree.sizes[i]].tolist())
            return accept_greedy(tree, logits)

    def run(rows):
        record = Record(rows)
        outputs, _ = decode_all(target, proposer, [prompts[row] for row in rows], NEW, stop=(), accept=record)
        return outputs, record.drafts

    outputs, together = run(range(4))
    assert outputs == [text[len(prompt) :][:NEW] for text, prompt in zip(texts(target), prompts)]
    assert len({token for tree in together[0] for token in tree[1:]}) > 5
    for row in range(4):
        [output], [alone] = run([row])
        assert output == outputs[row]
        assert alone == together[row]
