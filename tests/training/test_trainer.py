"""The loss of a batch: stored states equal fresh ones, and its parts are what DESIGN says they are."""

import pytest
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from torch.utils.data import default_collate

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.drafters.new import new_drafter
from drafttrain.hidden_states.collect import collect
from drafttrain.hidden_states.store import Document, HiddenStateStore
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.training.attention import block_attention
from drafttrain.training.masks import random_blocks, whole_documents
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import draft_loss, with_states


@pytest.fixture
def documents(corpus_folder):
    return load_from_disk(str(corpus_folder))["train"].select(range(12))


@pytest.fixture
def drafter(target):
    config = DrafterConfig(tapped_blocks=[-2, 0], draft_vocab_size=200, layers=2)
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, config, 200))
    drafter.initialize_from(target, config, torch.arange(100, 300))
    return drafter


def batch_of(rows: PackedRows) -> dict[str, torch.Tensor]:
    return default_collate([rows[i] for i in range(3)])


def loss_of(drafter, target, batch, bf16=False) -> torch.Tensor:
    layout = random_blocks(batch["document_start"], 5, 10, torch.Generator().manual_seed(0))
    batch = with_states(target, batch)
    loss = draft_loss(drafter, drafter, target, batch, layout, chunk=64, bf16=bf16).total
    return loss / batch["loss_mask"].sum()


class PackedStates:
    """The states of fresh rows, cut into documents and rounded as a store rounds them."""

    def __init__(self, target, rows: PackedRows):
        self.documents = {}
        for number, row in enumerate(rows.rows):
            states = with_states(target, default_collate([rows[number]]))
            at = 0
            for document in row:
                n = len(rows.corpus[document]["input_ids"])
                tapped, final = (states[x][0, at : at + n].bfloat16() for x in ("tapped", "final"))
                self.documents[document] = Document(torch.zeros(n, dtype=torch.long), tapped, final)
                at += n
        self.lengths = torch.tensor([len(self.documents[i].tokens) for i in range(len(self.documents))])

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]


def test_stored_states_give_exactly_the_loss_of_fresh_ones(documents, target, drafter):
    online = PackedRows(documents, 192, 0)
    offline = batch_of(PackedRows(documents, 192, 0, PackedStates(target, online)))
    fresh = batch_of(online)
    states = with_states(target, fresh)
    real = torch.arange(192) < fresh["n_tokens"][:, None]  # padding has states too, which nobody reads
    fresh["tapped"] = states["tapped"].bfloat16() * real[..., None]
    fresh["final"] = states["final"].bfloat16() * real[..., None]
    for name in ("input_ids", "loss_mask", "document_start", "positions", "tapped", "final"):
        assert torch.equal(fresh[name], offline[name]), name
    assert torch.equal(loss_of(drafter, target, fresh), loss_of(drafter, target, offline))


def test_a_collected_store_gives_the_loss_of_the_running_target(
    corpus_folder, target_folder, target, drafter, tmp_path
):
    """Up to the rounding of the stored states to bf16."""
    collect(CollectConfig(), str(target_folder), [-2, 0], corpus_folder, tmp_path, dtype="float32")
    split = load_from_disk(str(corpus_folder))["train"]
    store = HiddenStateStore.open(tmp_path / "train", target_info(target), split)
    offline, online = batch_of(PackedRows(split, 192, 0, store)), batch_of(PackedRows(split, 192, 0))
    torch.testing.assert_close(
        loss_of(drafter, target, offline), loss_of(drafter, target, online), atol=0, rtol=5e-3
    )


def test_loss_is_the_kl_of_the_next_tokens_distribution(documents, target, drafter):
    """Against the target's own logits on each document alone, restricted to the draft vocabulary."""
    rows = PackedRows(documents, 192, 0)
    batch = with_states(target, batch_of(rows))
    layout = random_blocks(batch["document_start"], 5, 10, torch.Generator().manual_seed(0))
    found = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False)
    got, agree = found.total, found.agree

    everywhere = torch.ones_like(batch["loss_mask"])
    attend = block_attention(layout)
    drafted = drafter(batch["input_ids"], batch["tapped"], batch["positions"], attend, everywhere.bool())
    log_q = F.log_softmax(drafter.lm_head(drafted), -1).view(3, 192, -1)
    expected, same = 0.0, 0
    for row in range(3):
        at = 0
        for document in rows.rows[row]:
            ids, mask = documents[document]["input_ids"], documents[document]["loss_mask"]
            logits = target.model(input_ids=torch.tensor([ids])).logits[0]
            for i in range(len(ids) - 1):
                if mask[i + 1]:
                    log_p = F.log_softmax(logits[i, 100:300], -1)
                    expected += (log_p.exp() * (log_p - log_q[row, at + i])).sum()
                    same += int(log_p.argmax() == log_q[row, at + i].argmax())
            at += len(ids)
    torch.testing.assert_close(got, expected, atol=0, rtol=1e-4)
    assert agree == same


