"""A training that starts from another's drafter: its vocabulary, an anchor and layers that it gets."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddModel
from drafttrain.drafters.int8 import int8_rows
from drafttrain.drafters.new import new_drafter
from drafttrain.target_lm.loading import load_target
from drafttrain.training.config import TrainingConfig
from drafttrain.training.continued import DAMPING, resized_vocabulary, set_vocabulary
from drafttrain.training.start import check_continued
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

PLAIN = DrafterConfig(tapped_blocks=[-2], draft_vocab_size=50)


def weights(out) -> dict[str, torch.Tensor]:
    return load_file(out / "drafter" / "model.safetensors")


def test_a_vocabulary_grows(run_training, target_folder):
    first = run_training("first", drafter=PLAIN, max_steps=3)
    grown = run_training(
        "grown", max_steps=1, lr=1e-9, init_from=str(first / "drafter"), init_draft_vocab_size=80
    )
    old, new = weights(first), weights(grown)
    ids = {int(token): row for row, token in enumerate(new["draft_to_target"])}
    assert len(ids) == 80 and list(ids) == sorted(ids)
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    before, was = target.lm_head.weight[old["draft_to_target"]], old["lm_head.weight"]
    damped = torch.eye(before.shape[1]) * (DAMPING * before.pow(2).sum() / before.shape[1]).sqrt()
    rows, moves = torch.cat((before, damped)), torch.cat((was - before, torch.zeros_like(damped)))
    change = torch.linalg.lstsq(rows, moves).solution
    expected = target.lm_head.weight[new["draft_to_target"]] @ (torch.eye(before.shape[1]) + change)
    for row, token in enumerate(old["draft_to_target"].tolist()):
        expected[ids[token]] = was[row]
    assert (was - before).abs().max() > 1e-3  # training has moved the head
    torch.testing.assert_close(new["lm_head.weight"].float(), expected, atol=1e-5, rtol=0)
    assert EddModel.load(grown / "drafter", target).draft_vocab_size == 80


@pytest.mark.parametrize("moved", [False, True])
def test_new_rows_go_where_training_has_moved_the_others(moved, target_folder):
    """All rows of a head that is a linear map of the target's are continued by that map; one that has not
    moved gets the target's."""
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    some = torch.arange(0, target.vocab_size, 2)
    drafter = new_drafter(target, PLAIN, some)
    assert len(some) > target.hidden_size
    change = torch.randn(target.hidden_size, target.hidden_size, generator=torch.Generator().manual_seed(0))
    map_ = torch.eye(target.hidden_size) + (0.3 * change if moved else 0)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.lm_head.weight[some] @ map_)
    everything = torch.arange(target.vocab_size)
    set_vocabulary(drafter, target, everything)
    size = target.lm_head.weight.std().item()
    torch.testing.assert_close(
        drafter.lm_head.weight, target.lm_head.weight @ map_, atol=0.05 * size if moved else 1e-6, rtol=0
    )
    assert torch.equal(drafter.draft_to_target, everything) and drafter.draft_vocab_size == target.vocab_size


def test_the_vocabulary_of_medusa_stays():
    config = TrainingConfig(init_from="x", init_draft_vocab_size=80)
    with pytest.raises(UserError, match="init_draft_vocab_size: must be null for a medusa drafter, whose"):
        check_continued(config, {"model_type": "drafttrain_medusa"}, DrafterConfig(kind="medusa"))


@pytest.mark.parametrize(
    ("settings", "stored", "message"),
    [
        ({"anchor": True}, {}, "drafter.anchor: must be that of training.init_from, None, without training"),
        ({"layers": 2}, {}, "drafter.layers: must be that of training.init_from, 1, without training"),
        ({"head_dtype": "int8"}, {}, "drafter.head_dtype: must be that of training.init_from, None"),
        ({"layers_dtype": "int8"}, {}, "drafter.layers_dtype: must be that of training.init_from, None"),
        (
            {"head_dtype": "int8"},
            {"train_head": False},
            "head_dtype: must be null where .* the target's head",
        ),
    ],
)
def test_what_a_drafter_that_is_taken_cannot_become(settings, stored, message):
    config = TrainingConfig(init_from="x", max_steps=0)
    with pytest.raises(UserError, match=message):
        check_continued(config, {"model_type": "drafttrain_edd", **stored}, DrafterConfig(**settings))


