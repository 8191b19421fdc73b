"""A small LM drafts what it would say itself."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.causal_lm import CausalLmModel, as_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.optimizer import Fp32Muon, MuonWithAdamW
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

IDS = torch.arange(0, 512, 3)


@pytest.fixture
def small(tiny_llama):
    """Another model of the target's shape."""
    model = copy.deepcopy(tiny_llama[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def small_lm(small, tiny_llama, tmp_path):
    small.save_pretrained(tmp_path / "lm")
    tiny_llama[1].save_pretrained(tmp_path / "lm")
    return str(tmp_path / "lm")


def test_a_mixture_of_experts_is_saved_under_the_names_that_training_reads(tiny_llama, make_target, tmp_path):
    sizes = dict(vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_experts=4)
    sizes |= dict(
        num_key_value_heads=2, moe_intermediate_size=16, intermediate_size=32, num_experts_per_tok=2
    )
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=16)).save_pretrained(tmp_path / "lm")
    tiny_llama[1].save_pretrained(tmp_path / "lm")
    target = make_target("llama")
    drafter = new_drafter(target, DrafterConfig(kind="causal_lm", model=str(tmp_path / "lm")), IDS)
    drafter.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert any("experts" in name for name in tensors) and tensors.keys() <= drafter.state_dict().keys()
    loaded = load_drafter(tmp_path / "saved", target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@torch.no_grad()
def test_trees_and_rows(small, small_lm, make_target):
    target = make_target("llama")
    drafter = new_drafter(target, DrafterConfig(kind="causal_lm", model=small_lm), IDS).eval()
    assert target.tapped_blocks == []
    ids, counts = torch.randint(3, 512, (2, 7)), torch.tensor([7, 4])

    def expected(row: int, path: list[int]) -> torch.Tensor:
        text = torch.cat((ids[row, : counts[row]], torch.tensor([20 + row, *path])))
        return torch.log_softmax(small(text[None]).logits[0, -1, IDS], -1)

    state = drafter.new_state(2, 4)  # too short on purpose: it must grow
    drafter.update(state, ids[:, :3], torch.zeros(2, 3, 0), torch.tensor([3, 3]))
    drafter.update(state, torch.cat((ids[:1, 3:7], ids[1:, 3:7])), torch.zeros(2, 4, 0), counts - 3)

    def check(state, rows):
        tree = TokenTree.root_only(torch.tensor([20 + row for row in rows]))
        found = [drafter.expand(state, tree, torch.tensor([[0]] * len(rows)))]
        children = torch.tensor([[7, 8]] * len(rows))
        tree = tree.append(torch.tensor([[0, 0]] * len(rows)), children, torch.zeros(len(rows), 2))
        found.append(drafter.expand(state, tree, torch.tensor([[1, 2]] * len(rows))))
        for place, row in enumerate(rows):
            for node, path in enumerate(([], [7], [8])):
                got = torch.cat(found, 1)[place, node]
                torch.testing.assert_close(got, expected(row, path), atol=1e-4, rtol=1e-4)

    check(state, [0, 1])
    check(drafter.select_rows(state, torch.tensor([1])), [1])


@pytest.mark.parametrize("native", [False, True])
@torch.no_grad()
def test_pruning_keeps_the_keys_of_the_nodes_that_stay(native, small_lm, make_target):
    """The root is committed, and what stays drafts on as after a fresh text."""
    drafter = new_drafter(make_target("llama"), DrafterConfig(kind="causal_lm", model=small_lm), IDS).eval()
    if native:
        drafter.pack()
    text, root, nothing = torch.randint(3, 512, (1, 6)), torch.tensor([9]), torch.zeros(1, 6, 0)
    state, fresh = drafter.new_state(1, 32), drafter.new_state(1, 32)
    drafter.update(state, text, nothing, torch.tensor([6]))
    tree = TokenTree.root_only(root)
    drafter.expand(state, tree, torch.tensor([[0]]))
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[4, 5]]), torch.zeros(1, 2))
    drafter.expand(state, tree, torch.tensor([[1, 2]]))
    tree = tree.append(torch.tensor([[1, 2, 2]]), torch.tensor([[6, 7, 8]]), torch.zeros(1, 3))
    drafter.expand(state, tree, torch.tensor([[3, 4, 5]]))
    before, keep = state.cache.kv.clone(), torch.tensor([2, 4, 5])  # what is below the second child
    drafter.prune(state, root, nothing[:, 0], keep)
    drafter.update(fresh, torch.cat([text, root[None]], 1), torch.zeros(1, 7, 0), torch.tensor([7]))
    assert state.cache.lengths.tolist() == fresh.cache.lengths.tolist() == [7]
    kept = state.cache.kv
    torch.testing.assert_close(kept[..., :7, :], fresh.cache.kv[..., :7, :], atol=1e-4, rtol=1e-4)
    assert torch.equal(kept[..., 7:10, :], before[..., 6 + keep, :])

    left = TokenTree.root_only(torch.tensor([5]))
    drafter.expand(fresh, left, torch.tensor([[0]]))
    left = left.append(torch.tensor([[0, 0]]), torch.tensor([[7, 8]]), torch.zeros(1, 2))
    drafter.expand(fresh, left, torch.tensor([[1, 2]]))
    left = left.append(torch.tensor([[2]]), torch.tensor([[10]]), torch.zeros(1, 1))
    found, expected = (drafter.expand(one, left, torch.tensor([[3]])) for one in (state, fresh))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    for one in (state, fresh):  # a miss: nothing stays
        drafter.prune(one, torch.tensor([5]), nothing[:, 0], torch.zeros(0, dtype=torch.long))
    root = TokenTree.root_only(torch.tensor([11]))
    found, expected = (drafter.expand(one, root, torch.tensor([[0]])) for one in (state, fresh))
    assert state.cache.lengths.tolist() == fresh.cache.lengths.tolist() == [8]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_saves_loads_and_merges_adapters(small_lm, make_target, tmp_path):
    target = make_target("llama")
    config = DrafterConfig(kind="causal_lm", model=small_lm, lora_rank=2)
    drafter = new_drafter(target, config, IDS).train()
    trained = [name for name, p in drafter.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    ids = torch.randint(3, 512, (1, 10))
    start = torch.zeros_like(ids)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    plain = drafter(ids, start, everywhere)
    for name, parameter in drafter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted = drafter(ids, start, everywhere)
    assert (adapted - plain).abs().max() > 0.01
    drafter.eval().finish()
    drafter.save_pretrained(tmp_path / "drafter")
    assert not any("lora" in name for name in load_file(tmp_path / "drafter/model.safetensors"))
    assert "dtype" not in drafter.config.lm and drafter.config.lm_name == "lm"
    narrow = load_drafter(tmp_path / "drafter", target, dtype=torch.bfloat16)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    again = load_drafter(tmp_path / "drafter", target)
    assert isinstance(again, CausalLmModel)
    with torch.no_grad():
        torch.testing.assert_close(again(ids, start, everywhere), adapted, atol=1e-4, rtol=1e-4)


def test_muon_trains_adapters(small_lm, make_target):
    """Their matrices are all there is: none of them is for AdamW."""
    config = DrafterConfig(kind="causal_lm", model=small_lm, lora_rank=2)
    drafter = new_drafter(make_target("llama"), config, IDS).train()
    optimizer = MuonWithAdamW(drafter, 0.01, (0.9, 0.95), 0.0, bf16=False)
    before = {name: p.clone() for name, p in drafter.named_parameters() if p.requires_grad}
    ids = torch.randint(3, 512, (1, 10))
    drafter(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)).square().sum().backward()
    optimizer.step()
    assert [type(part) for part in optimizer.parts] == [Fp32Muon]
    now = dict(drafter.named_parameters())
    moved = {name for name, p in before.items() if not torch.equal(p, now[name])}
    assert moved == {name for name in before if "lora_B" in name}  # at first the others have no gradient