@pytest.mark.parametrize("kind", ["edd", "anchored", "vdm", "eagle", "medusa", "causal_lm"])
def test_the_first_draft_after_the_prompt_is_trained(kind, documents, target, small_lm_folder):
    """Of one document in a packed row only the first answer token counts: it is predicted at the last
    position of the prompt, and the loss is the KL there."""
    kinds = {"anchored": {"kind": "edd", "anchor": True}, "medusa": {"kind": kind, "heads": 2}}
    kinds["causal_lm"] = {"kind": kind, "model": str(small_lm_folder)}
    config = DrafterConfig(**{"tapped_blocks": [-2], **kinds.get(kind, {"kind": kind})})
    torch.manual_seed(0)
    drafter = new_drafter(target, config, torch.arange(100, 300)).eval()
    number, row = next(pair for pair in enumerate(PackedRows(documents, 192, 0).rows) if len(pair[1]) > 1)
    before, chosen = row[:2]  # a document that follows another one
    first = documents[chosen]["loss_mask"].index(1)

    def alone(document, index):
        trained = [int(index == chosen and i == first) for i in range(len(document["loss_mask"]))]
        return document | {"loss_mask": trained}

    rows = PackedRows(documents.map(alone, with_indices=True, keep_in_memory=True), 192, 0)
    at = len(documents[before]["input_ids"]) + first - 1
    batch = with_states(target, default_collate([rows[number]]))
    assert batch["loss_mask"].nonzero().tolist() == [[0, at]]
    layout = random_blocks(batch["document_start"], 5, 10, torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False)
        # what is predicted there if every position is wanted
        causal = whole_documents(batch["document_start"], drafter.first_token)
        attend = block_attention(layout if drafter.soft_prompts else causal) if drafter.attends else None
        everywhere = torch.ones_like(batch["loss_mask"]).bool()
        inputs = {**batch, "block_start": layout.block_start}
        predictions = drafter.predictions(drafter, inputs, attend, everywhere)
        logits = target.model(input_ids=torch.tensor([documents[chosen]["input_ids"]])).logits[0]
        log_p = F.log_softmax(logits[first - 1, 100:300], -1)
        kls = []
        for one in predictions:
            state = one.states[one.rows[0, :at].sum()]
            kls.append((log_p.exp() * (log_p - F.log_softmax(one.head @ state, -1))).sum())
    assert loss.positions == 1 and loss.total > 0
    torch.testing.assert_close(loss.kl, kls[0], atol=1e-6, rtol=1e-4)
    of_states = loss.total - sum(one.weight * kl for one, kl in zip(predictions, kls))
    assert of_states > 1e-3 if kind == "eagle" else abs(of_states) < 1e-5


def test_the_loss_of_acceptance_is_that_of_each_position(documents, target, drafter):
    """-log of the sum of the smaller probabilities, over the tokens that can be drafted."""
    batch = with_states(target, batch_of(PackedRows(documents, 192, 0)))
    layout = random_blocks(batch["document_start"], 5, 10, torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False, loss="acceptance")
        wanted = batch["loss_mask"].bool()
        inputs = {**batch, "block_start": layout.block_start}
        [one] = drafter.predictions(drafter, inputs, block_attention(layout), wanted)
        p = target.head(batch["final"][wanted])[:, 100:300].softmax(-1)
        q = F.linear(one.states, one.head).softmax(-1)
        expected = -torch.minimum(p, q).sum(-1).log().sum()
    torch.testing.assert_close(found.total, expected, atol=0, rtol=1e-4)


def test_the_bias_of_a_target_s_head_counts(documents, target, drafter):
    batch = with_states(target, batch_of(PackedRows(documents, 192, 0)))
    layout = random_blocks(batch["document_start"], 5, 10, torch.Generator().manual_seed(0))
    before = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False).total
    head = torch.nn.Linear(*target.lm_head.weight.T.shape)
    with torch.no_grad():
        head.weight.copy_(target.lm_head.weight)
        head.bias.fill_(3.0)  # for all tokens alike, which changes no probability
        target.lm_head = head
        same = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False).total
        head.bias[150] = 30.0
        other = draft_loss(drafter, drafter, target, batch, layout, chunk=7, bf16=False).total
    torch.testing.assert_close(before, same, atol=1e-3, rtol=1e-5)
    assert other > 2 * same


def test_gradients_reach_what_is_trained_and_nothing_else(documents, target, drafter):
    loss_of(drafter, target, batch_of(PackedRows(documents, 192, 0))).backward()
    for name, parameter in drafter.named_parameters():
        if name == "embed_tokens.weight":
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_bf16_is_close_to_fp32(documents, target, drafter):
    batch = batch_of(PackedRows(documents, 192, 0))
    torch.testing.assert_close(
        loss_of(drafter, target, batch, bf16=True), loss_of(drafter, target, batch), atol=0, rtol=0.02
    )


def test_a_bf16_target_trains_an_fp32_drafter(documents, target, drafter):
    """Without autocast the target's states are converted, not refused."""
    batch = batch_of(PackedRows(documents, 192, 0))
    expected = loss_of(drafter, target, batch)
    target.model.to(torch.bfloat16)
    torch.testing.assert_close(loss_of(drafter, target, batch), expected, atol=0, rtol=0.05)


def test_tokens_without_finite_states_are_left_out(documents, target, drafter, monkeypatch):
    """One document of NaN from its third token on: the loss is that of all other tokens."""
    batch = batch_of(PackedRows(documents, 192, 0))
    length = int((batch["document_start"][0] == 0).sum())
    encode = target.encode

    def broken(ids, starts):
        states = encode(ids, starts)
        states.tapped[0, 2:length] = torch.nan
        states.final[0, 2:length] = torch.inf
        return states

    without = {**batch, "loss_mask": batch["loss_mask"].clone()}
    without["loss_mask"][0, 2:length] = 0
    expected = loss_of(drafter, target, without)
    monkeypatch.setattr(target, "encode", broken)
    loss = loss_of(drafter, target, batch)
    assert batch["loss_mask"][0, 2:length].any() and without["loss_mask"].any()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)
