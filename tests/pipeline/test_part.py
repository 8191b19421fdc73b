"""Parts of a target: their states are those of the whole, they hold nothing else, and damage is one line."""

import gc
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Mistral3Config,
    Olmo2Config,
    Olmo2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from drafttrain.kernels.build import variant
from drafttrain.pipeline.config import PipelineConfig
from drafttrain.pipeline.part import load_part, load_shell, part_bytes, stop_tokens, unmap
from drafttrain.pipeline.probe import check_cut, probe, probe_ids, rounds
from drafttrain.pipeline.transport import run_locally
from drafttrain.pipeline_decoder import cut
from drafttrain.target_lm.loading import load_target
from drafttrain.trees.lists import tree_of_lists
from drafttrain.utils.errors import UserError

CUTS = [(4,), (1, 3), (2, 1, 1)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("native", [False, True])
def test_a_tree_has_the_states_of_the_whole(folders, whole, family, cuts, native):
    if native and variant() is None:
        pytest.skip("the native kernels need a C++ compiler and AVX2")
    target, first = whole(family, [1, 2]), 0
    prompt = torch.randint(3, 512, (1, 9))
    tree = tree_of_lists([[5, 6, 7, 8, 9, 10]], [[-1, 0, 0, 1, 1, 2]], prompt.device)
    order = torch.arange(9)
    cache = target.new_cache(1, 32)
    target.forward(cache, prompt, order, torch.ones(9, 9, dtype=torch.bool).tril())
    cache.commit(order[None], torch.tensor([9]))
    expected = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
    x, y, tapped = prompt, tree.tokens, []
    for n in cuts:
        part = load_part(str(folders[family]), range(first, first + n), torch.float, taps=[1, 2])
        if native:
            part.pack()
        own = part.new_cache(4)  # grows
        x, _ = part.run(own, x, order, torch.ones(9, 9, dtype=torch.bool).tril())
        own.commit(order[None], torch.tensor([9]))
        own.carried.clear()
        # in two calls, as layers of a tree in flight come
        head, early = part.run(own, y[:, :3], tree.depths[0, :3], tree.ancestors()[0, :3, :3])
        rest, late = part.run(own, y[:, 3:], tree.depths[0, 3:], tree.ancestors()[0, 3:], 3)
        y = torch.cat([head, rest], 1)
        tapped.append(torch.cat([early, late], 1))
        first += n
    torch.testing.assert_close(y, expected.final, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(tapped, -1), expected.tapped, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(part.logits(y), target.head(expected.final), atol=1e-3, rtol=1e-3)


def test_a_part_holds_its_own_tensors_alone(folders):
    stored = load_file(folders["llama"] / "model.safetensors")
    sizes = []
    for blocks in (range(0, 1), range(1, 3), range(3, 4)):
        part = load_part(str(folders["llama"]), blocks, torch.float)
        names = {name for name, _ in part.model.named_parameters()}
        assert all(not weight.is_meta for weight in part.model.parameters())
        assert ("model.embed_tokens.weight" in names) == (blocks.start == 0)
        assert ("lm_head.weight" in names) == ("model.norm.weight" in names) == (blocks.stop == 4)
        sizes.append(sum(weight.numel() for weight in part.model.parameters()))
    assert sum(sizes) == sum(weight.numel() for weight in stored.values())


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # which has biases
def test_a_packed_part_maps_no_file(folders, tmp_path, family):
    maps = Path("/proc/self/maps")
    if not maps.exists() or variant() is None:
        pytest.skip("needs Linux and a compiler")
    folder = shutil.copytree(folders[family], tmp_path / "target")  # which no other test has mapped
    for blocks in (range(2), range(2, 4)):
        part = load_part(str(folder), blocks, torch.float)
        assert str(folder) in maps.read_text()
        part.pack()
        gc.collect()
        assert str(folder) not in maps.read_text()


def test_a_tied_matrix_is_copied_once():
    first, second = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    stored = first.weight.data
    second.weight = first.weight  # the same parameter, unlike one that only has the same memory
    third = nn.Linear(3, 5, bias=False)
    third.weight = nn.Parameter(stored)
    model, shared = nn.ModuleList([first, second, third]), nn.Linear(2, 2)
    with CountedClones() as counted:
        unmap(model)
    places = {one.weight.data_ptr() for one in model}
    assert counted.number == len(places) == 1 and stored.data_ptr() not in places
    before = [one.data_ptr() for one in shared.parameters()]
    unmap(shared, list(shared.parameters()))
    assert [one.data_ptr() for one in shared.parameters()] == before


class CountedClones(TorchFunctionMode):
    """Counts the tensors that are cloned."""

    number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.Tensor.clone
        return func(*args, **(kwargs or {}))


def test_a_tied_head_is_the_embeddings(folders, tmp_path):
    model = load_target(str(folders["llama"]), dtype="float32", device="cpu").model
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    part = load_part(str(tmp_path), range(3, 4), torch.float)
    assert torch.equal(part.head.weight, model.get_input_embeddings().weight)


def test_the_shell_has_the_identity_of_the_whole(folders):
    whole, shell = (
        load_target(str(folders["qwen2"]), dtype="float32"),
        load_shell(str(folders["qwen2"]), torch.float),
    )
    assert shell.fingerprint == whole.fingerprint and shell.tokenizer_hash == whole.tokenizer_hash
    assert torch.equal(shell.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(shell.embed.weight, whole.embed.weight)
    assert all(weight.is_meta for weight in shell.blocks.parameters())
    shared = load_shell(str(folders["qwen2"]), torch.float, whole.embed.weight)
    assert shared.embed.weight.data_ptr() == whole.embed.weight.data_ptr()
    assert torch.equal(shared.lm_head.weight, whole.lm_head.weight)
    assert shared.fingerprint == whole.fingerprint
    assert set(stop_tokens(str(folders["qwen2"]), 2)) == whole.eos_token_ids


@pytest.mark.parametrize("native", [False, True])
def test_the_probe_compares_the_stages_with_the_whole(folders, members, native):
    place = str(folders["qwen2"])
    ids, pipeline = probe_ids(place), members("qwen2", (1, 2, 1), native=native)

    def logits():
        return run_locally([probe(member, ids) for member in pipeline])

    first, second, found = logits()
    assert first is None and second is None
    check_cut(pipeline[-1], found, place, ids, is_rounded=False)
    pipeline[1].stage.part.model.get_submodule("model.layers.0.input_layernorm").weight.data *= 1.05
    pipeline[1].stage.part.native = None
    if not native:  # whose weights are copies
        with pytest.raises(UserError, match="its stages must give the logits of the whole target, got ones"):
            check_cut(pipeline[-1], logits()[-1], place, ids, is_rounded=False)


@pytest.mark.skipif(variant() is None, reason="the native kernels need a C++ compiler and AVX2")
@pytest.mark.parametrize("rounding", [False, True])
def test_the_probe_is_exact_in_bf16(folders, members, rounding):
    """Products that round their inputs, and keys and values in bf16, hide no error and are none."""
    place = str(folders["qwen2"])
    ids, pipeline = probe_ids(place), members("qwen2", (1, 3), native=True, dtype=torch.bfloat16)
    for member in pipeline:
        member.stage.part.native.round_inputs = rounding
    head = pipeline[-1].stage.part.head.round_inputs
    found = run_locally([probe(member, ids) for member in pipeline])[-1]
    assert not any(map(rounds, pipeline))
    check_cut(pipeline[-1], found, place, ids, is_rounded=False)
    spoiled = found + 0.01 * found.std() * torch.randn_like(found)
    with pytest.raises(UserError, match="differ by 0.01 of their standard deviation"):
        check_cut(pipeline[-1], spoiled, place, ids, is_rounded=False)
    check_cut(pipeline[-1], spoiled, place, ids, is_rounded=True)
    stock = members("qwen2", (1, 3), dtype=torch.bfloat16)
    assert all(map(rounds, stock))
    found = run_locally([probe(member, ids) for member in stock])[-1]
    check_cut(stock[-1], found, place, ids, is_rounded=True)
    assert pipeline[0].stage.part.native.round_inputs == rounding
    assert pipeline[-1].stage.part.head.round_inputs == head
    assert pipeline[-1].stage.cache.dtype == torch.bfloat16  # of what is decoded next


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_states_have_the_dtype_that_a_part_names(folders, dtype):
    part, order = load_part(str(folders["llama"]), range(2), dtype), torch.arange(5)

    def states():
        below = torch.ones(5, 5, dtype=torch.bool).tril()
        return part.run(part.new_cache(8), torch.randint(3, 512, (1, 5)), order, below)[0]

    assert states().dtype == part.state_dtype == dtype
    part.pack()
    assert states().dtype == part.state_dtype == (dtype if part.native is None else torch.float)


def copied(folder, place):
    shutil.copytree(folder, place)
    return place


def test_damaged_folders_are_one_line(folders, tmp_path):
    def fails(name, change, message):
        place = copied(folders["llama"], tmp_path / name)
        change(place)
        with pytest.raises(UserError, match=message) as raised:
            load_part(str(place), range(0, 2), torch.float)
        assert "\n" not in str(raised.value)

    fails("none", lambda place: (place / "model.safetensors").unlink(), "must hold safetensors, got none")
    fails("cut", lambda place: (place / "model.safetensors").write_bytes(b"12345678"), "cannot be read")

    def without(place):
        tensors = load_file(place / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, place / "model.safetensors", {"format": "pt"})

    fails("less", without, "no weights for model.layers.1.mlp.up_proj.weight; the checkpoint is incomplete")

    def quantized(place):
        tensors = load_file(place / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})

    fails(
        "bytes", quantized, "weights must be of 16 or 32 bits to be cut, got torch.float8_e4m3fn in model.lay"
    )

    def sharded(place):
        index = {"weight_map": {name: "gone.safetensors" for name in load_file(place / "model.safetensors")}}
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text(json.dumps(index))

    fails("shard", sharded, "gone.safetensors: cannot be read")

    def mixed(place):
        tensors = load_file(place / "model.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        (place / "model.safetensors.index.json").write_text(json.dumps(index))

    fails("mixed", mixed, "no weights for model.layers.1.mlp.up_proj.weight, unlike model.safetensors.index")

    def empty(place):
        (place / "model.safetensors.index.json").write_text("{}")

    fails("empty", empty, "no weights for .*; the checkpoint is incomplete")
    index = "model.safetensors.index.json"
    for i, content in enumerate(([], {"weight_map": []}, {"weight_map": {"lm_head.weight": 1}})):
        write = partial((lambda text, place: (place / index).write_text(text)), json.dumps(content))
        fails(f"index {i}", write, f"{index}: damaged .*; fetch it")


@pytest.mark.parametrize("load", [lambda *given: load_part(given[0], range(0, 2), given[1]), load_shell])
def test_weights_of_another_model_are_one_line(folders, tmp_path, load):
    place = copied(folders["llama"], tmp_path / "target")
    settings = json.loads((place / "config.json").read_text()) | {"vocab_size": 500}
    (place / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"is stored as \[512, 64\] and config.json wants \[500, 64\]; put"):
        load(str(place), torch.float)


def test_what_cannot_be_cut(folders, tmp_path):
    with pytest.raises(UserError, match="stages.blocks: must be within the 4 blocks of .*, got 3 to 4"):
        load_part(str(folders["llama"]), range(3, 5), torch.float)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="must have blocks that can be cut apart, got a GPT2LMHeadModel"):
        load_part(str(tmp_path), range(0, 1), torch.float)
    settings = PipelineConfig(target=str(tmp_path), mode="pp")
    assert cut(settings, config) == [1, 1]  # so that the error above is the one that is seen


def test_a_target_of_several_parts_is_not_cut(tmp_path):
    text = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2)
    Mistral3Config(text_config={"model_type": "mistral", **text}).save_pretrained(tmp_path)
    for read in (load_part, part_bytes):
        with pytest.raises(UserError, match="must be a language model alone to be cut, got mistral3"):
            read(str(tmp_path), range(0, 1), torch.float)


def test_a_target_without_norms_of_inputs_is_cut(tmp_path):
    shape = dict(vocab_size=64, num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(Olmo2Config(**shape, num_attention_heads=2, pad_token_id=0)).eval()
    model.save_pretrained(tmp_path)
    prompt, order, below = torch.arange(3, 8)[None], torch.arange(5), torch.ones(5, 5).tril().bool()
    x = prompt
    for block in range(2):
        part = load_part(str(tmp_path), range(block, block + 1), torch.float)
        x, _ = part.run(part.new_cache(8), x, order, below)
    torch.testing.assert_close(part.logits(x), model(prompt).logits, atol=1e-4, rtol=1e-4)


def test_settings_of_each_block_are_those_of_the_whole(tmp_path):
    """SmolLM3 rotates no keys in every fourth block; here in the second of three."""
    shape = dict(vocab_size=64, num_hidden_layers=3, hidden_size=32, intermediate_size=64)
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    config = SmolLM3Config(**shape, no_rope_layers=[1, 0, 1], initializer_range=0.2)
    model = SmolLM3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt, order, below = torch.arange(3, 12)[None], torch.arange(9), torch.ones(9, 9).tril().bool()
    x = prompt
    for blocks in (range(1), range(1, 3)):
        part = load_part(str(tmp_path), blocks, torch.float)
        x, _ = part.run(part.new_cache(16), x, order, below)
    torch.testing.assert_close(part.logits(x), model(prompt).logits, atol=1e-4, rtol=1e-4)


def test_a_target_that_scales_its_embeddings_is_not_cut(tmp_path):
    """Every part would scale the states that it gets: with one block in each even the probe's would."""
    shape = dict(vocab_size=64, num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    GraniteForCausalLM(
        GraniteConfig(**shape, num_attention_heads=2, num_key_value_heads=2, embedding_multiplier=12.0)
    ).save_pretrained(tmp_path)
    for blocks in (range(1), range(1, 2)):
        with pytest.raises(UserError, match="must change states in blocks alone to be cut, got a GraniteFor"):
            load_part(str(tmp_path), blocks, torch.float)
    load_part(str(tmp_path), range(2), torch.float)  # the whole


@pytest.mark.parametrize("native", [False, True])
def test_taps_are_in_the_order_of_their_names(folders, whole, native):
    target, prompt, order = whole("llama", [4, 2]), torch.randint(3, 512, (1, 5)), torch.arange(5)
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = target.forward(target.new_cache(1, 8), prompt, order, below)
    part = load_part(str(folders["llama"]), range(4), torch.float, taps=[4, 2])
    if native:
        part.pack()
    _, tapped = part.run(part.new_cache(8), prompt, order, below)
    torch.testing.assert_close(tapped, expected.tapped, atol=1e-4, rtol=1e-4)


def test_messages_in_fp32_for_a_part_in_bf16(folders):
    """Whose modules are the stock ones, as without a compiler."""
    order, below = torch.arange(5), torch.ones(5, 5, dtype=torch.bool).tril()
    x = torch.randint(3, 512, (1, 5))
    for blocks in (range(2), range(2, 4)):
        part = load_part(str(folders["llama"]), blocks, torch.bfloat16)
        x = part.run(part.new_cache(8), x, order, below)[0].float()
    assert x.isfinite().all()
