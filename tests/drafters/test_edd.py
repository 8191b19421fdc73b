"""EDD computes in training what it computes step by step in decoding, and stores no weights of the target."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.attention import block_attention
from drafttrain.training.continued import add_anchor
from drafttrain.training.masks import BlockLayout
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

LENGTHS = (23, 17)  # of the two documents of a batch


def documents(target: FrozenTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random documents in rows of 23 with padding, and the target's tapped states over them."""
    ids = torch.randint(3, target.vocab_size, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    start = torch.zeros_like(ids)
    return ids, target.encode(ids, start).tapped


def train_log_probs(drafter: EddModel, ids: torch.Tensor, tapped: torch.Tensor, layout: BlockLayout):
    """Log-probabilities [B, T, D] as training computes them."""
    positions = torch.arange(ids.shape[1]) - layout.document_start
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    batch = {"input_ids": ids, "tapped": tapped, "positions": positions, **vars(layout)}
    [prediction] = drafter.predictions(drafter, batch, block_attention(layout), everywhere)
    return torch.log_softmax(drafter.lm_head(prediction.states), -1).view(*ids.shape, -1)


def fixed_layout(ids: torch.Tensor, length: int, offset: int) -> BlockLayout:
    start = (torch.arange(ids.shape[1]) - offset) // length * length + offset
    return BlockLayout(torch.zeros_like(ids), start.clamp(min=0).expand_as(ids))


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
@pytest.mark.parametrize("taps", [[-2], [-2, 4]])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("anchor", [False, True])
@torch.no_grad()
def test_training_computes_what_decoding_computes(
    anchor, family, layers, taps, rope, make_target, make_drafter
):
    """Block by block: the true states before the block, then its tokens as a chain, node by node."""
    target = make_target(family, rope)
    drafter = make_drafter(target, layers=layers, tapped_blocks=taps, anchor=anchor)
    ids, tapped = documents(target)
    layout = fixed_layout(ids, length=6, offset=2)
    expected = train_log_probs(drafter, ids, tapped, layout)

    for start in sorted(set(layout.block_start[0].tolist())):
        rows = [row for row in (0, 1) if LENGTHS[row] > start]
        state = drafter.new_state(len(rows), max_len=start + 1)  # too short on purpose: it must grow
        if start:
            known = torch.full((len(rows),), start)
            drafter.update(state, ids[rows, :start], tapped[rows, :start], known)
        tree = TokenTree.root_only(ids[rows, start])
        end = min(start + 6, min(LENGTHS[row] for row in rows)) if start >= 2 else 2
        for position in range(start, end):
            node = torch.full((len(rows), 1), position - start)
            log_probs = drafter.expand(state, tree, node)[:, 0]
            torch.testing.assert_close(log_probs, expected[rows, position], atol=1e-5, rtol=1e-5)
            if position + 1 < end:
                tree = tree.append(node, ids[rows, position + 1][:, None], torch.zeros(len(rows), 1))


@pytest.mark.parametrize("kv_heads", [1, 4])
@torch.no_grad()
def test_heads_of_keys_and_values(kv_heads, make_target, make_drafter):
    target = make_target("llama")
    assert target.config.num_attention_heads == 4 and target.config.num_key_value_heads == 2
    drafter = make_drafter(target, kv_heads=kv_heads)
    assert drafter.layers[0].v_proj.weight.shape[0] == kv_heads * drafter.config.head_dim
    ids, tapped = documents(target)
    expected = train_log_probs(drafter, ids, tapped, fixed_layout(ids, length=6, offset=0))
    state = drafter.new_state(2, max_len=30)
    drafter.update(state, ids[:, :6], tapped[:, :6], torch.tensor([6, 6]))
    log_probs = drafter.expand(state, TokenTree.root_only(ids[:, 6]), torch.zeros(2, 1, dtype=torch.long))
    torch.testing.assert_close(log_probs[:, 0], expected[:, 6], atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="drafter.kv_heads: must divide the 4 heads of .*, got 3"):
        make_drafter(target, kv_heads=3)


def test_a_narrower_mlp(make_target, make_drafter):
    target = make_target("llama")
    layer = make_drafter(target, intermediate_size=24).layers[0]
    assert layer.gate_proj.out_features == layer.up_proj.out_features == layer.down_proj.in_features == 24
    assert make_drafter(target).layers[0].gate_proj.out_features == target.config.intermediate_size


@pytest.mark.parametrize("taps", [[-2], [-2, 4]])
@torch.no_grad()
def test_an_added_anchor_changes_no_draft(taps, make_target, make_drafter):
    """Where all embeddings have one size, until its weights are no longer 0."""
    target = make_target("llama")
    embeddings = target.model.get_input_embeddings().weight
    embeddings.copy_(torch.nn.functional.normalize(embeddings, dim=-1) * 0.3 * embeddings.shape[-1] ** 0.5)
    drafter = make_drafter(target, layers=2, tapped_blocks=taps)
    anchored = add_anchor(drafter).attach(target).eval()
    ids, tapped = documents(target)
    layout = fixed_layout(ids, length=6, offset=2)
    expected, found = (train_log_probs(one, ids, tapped, layout) for one in (drafter, anchored))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    anchored.anchor_fc.weight += 0.1
    assert not torch.allclose(train_log_probs(anchored, ids, tapped, layout), expected, atol=1e-2)


@pytest.mark.parametrize("anchor", [False, True])
@torch.no_grad()
def test_rows_of_a_batch_do_not_disturb_each_other(anchor, make_target, make_drafter):
    """Rows with unequal numbers of observed states, in several pieces with padding, equal rows alone."""
    target = make_target("llama")
    drafter = make_drafter(target, layers=2, anchor=anchor)
    ids, tapped = documents(target)
    state = drafter.new_state(2, 40)
    drafter.update(state, ids[:, :9], tapped[:, :9], torch.tensor([9, 4]))
    late = torch.stack([tapped[0, 9:12], tapped[1, 4:7]])
    drafter.update(state, ids[:, :3], late, torch.tensor([2, 3]))  # rows 0 and 1 now know 11 and 7
    tree = TokenTree.root_only(torch.stack([ids[0, 11], ids[1, 7]]))
    got = drafter.expand(state, tree, torch.zeros(2, 1, dtype=torch.long))
    for row, known in ((0, 11), (1, 7)):
        alone = drafter.new_state(1, 40)
        drafter.update(alone, ids[row, None, :known], tapped[row, None, :known], torch.tensor([known]))
        tree = TokenTree.root_only(ids[row, known, None])
        expected = drafter.expand(alone, tree, torch.zeros(1, 1, dtype=torch.long))
        torch.testing.assert_close(got[row, None], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("anchor", [False, True])
@torch.no_grad()
def test_documents_of_a_packed_row_do_not_see_each_other(anchor, make_target, make_drafter):
    """Each gives what it gives alone: its first block has no state before it, wherever it stands in a row."""
    target = make_target("llama")
    drafter = make_drafter(target, layers=2, tapped_blocks=[-2, 4], anchor=anchor)
    ids = torch.randint(3, 512, (1, 19), generator=torch.Generator().manual_seed(3))
    starts = [*[0] * 11, *[11] * 8]
    blocks = [0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, *[11, 11, 13, 13, 13, 13, 17, 17]]
    tapped, expected = [], []
    for part in (slice(0, 11), slice(11, 19)):
        alone = ids[:, part]
        states = target.encode(alone, torch.zeros_like(alone)).tapped
        layout = BlockLayout(torch.zeros_like(alone), torch.tensor([blocks[part]]) - part.start)
        tapped.append(states)
        expected.append(train_log_probs(drafter, alone, states, layout))
    layout = BlockLayout(torch.tensor([starts]), torch.tensor([blocks]))
    found = train_log_probs(drafter, ids, torch.cat(tapped, 1), layout)
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_tree_nodes_equal_chains(make_target, make_drafter):
    """A node of a branching tree gets what it would get at the end of a chain of its ancestors."""
    target = make_target("qwen2")
    drafter = make_drafter(target, layers=2)
    ids, tapped = documents(target)
    known, root = 5, ids[:1, 5]

    def fresh():
        state = drafter.new_state(1, 30)
        drafter.update(state, ids[:1, :known], tapped[:1, :known], torch.tensor([known]))
        return state

    state, tree = fresh(), TokenTree.root_only(root)
    results = [drafter.expand(state, tree, torch.tensor([[0]]))[0]]
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[7, 8]]), torch.zeros(1, 2))
    results.append(drafter.expand(state, tree, torch.tensor([[1, 2]]))[0])
    tree = tree.append(torch.tensor([[2, 1, 2]]), torch.tensor([[9, 10, 11]]), torch.zeros(1, 3))
    results.append(drafter.expand(state, tree, torch.tensor([[3, 4, 5]]))[0])
    by_node = torch.cat(results)  # [6, D]
    for node, path in enumerate([[], [7], [8], [8, 9], [7, 10], [8, 11]]):
        state, chain = fresh(), TokenTree.root_only(root)
        for depth, token in enumerate([*path, 0]):
            log_probs = drafter.expand(state, chain, torch.tensor([[depth]]))[0, 0]
            chain = chain.append(torch.tensor([[depth]]), torch.tensor([[token]]), torch.zeros(1, 1))
        torch.testing.assert_close(log_probs, by_node[node], atol=1e-5, rtol=1e-5)


