"""Everything that runs on GPUs, on a GPU that is not there: no tensor is on the wrong device, the results are
the CPU's, and the host waits for the device no more often than it has to."""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

import drafttrain
from drafttrain.bundle import load_bundle
from drafttrain.calibration.timing import measure_costs
from drafttrain.drafters.causal_lm import as_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.hidden_states.collect import collect_states
from drafttrain.inference.acceptance import rule_for
from drafttrain.inference.decode import Request, decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.session import judge, prefill, propose, update
from drafttrain.reasoning.config import SchedulerConfig
from drafttrain.reasoning.scheduler import ScheduledDecoder
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.loading import load_for_decoding, load_target
from drafttrain.training import flex
from drafttrain.training.masks import random_blocks
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import draft_loss, with_states
from drafttrain.trees.c2t import Plain
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.parse import parse_policy
from tests.fake_gpu import GPU, fake_gpu, on_gpu
from tests.policies import EVERY_POLICY, small

PROMPTS = [[3, 14, 15, 92, 65], [20], [30, 31, 32, 41, 5, 41, 5, 9]]
NEW = 16
SAMPLED = [SamplingParams(0.8, seed=i, top_k=40, top_p=0.95) for i in range(3)]
CURVE = CostCurve((1, 8, 64), (0.02, 0.025, 0.1))
COSTS = Costs(CostCurve((1,), (0.001,)), CURVE, CURVE, 60.0, (0.6,), AcceptanceCurve())
KINDS = ["edd", "eagle", "vdm", "medusa", "causal_lm"]


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def plain(tiny_target_folder):
    """Texts of plain decoding on the CPU, greedy and sampled."""
    target = load_target(str(tiny_target_folder), dtype="float32", device="cpu")
    how = [None, SAMPLED]
    return [decode_all(target, NoProposer(), PROMPTS, NEW, stop=(), sampling=one)[0] for one in how]


@pytest.fixture(scope="module")
def drawn(tiny_target_folder):
    """Texts of drawn candidates on the CPU."""
    target = load_for_decoding(str(tiny_target_folder), dtype="float32", device="cpu")
    proposer = TreeProposer(noisy(tiny_target_folder, target), parse_policy(small("drawn")))
    return decode_all(target, proposer, PROMPTS, NEW, stop=(), sampling=SAMPLED)[0]


def noisy(folder, target):
    """A drafter that is right now and then: the target itself with other weights."""
    drafter, noise = as_drafter(str(folder), target), torch.Generator().manual_seed(0)
    for weight in drafter.parameters():
        weight.data += 0.03 * weight.std() * torch.randn(weight.shape, generator=noise).to(weight.device)
    return drafter