@pytest.mark.parametrize(
    "kind, key, asked, there",
    [
        ("edd", "train_embeddings", True, False),
        ("edd", "train_head", False, True),
        ("eagle", "noise", 0.3, 0.1),
        ("eagle", "input_norms", True, False),
        ("medusa", "heads", 8, 5),
    ],
)
def test_what_a_training_that_goes_on_keeps(kind, key, asked, there):
    config, stored = TrainingConfig(init_from="x"), {"model_type": f"drafttrain_{kind}", key: there}
    message = f"drafter.{key}: must be {there} as in training.init_from, got {asked}; leave it out"
    with pytest.raises(UserError, match=message):
        check_continued(config, stored, DrafterConfig(kind, **{key: asked}))
    check_continued(config, stored, DrafterConfig(kind))
    check_continued(config, stored | {key: asked}, DrafterConfig(kind, **{key: asked}))


def test_matrices_become_int8_and_wide_again(run_training):
    def are_rounded(folder) -> list[bool]:
        found, rounded = weights(folder), []
        for name in ("lm_head.weight", "layers.0.k_proj.weight"):
            numbers, scales = int8_rows(found[name])
            rounded.append(torch.equal(found[name], numbers.float() * scales[:, None]))
        return rounded

    int8 = {"head_dtype": "int8", "layers_dtype": "int8"}
    first = run_training("first", drafter=replace(PLAIN, **int8), max_steps=3)
    assert are_rounded(first) == [True, True]
    assert read_json(first / "drafter" / "config.json").items() >= int8.items()
    wide = run_training("wide", max_steps=1, init_from=str(first / "drafter"))
    assert are_rounded(wide) == [False, False]
    stored = read_json(wide / "drafter" / "config.json")
    assert [stored.get(name) for name in int8] == [None, None]


def test_a_vocabulary_shrinks(run_training, target_folder):
    first = run_training("first", drafter=PLAIN, max_steps=3)
    shrunk = run_training(
        "shrunk", max_steps=1, lr=1e-9, init_from=str(first / "drafter"), init_draft_vocab_size=40
    )
    old, new = weights(first), weights(shrunk)
    kept = new["draft_to_target"]
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    assert len(kept) == 40 and target.eos_token_ids <= set(kept.tolist()) <= set(
        old["draft_to_target"].tolist()
    )
    rows = torch.searchsorted(old["draft_to_target"], kept)
    torch.testing.assert_close(new["lm_head.weight"], old["lm_head.weight"][rows], atol=1e-6, rtol=0)


def test_an_anchor_is_added(run_training, target_folder):
    first = run_training("first", drafter=PLAIN, max_steps=3)
    anchored = run_training(
        "anchored", drafter=DrafterConfig(anchor=True), max_steps=1, lr=1e-9, init_from=str(first / "drafter")
    )
    old, new = weights(first), weights(anchored)
    assert new.keys() - old.keys() == {"embed_norm.weight", "anchor_norm.weight", "anchor_fc.weight"}
    for name in old.keys() - {f"layers.0.{linear}.weight" for linear in ("o_proj", "down_proj")}:
        torch.testing.assert_close(new[name], old[name], atol=1e-6, rtol=0)
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    drafter = EddModel.load(anchored / "drafter", target)
    assert drafter.config.anchor and drafter.config.tapped_blocks == [2]


def test_layers_are_added(run_training, target_folder):
    """They change no draft before they are trained, and then they learn."""
    first = run_training("first", drafter=replace(PLAIN, anchor=True), max_steps=3)
    start = {"drafter": DrafterConfig(layers=3), "init_from": str(first / "drafter")}
    still = run_training("still", max_steps=1, lr=1e-9, **start)
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    target.tap([2])
    drafters = [EddModel.load(run / "drafter", target).eval() for run in (first, still)]
    assert [len(drafter.layers) for drafter in drafters] == [1, 3] and drafters[1].config.anchor
    found = []
    for drafter in drafters:
        state = drafter.new_state(1, 16)
        drafter.update(state, torch.arange(4)[None], torch.ones(1, 4, 64).cumsum(1), torch.tensor([4]))
        tree = TokenTree.root_only(torch.tensor([7]))
        found.append(drafter.expand(state, tree, torch.zeros(1, 1, dtype=torch.long)))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    taught = weights(run_training("taught", max_steps=2, lr=1e-2, **start))
    for name in ("layers.1.o_proj.weight", "layers.2.down_proj.weight"):
        assert weights(still)[name].abs().max() < 1e-5 < taught[name].abs().max()


@pytest.mark.parametrize(
    ("size", "expected"), [(3, [0, 4, 6]), (4, [0, 2, 4, 6]), (5, [0, 2, 3, 4, 6]), (2, [4, 6])]
)
def test_a_vocabulary_of_another_size(size, expected):
    """Tokens leave by how rare they are, stop tokens (6) last; others come by how frequent they are."""
    counts = np.array([5, 0, 3, 9, 7, 1, 0])
    assert resized_vocabulary(counts, size, [0, 2, 4, 6], {6}).tolist() == expected
