"""Sessions: rows that are forked go on as if each had been encoded by itself."""

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import prefill, propose, update, verify
from drafttrain.inference.many import judge_many, propose_many, run_target_many, update_many
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.rejection import RejectionSampling
from drafttrain.inference.session import DRAFT_SLOTS, NOT_FINITE
from drafttrain.kernels.linear import is_available
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.lists import tree_of_lists

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
ROOTS = [5, 9, 5]  # what follows in each fork
NATIVE = pytest.mark.skipif(not is_available(), reason="the native kernels need a C++ compiler and AVX2")


@pytest.fixture(scope="module")
def loaded(tiny_bundle):
    return load_bundle(tiny_bundle, dtype="float32", device="cpu")


def step(session):
    verified = verify(session, propose(session), accept_greedy)
    update(session, verified)
    return verified


@pytest.mark.parametrize("prompts", [[PROMPT * 3], [PROMPT * 3, PROMPT[:2], PROMPT + ROOTS]])
@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_a_long_prompt_is_encoded_in_stretches(prompts, native, loaded, tiny_llama, monkeypatch):
    target = loaded.target if native else FrozenTarget(*tiny_llama, "tiny", loaded.target.tapped_blocks)
    proposer = loaded.proposer("chain:length=3") if native else NoProposer()
    found = []
    for stretch in (5, 2048):
        monkeypatch.setattr("drafttrain.inference.session.STRETCH", stretch)
        found.append(prefill(target, proposer, prompts, 64, accept_greedy))
    near = {"rtol": 0, "atol": 0} if native else {}
    for row, prompt in enumerate(prompts):
        kept = [session.cache.kv[:, :, row, :, : len(prompt)] for session in found]
        torch.testing.assert_close(*kept, **near)
    assert torch.equal(found[0].root, found[1].root)
    assert found[0].cache.lengths.tolist() == list(map(len, prompts))
    for _ in range(3):
        logits = [step(session).logits for session in found]
        torch.testing.assert_close(*logits, **near)


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
            args[0].kv[:, :, row] = torch.nan  # of the target's cache
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


SHAPES = ["chain:length=3", "eagle2:top_k=2,max_depth=2,total=5", "drawn:k_config=3-2-1"]
SHAPES += ["drawn:k_config=2-1-1,threshold=0.01"]


@pytest.mark.skipif(not is_available(), reason="torch's operators round rows of a batch differently")
@pytest.mark.parametrize("tree", SHAPES)
def test_sessions_with_caches_of_their_own_are_verified_and_drafted_for_together(loaded, tree):
    """Bit for bit as alone: texts of different lengths, trees of different sizes, in any company."""
    prompts, target = [PROMPT, [7, 8, 9], [20] * 12, [30, 31, 32, 33]], loaded.target

    def start():
        proposer = loaded.proposer(tree)
        return [prefill(target, proposer, [prompt], 64, accept_greedy) for prompt in prompts]

    together, alone = start(), start()
    for company in ([0, 1, 2, 3], [2, 0], [1, 3, 2], [3]):
        ours, its = ([sessions[i] for i in company] for sessions in (together, alone))
        trees = propose_many(ours, company, [9] * len(company))
        trees[0] = trees[0].select(trees[0].depths < 2)
        outputs = run_target_many(ours, trees)
        verified = judge_many(ours, trees, [accept_greedy] * len(ours), outputs)
        update_many(ours, verified)
        for place, (session, i) in enumerate(zip(its, company)):
            session.proposer.set_active([i], [9])
            own = propose(session)
            one = verify(session, own.select(own.depths < 2) if not place else own, accept_greedy)
            update(session, one)
            assert torch.equal(trees[place].tokens, one.tree.tokens)
            assert torch.equal(verified[place].logits, one.logits)
    for session, other in zip(together, alone):
        assert session.root == other.root
        for ours, its in ((session.cache, other.cache), (session.state, other.state)):
            length = int(its.lengths)
            assert int(ours.lengths) == length > 3
            assert torch.equal(ours.kv[..., :length, :], its.kv[..., :length, :])


@pytest.mark.parametrize("kind", ["n-grams", "joined", "one by one"])
def test_an_update_that_is_begun_again_gives_nothing_twice(loaded, kind, monkeypatch):
    """It fails at the second of three sessions, and is begun again for each."""
    prompts, target = [PROMPT, [7, 8, 9], [20] * 12], loaded.target

    def start():
        proposer = loaded.proposer("chain:length=3")
        if kind == "n-grams":
            proposer = SelfDraft(SelfDraftConfig(recycle=2), target.vocab_size)
        sessions = [prefill(target, proposer, [prompt], 64, accept_greedy) for prompt in prompts]
        trees = propose_many(sessions, range(3), [9] * 3)
        return sessions, judge_many(sessions, trees, [accept_greedy] * 3, run_target_many(sessions, trees))

    (sessions, verified), (others, given) = start(), start()
    proposer, harvested, calls = sessions[0].proposer, [], []
    if kind == "one by one":
        monkeypatch.setattr(proposer, "join", lambda states: None)
    owner, name = (proposer, "_observe") if kind == "n-grams" else (proposer.drafter, "update")
    read, harvest = getattr(owner, name), proposer.harvest

    def failing(*args):
        calls.append(args)
        if len(calls) == (1 if kind == "joined" else 2):
            raise MemoryError
        return read(*args)

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(proposer, "harvest", lambda *each: [harvested.append(each), harvest(*each)])
    with pytest.raises(MemoryError):
        update_many(sessions, verified)
    for session, one in zip(sessions, verified):
        update_many([session], [one])
    assert len(harvested) == 3 and len(calls) == 4  # one of them failed
    for session, other, one in zip(others, sessions, given):
        update(session, one)
        if kind == "n-grams":
            assert other.state[0].text == session.state[0].text
        else:
            n = int(session.state.lengths)
            assert int(other.state.lengths) == n
            torch.testing.assert_close(other.state.kv[..., :n, :], session.state.kv[..., :n, :])
        assert torch.equal(propose(other).tokens, propose(session).tokens)


def test_stock_attention_goes_over_several_caches(tiny_llama):
    """A target that is not packed: each stretch of the packed row attends to its own cache."""
    target = FrozenTarget(*tiny_llama, "llama", tapped_blocks=[-1])
    prompts, generator = [PROMPT, [7, 8, 9], [20] * 12], torch.Generator().manual_seed(0)
    caches, trees, expected = [], [], []
    for prompt in prompts:
        session = prefill(target, NoProposer(), [prompt], 64, accept_greedy)
        tokens = torch.randint(160, (1, 5), generator=generator)
        tree = tree_of_lists(tokens.tolist(), [[-1, 0, 0, 1, 2]], torch.device("cpu"))
        expected.append(target.forward(session.cache, tree.tokens, tree.depths, tree.ancestors()))
        caches.append(session.cache)
        trees.append(tree)
    calls = []
    hook = target.base.register_forward_hook(lambda *_: calls.append(1))
    found = target.forward_many(
        caches,
        [tree.tokens for tree in trees],
        [tree.depths for tree in trees],
        [tree.ancestors() for tree in trees],
    )
    hook.remove()  # the session shares the model
    assert calls == [1]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.final, other.final)
        size = float(other.tapped.abs().max())  # of single entries in a residual stream: about 27
        torch.testing.assert_close(one.tapped, other.tapped, rtol=0, atol=2e-6 * size)