def test_the_gpu_refuses_what_cuda_refuses(gpu):
    x, y = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
    assert on_gpu(y) and y.device == GPU and y.is_cuda and not x.is_cuda and x.device.type == "cpu"
    assert on_gpu(y + 1) and on_gpu(y * torch.tensor(2.0)) and not on_gpu(y.cpu()) and on_gpu(x.to(y))
    assert on_gpu(y.new_zeros(2)) and on_gpu(torch.zeros_like(y)) and not on_gpu(y.new_zeros(2, device="cpu"))
    index = torch.tensor([0])
    assert on_gpu(y[index]) and on_gpu(y.max(1).values)
    for wrong in (
        lambda: x + y,
        lambda: torch.cat([x, y]),
        lambda: x[index.cuda()],
        lambda: y.index_select(0, index),
        lambda: torch.nn.functional.linear(x, y),
        lambda: y.__setitem__(index, x[:1]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    for wrong in (y.numpy, y.data_ptr):
        with pytest.raises(TypeError, match="cuda:0"):
            wrong()
    y[:1] = x[:1]  # a copy
    model = torch.nn.Linear(3, 1).to("cuda")
    assert on_gpu(model.weight) and isinstance(model.weight, torch.nn.Parameter)
    model(y).sum().backward()
    assert on_gpu(model.weight.grad) and gpu.waits == []


@pytest.mark.parametrize("sampled", [0, 1])
@pytest.mark.parametrize("policy", ["chain:length=0", *EVERY_POLICY])
def test_texts_of_every_policy(gpu, tiny_target_folder, plain, drawn, policy, sampled):
    target = load_for_decoding(str(tiny_target_folder), dtype="float32")
    assert target.device == GPU
    proposer = TreeProposer(noisy(tiny_target_folder, target), parse_policy(policy, COSTS, Plain("P")))
    sampling = SAMPLED if sampled else None
    found, stats = decode_all(target, proposer, PROMPTS, NEW, stop=(), sampling=sampling)
    if sampled and policy.startswith("drawn"):  # whose text depends on the drafts
        assert found == drawn
    else:
        assert found == plain[sampled]
    assert stats.accept_len > 1.1 or sampled or policy in ("chain:length=0", small("dymax"))


@pytest.mark.parametrize(
    ("policy", "sampled", "most"),
    [
        (None, 0, 2),
        (None, 1, 4),
        ("chain:length=3", 0, 4),
        ("chain:length=3", 1, 7),
        ("static:k_config=2-2", 0, 4),
    ],
)
def test_the_host_waits_for_verdicts_alone(gpu, tiny_target_folder, policy, sampled, most):
    """It gives the GPU all of a tree's drafting and verification without waiting for any of it."""
    target = load_for_decoding(str(tiny_target_folder), dtype="float32")
    proposer = NoProposer()
    if policy is not None:
        proposer = TreeProposer(noisy(tiny_target_folder, target), parse_policy(policy))
    for prompts in (PROMPTS[:1], PROMPTS):
        accept = rule_for((SAMPLED if sampled else [SamplingParams()] * 3)[: len(prompts)], draws=False)
        accept.set_active(range(len(prompts)))
        session = prefill(target, proposer, prompts, 64, accept)
        session.root.tolist()
        for step in range(4):
            before = len(gpu.waits)
            tree = propose(session)
            session.cache.reserve(tree.width)
            states = target.forward(session.cache, tree.tokens, tree.depths, tree.ancestors())
            assert step == 0 or gpu.waits[before:] == []  # the shape of a tree is copied once
            verified = judge(session, tree, accept, states, target.head(states.final))
            session.root.tolist()
            update(session, verified)
            assert step == 0 or len(gpu.waits) - before <= most


@pytest.mark.parametrize("policy", ["chain:length=3", "eagle2:top_k=3,max_depth=3,total=6"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampled", [0, 1])
def test_texts_of_every_drafter(gpu, tiny_target_folder, plain, kind, policy, sampled):
    target = load_for_decoding(str(tiny_target_folder), dtype="float32")
    more = {"model": str(tiny_target_folder)} if kind == "causal_lm" else {"draft_vocab_size": 200}
    drafter = new_drafter(target, DrafterConfig(kind=kind, **more), torch.arange(200)).eval()
    proposer = TreeProposer(drafter, parse_policy(policy))
    target.tap(drafter.config.tapped_blocks)
    sampling = SAMPLED if sampled else None
    assert decode_all(target, proposer, PROMPTS, NEW, stop=(), sampling=sampling)[0] == plain[sampled]


@pytest.mark.parametrize("kind", ["n-grams", "hybrid"])
def test_texts_with_ngrams(gpu, tiny_target_folder, plain, kind):
    target = load_for_decoding(str(tiny_target_folder), dtype="float32")
    proposer = SelfDraft(SelfDraftConfig(), target.vocab_size)
    if kind == "hybrid":
        chain = TreeProposer(noisy(tiny_target_folder, target), parse_policy("chain:length=3"))
        proposer = HybridProposer(proposer, chain)
    assert decode_all(target, proposer, PROMPTS, NEW, stop=())[0] == plain[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafting", ["each", "joined"])
@pytest.mark.parametrize("verifier", ["one", "batched"])
def test_scheduled_texts(gpu, tiny_target_folder, plain, verifier, drafting, overlap):
    target = load_for_decoding(str(tiny_target_folder), dtype="float32")
    proposer = TreeProposer(noisy(tiny_target_folder, target), parse_policy("chain:length=3"))
    how = SchedulerConfig(verifier, drafting, overlap=overlap, short=0)
    asked = [Request(prompt, NEW, sampling) for prompt, sampling in zip(PROMPTS, SAMPLED)]
    branches = ScheduledDecoder(target, proposer, how).decode(asked, stop=())
    assert [branch.error for branch in branches] == [None] * len(PROMPTS)
    assert [branch.row.output for branch in branches] == plain[1]


def test_generate_of_transformers(gpu, tiny_bundle, tiny_target_folder, plain):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float).to("cuda")
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    how["attention_mask"] = torch.ones_like(ids)
    found = model.generate(
        ids, custom_generate=drafttrain.generate, drafter=str(tiny_bundle), tree="chain:length=3", **how
    )
    assert on_gpu(found) and found[0, len(PROMPTS[0]) :].tolist() == plain[0][0]


def test_calibration(gpu, tiny_bundle):
    loaded = load_bundle(tiny_bundle, dtype="float32")
    [verified], [drafted], growth = measure_costs(loaded.target, loaded.drafter, 2, (64,), rounds=1)
    assert verified.sizes and drafted.sizes and growth is None and gpu.waits


def test_states_are_collected(gpu, tiny_target_folder, tmp_path):
    rows = Dataset.from_list([{"id": str(i), "input_ids": prompt} for i, prompt in enumerate(PROMPTS)])
    target = load_target(str(tiny_target_folder), dtype="float32")
    target.tap([-2])
    report = collect_states(CollectConfig(), target, DatasetDict(train=rows), tmp_path / "states")
    assert (report.documents, report.tokens, report.skipped) == (3, sum(map(len, PROMPTS)), 0)


def dense(layout):
    """`flex_attend` in a slower and obvious way."""
    batch, t = layout.block_start.shape
    q = torch.arange(t, device=layout.block_start.device)[:, None]  # [T, 1]
    keys = torch.arange(2 * t if layout.soft_prompts else t, device=q.device)[None]  # [1, keys]
    mask = torch.stack([flex.mask_mod(layout)(row, 0, q, keys) for row in range(batch)])[:, None]
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_cpu(gpu, tiny_target_folder, kind, monkeypatch):
    monkeypatch.setattr(flex, "flex_attend", dense)  # which a GPU compiles
    rows = [{"input_ids": prompt * 4, "loss_mask": [1] * len(prompt) * 4} for prompt in PROMPTS]
    packed = PackedRows(Dataset.from_list(rows), 64, 0)
    found = []
    for device in ("cpu", "cuda"):
        target = load_target(str(tiny_target_folder), dtype="float32", device=device)
        more = {"model": str(tiny_target_folder)} if kind == "causal_lm" else {}
        torch.manual_seed(0)
        drafter = new_drafter(target, DrafterConfig(kind=kind, **more), torch.arange(200))
        target.tap(drafter.config.tapped_blocks)
        batch = default_collate([packed[i] for i in range(len(packed))])
        batch = {name: one.to(device) for name, one in batch.items()}
        batch["row_seeds"] = torch.arange(len(packed))
        layout = random_blocks(batch["document_start"], 2, 5, torch.Generator().manual_seed(0))
        loss = draft_loss(drafter, drafter, target, with_states(target, batch), layout, 16, False).total
        loss.backward()
        grads = {name: one.grad for name, one in drafter.named_parameters() if one.grad is not None}
        found.append((loss.detach().cpu(), {name: grad.cpu() for name, grad in grads.items()}))
    torch.testing.assert_close(*found)
