"""Sessions: rows that are forked go on as if each had been encoded by itself."""

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.inference.acceptance import AcceptMatching, RejectionSampling, accept_greedy
from drafttrain.inference.decode import prefill, propose, update, verify
from drafttrain.inference.sampling import SamplingParams
from drafttrain.inference.session import DRAFT_SLOTS, NOT_FINITE
from drafttrain.kernels.linear import is_available
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
ROOTS = [5, 9, 5]  # what follows in each fork


@pytest.fixture(scope="module")
def loaded(tiny_bundle):
    return load_bundle(tiny_bundle, dtype="float32", device="cpu")


def step(session):
    verified = verify(session, propose(session), accept_greedy)
    update(session, verified)
    return verified


@pytest.mark.skipif(not is_available(), reason="torch's operators round rows of a batch differently")
@pytest.mark.parametrize("tree", ["chain:length=3", "eagle2:top_k=2,max_depth=2,total=5"])
def test_forked_rows_are_fresh_ones(loaded, tree):
    target, proposer = loaded.target, loaded.proposer(tree)
    fresh = [prefill(target, proposer, [PROMPT], 64, accept_greedy) for _ in ROOTS]
    forked = prefill(target, proposer, [PROMPT], 64, accept_greedy)
    for session in [forked, *fresh]:
        step(session)
    forked.select_rows(torch.zeros(len(ROOTS), dtype=torch.long))
    forked.root = torch.tensor(ROOTS)
    for session, root in zip(fresh, ROOTS):
        session.root = torch.tensor([root])
    for _ in range(4):
        together = step(forked)
        for row, session in enumerate(fresh):
            alone = step(session)
            size = int(alone.tree.sizes[0])
            assert torch.equal(together.tree.tokens[row, :size], alone.tree.tokens[0, :size])
            assert torch.equal(together.logits[row, :size], alone.logits[0, :size])
            assert forked.root[row] == session.root[0]
    for row, session in enumerate(fresh):
        for ours, its in ((forked.cache, session.cache), (forked.state, session.state)):
            length = int(its.lengths[0])
            assert int(ours.lengths[row]) == length > len(PROMPT)
            assert torch.equal(ours.kv[:, :, row, :, :length], its.kv[:, :, 0, :, :length])


@pytest.mark.skipif(not is_available(), reason="torch's operators round rows of a batch differently")
@pytest.mark.parametrize("tree", ["chain:length=3", "eagle2:top_k=2,max_depth=2,total=5"])
def test_rows_that_come_and_go_leave_the_others_alone(loaded, tree):
    """Bit for bit, in a buffer with room for more rows than there are."""
    prompts = [PROMPT, [7, 8, 9], [20] * 12, [30, 31, 32, 33]]
    target, proposer = loaded.target, loaded.proposer(tree)
    alone = [prefill(target, proposer, [prompt], 64, accept_greedy) for prompt in prompts]
    session = prefill(target, proposer, prompts[:3], 64, accept_greedy)
    session.cache.reserve_rows(6)
    present = [0, 1, 2]
    for keep, new in (([2, 0], None), ([0, 1], 3), ([2, 0], 1)):
        step(session)
        for row in present:
            step(alone[row])
        session.select_rows(torch.tensor(keep))
        present = [present[place] for place in keep]
        if new is not None:  # from its start, beside rows that have come further
            alone[new] = prefill(target, proposer, [prompts[new]], 64, accept_greedy)
            session.append_rows(prefill(target, proposer, [prompts[new]], len(prompts[new]), accept_greedy))
            present.append(new)
    together = step(session)
    assert present == [3, 2, 1] and session.cache.kv.shape[2] == 3 and session.cache.capacity == 6
    for place, row in enumerate(present):
        one = step(alone[row])
        size = int(one.tree.sizes[0])
        assert torch.equal(together.tree.tokens[place, :size], one.tree.tokens[0, :size])
        assert torch.equal(together.logits[place, :size], one.logits[0, :size])


def test_caches_are_not_lengthened_at_the_end_of_outputs(loaded):
    """By trees that are much wider than deep."""
    proposer = loaded.proposer("eagle2:top_k=3,max_depth=4,total=20")
    longest = len(PROMPT) + 20
    session = prefill(loaded.target, proposer, [PROMPT], longest, accept_greedy)
    while int(session.cache.lengths) < longest - 5:
        step(session)
    assert session.cache.max_len == session.state.max_len == longest + DRAFT_SLOTS


def test_a_row_that_cannot_go_on_leaves_no_nan(loaded, monkeypatch):
    """Neither in the target's cache nor in the drafter's, at a prompt and later."""
    forward, broken = type(loaded.target).forward, []

    def forward_with_nan(self, *args):
        states = forward(self, *args)
        for row in broken:
            states.final[row] = states.tapped[row] = torch.nan
        return states

    monkeypatch.setattr(type(loaded.target), "forward", forward_with_nan)
    broken.append(1)
    proposer = loaded.proposer("chain:length=3")
    session = prefill(loaded.target, proposer, [PROMPT, PROMPT[:4], PROMPT[1:]], 64, accept_greedy)
    assert session.root[1] == NOT_FINITE and (session.root[[0, 2]] >= 0).all()
    session.select_rows(torch.tensor([0, 2]))
    step(session)
    assert session.root[1] == NOT_FINITE and session.root[0] >= 0
    for cache in (session.cache, session.state):
        assert cache._buffer.isfinite().all()


def test_forked_rows_share_no_caches_of_n_grams(loaded):
    proposer = SelfDraft(SelfDraftConfig(), loaded.target.vocab_size)
    session = prefill(loaded.target, proposer, [PROMPT], 64, accept_greedy)
    session.select_rows(torch.tensor([0, 0]))
    first, second = session.state
    proposer.update([first], torch.tensor([[7, 7, 7]]), torch.zeros(1, 3, 0), torch.tensor([3]))
    assert second.text == PROMPT and first.text == [*PROMPT, 7, 7, 7]
    assert first.sources is not second.sources


def test_draws_of_forked_rows_need_numbers_of_their_own():
    for rule in (AcceptMatching, RejectionSampling):
        with pytest.raises(ValueError, match="give forked rows numbers of their own"):
            rule([SamplingParams(1.0)]).set_active([0, 0])