# the weights at the start


def test_starts_from_a_block_of_the_target(make_target, make_drafter):
    target = make_target("qwen2")
    config = DrafterConfig(tapped_blocks=[-2, 1], init=-3, layers=2)
    drafter = EddModel(EddConfig.for_target(target, config, 10))
    draft_ids = torch.arange(5, 15)
    drafter.initialize_from(target, config, draft_ids)
    block = target.blocks[1]
    for layer in drafter.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                theirs = getattr(getattr(block.self_attn, name), kind)
                assert torch.equal(getattr(getattr(layer, name), kind), theirs)
        assert torch.equal(layer.down_proj.weight, block.mlp.down_proj.weight)
        assert torch.equal(layer.input_layernorm.weight, block.input_layernorm.weight)
        assert torch.equal(layer.post_attention_layernorm.weight, block.post_attention_layernorm.weight)
    assert torch.equal(drafter.norm.weight, target.base.norm.weight)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[draft_ids])
    assert torch.equal(drafter.draft_to_target, draft_ids)
    states = torch.randn(1, 3, 2 * 64)
    torch.testing.assert_close(drafter.fc(states), (states[..., :64] + states[..., 64:]) / 2)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@torch.no_grad()
def test_a_layer_from_a_block_computes_like_that_block(rope, make_target):
    """Fed with a block's own inputs as hidden states and as token embeddings, one layer is that block."""
    target = make_target("qwen2", rope)
    target.tap([0, 1])
    config = DrafterConfig(tapped_blocks=[0], init=1)
    drafter = EddModel(EddConfig.for_target(target, config, target.vocab_size))
    drafter.initialize_from(target, config, torch.arange(target.vocab_size))
    target.tap([0, 1])
    ids = torch.randint(3, 512, (1, 12))
    start = torch.zeros_like(ids)
    positions = torch.arange(12)[None]
    inputs, outputs = target.encode(ids, start).tapped.chunk(2, -1)
    drafter.embed_tokens.weight = torch.nn.Parameter(inputs[0].clone())
    one_each = BlockLayout(start, positions)  # blocks of one token: hidden states before it, and itself
    states = drafter(
        positions, inputs, positions, block_attention(one_each), torch.ones_like(ids, dtype=torch.bool)
    )
    torch.testing.assert_close(states, target.base.norm(outputs)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("train_embeddings", [False, True])
@pytest.mark.parametrize("train_head", [False, True])
def test_frozen_weights_are_the_targets(train_embeddings, train_head, make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target, train_embeddings=train_embeddings, train_head=train_head)
    theirs = target.model.get_input_embeddings().weight
    assert torch.equal(drafter.embed_tokens.weight, theirs)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[::2])
    assert (drafter.embed_tokens.weight.data_ptr() == theirs.data_ptr()) == (not train_embeddings)
    trained = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert ("embed_tokens.weight" in trained) == train_embeddings
    assert ("lm_head.weight" in trained) == train_head
    assert not any(p.requires_grad for p in target.model.parameters())