def test_an_lm_with_too_few_tokens_is_refused(small, small_lm, make_target):
    target = make_target("llama")
    with pytest.raises(UserError, match="must have all .* got .* with 512"):
        new_drafter(target, DrafterConfig(kind="causal_lm", model=small_lm), torch.tensor([3, 512]))


def test_an_lm_that_scales_its_logits_is_refused(small, small_lm, make_target, monkeypatch):
    monkeypatch.setattr(LlamaConfig, "logits_scaling", 8.0, raising=False)
    with pytest.raises(UserError, match="must be an LM with a plain linear head, got .* with logits_scaling"):
        new_drafter(make_target("llama"), DrafterConfig(kind="causal_lm", model=small_lm), IDS)


def test_an_lm_with_another_tokenizer_is_refused(small_lm, make_target):
    target = make_target("llama")
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.add_tokens(["naïve"])
    with pytest.raises(UserError, match="must have the tokenizer of"):
        new_drafter(target, DrafterConfig(kind="causal_lm", model=small_lm), IDS)


def test_drafts_beyond_learned_positions_are_cut_off(tiny_llama, tmp_path):
    """And not looked up: an embedding of the last positions is all that there is."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 24}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, bos_token_id=0, eos_token_id=0, **sizes))
    for part in (model, tiny_llama[1]):
        part.save_pretrained(tmp_path / "lm")
    target = FrozenTarget(model, tiny_llama[1], "tiny")
    proposer = TreeProposer(as_drafter(str(tmp_path / "lm"), target), ChainPolicy(6))
    found, plain = (
        decode_all(target, one, [list(range(5, 26))], 3, stop=())[0] for one in (proposer, NoProposer())
    )
    assert found == plain and len(found[0]) == 3


def test_an_lm_in_bf16_keeps_its_frequencies(small_lm, make_target):
    """Rounded ones would turn far positions by radians."""
    target = make_target("llama")
    target.model.bfloat16()
    drafter = as_drafter(small_lm, target)
    exact = as_drafter(small_lm, make_target("llama"))
    assert all(weight.dtype == torch.bfloat16 for weight in drafter.parameters())
    found, expected = (one.lm.model.rotary_emb.inv_freq for one in (drafter, exact))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_tokens_that_the_lm_has_not(packed, small_lm, tiny_llama):
    """A target may have more rows of padding; what is drafted after them does not matter."""
    model = copy.deepcopy(tiny_llama[0])
    model.resize_token_embeddings(600)
    target = FrozenTarget(model, tiny_llama[1], "llama")
    config = DrafterConfig(kind="causal_lm", model=small_lm, draft_vocab_size=400)
    drafter = new_drafter(target, config, torch.arange(400)).eval()
    if packed:
        drafter.pack()
    plain = decode_all(target, NoProposer(), [[3, 599, 7]], 8, stop=())[0]
    drafted = decode_all(target, TreeProposer(drafter, ChainPolicy(3)), [[3, 599, 7]], 8, stop=())[0]
    assert plain == drafted
    if not packed:  # in training, too
        rows = (torch.tensor([[3, token, 7]]) for token in (599, 0))
        states = [drafter(row, torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)) for row in rows]
        assert torch.equal(*states)