def test_embeddings_are_converted_where_dtypes_differ(make_target, make_drafter):
    target = make_target("llama")
    drafter = make_drafter(target).to(torch.bfloat16).attach(target)
    assert drafter.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.embed_tokens.weight, target.model.get_input_embeddings().weight.bfloat16())
    assert target.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tapped_blocks": [5]}, "drafter.tapped_blocks: must be a block of tiny llama, -4 to 4, got 5"),
        ({"tapped_blocks": []}, "drafter.tapped_blocks: must name at least one block"),
        ({"init": -5}, "drafter.init: must be a block of tiny llama, -4 to 3, got -5"),
        ({"init": "randm"}, "drafter.init"),
        ({"layers": 0}, "drafter.layers: must be >= 1 and <= 1000, got 0"),
    ],
)
def test_impossible_shapes_are_refused(settings, words, make_target):
    with pytest.raises(UserError, match=words):
        EddConfig.for_target(make_target("llama"), DrafterConfig(**settings), 10)


def test_unknown_architectures_are_refused(make_target):
    target = make_target("llama")
    target.config.model_type = "gpt2"
    with pytest.raises(UserError, match="must be one of llama, .* for edd drafters, got gpt2"):
        EddConfig.for_target(target, DrafterConfig(), 10)


# files


@pytest.mark.parametrize("train_head", [False, True])
def test_saves_and_loads(train_head, make_target, make_drafter, tmp_path):
    target = make_target("qwen2", "llama3")
    drafter = make_drafter(target, tapped_blocks=[-2, 0], layers=2, train_head=train_head)
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in stored and ("lm_head.weight" in stored) == train_head
    assert torch.equal(stored["draft_to_target"], torch.arange(0, 512, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["format_version"] == 1 and config["layers"] == 2 and config["tapped_blocks"] == [2, 0]
    assert config["target"]["name"] == "tiny qwen2" and config["rope_parameters"]["rope_type"] == "llama3"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = EddModel.load(tmp_path, make_target("qwen2", "llama3"))
    assert not again.training and again.dtype == torch.float32
    assert again.config.rope_parameters == drafter.config.rope_parameters == target.config.rope_parameters
    for (name, ours), theirs in zip(drafter.state_dict().items(), again.state_dict().values()):
        assert torch.equal(ours, theirs), name
    ids, tapped = documents(target.__class__(target.model, target.tokenizer, "x", [2, 0]))
    layout = fixed_layout(ids, 5, 0)
    with torch.no_grad():
        expected = train_log_probs(drafter, ids, tapped, layout)
        assert torch.equal(train_log_probs(again, ids, tapped, layout), expected)
    assert EddModel.load(tmp_path, target, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_auto_classes_know_it_and_a_forgotten_attach_is_loud(make_target, make_drafter, tmp_path):
    from drafttrain import load_drafter  # noqa: F401 - registers the kinds

    target = make_target("llama")
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), EddConfig)
    alone = AutoModel.from_pretrained(tmp_path)
    assert isinstance(alone, EddModel)
    assert torch.equal(alone.layers[0].q_proj.weight, drafter.layers[0].q_proj.weight)
    assert alone.embed_tokens.weight.isnan().all()
    assert torch.equal(alone.attach(target).embed_tokens.weight, drafter.embed_tokens.weight)


@pytest.fixture
def saved(make_target, make_drafter, tmp_path):
    """Folder of a drafter of the tiny Llama."""
    make_drafter(make_target("llama")).save_pretrained(tmp_path)
    return tmp_path


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_missing_and_unexpected_tensors_are_errors(saved, make_target):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    tensors["extra"] = tensors.pop("layers.0.k_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        EddModel.load(saved, make_target("llama"))
    text = one_line(error)
    assert str(saved) in text and "missing tensors ['layers.0.k_proj.weight'], unexpected ['extra']" in text


@pytest.mark.parametrize("damage", ["cut", "gone", "no config", "half a config"])
def test_damaged_folders_are_errors(damage, saved, make_target):
    weights, config = saved / "model.safetensors", saved / "config.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "gone":
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    else:
        config.write_text(config.read_text()[:50])
    with pytest.raises(UserError) as error:
        EddModel.load(saved, make_target("llama"))
    assert str(saved) in one_line(error)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_type", "llama", "holds a llama model"),
        ("format_version", 99, "format_version: must be 1, got 99"),
    ],
)
def test_other_folders_are_refused(key, value, words, saved, make_target):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=words) as error:
        EddModel.load(saved, make_target("llama"))
    assert str(saved) in one_line(error)


# other targets


def test_another_architecture_is_refused(saved, make_target):
    with pytest.raises(UserError) as error:
        EddModel.load(saved, make_target("qwen2"))
    text = one_line(error)
    assert str(saved) in text
    assert "tiny qwen2: architecture must be LlamaForCausalLM, " in text and "got Qwen2ForCausalLM" in text


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 96), ("blocks", 6), ("vocab_size", 600)])
def test_other_sizes_are_refused_by_name(key, value, saved, make_target):
    config = json.loads((saved / "config.json").read_text())
    config["target"][key] = value
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"tiny llama: {key} must be {value}, as of the .*, got "):
        EddModel.load(saved, make_target("llama"))


def test_another_tokenizer_is_refused_with_both_ids(saved, make_target):
    target = make_target("llama")

    class Shifted:
        """The same tokenizer, but every id is one higher."""

        def __call__(self, *args, **kwargs):
            ids = target_tokenizer(*args, **kwargs)["input_ids"]
            return {"input_ids": [i + 1 for i in ids]}

        def __getattr__(self, name):
            return getattr(target_tokenizer, name)

    target_tokenizer, target.tokenizer = target.tokenizer, Shifted()
    with pytest.raises(UserError, match="tiny llama: its tokenizer must read .* as .*, got ") as error:
        EddModel.load(saved, target)
    assert str(saved) in one_line(error)


def test_other_weights_are_only_warned_of(saved, make_target):
    target = make_target("llama")
    target.lm_head.weight.data[0] += 1
    with pytest.warns(UserWarning, match="weights of tiny llama differ from .* output stays exact"):
        EddModel.load(saved, target)
