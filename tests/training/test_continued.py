"""A training that starts from another's drafter: its vocabulary, and an anchor that it gets."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddModel
from drafttrain.target_lm.loading import load_target
from drafttrain.training.continued import resized_vocabulary

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
    expected = target.lm_head.weight[new["draft_to_target"]].clone()
    for row, token in enumerate(old["draft_to_target"].tolist()):
        expected[ids[token]] = old["lm_head.weight"][row]
    torch.testing.assert_close(new["lm_head.weight"].float(), expected, atol=1e-6, rtol=0)
    assert EddModel.load(grown / "drafter", target).draft_vocab_size == 80


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


@pytest.mark.parametrize(
    ("size", "expected"), [(3, [0, 4, 6]), (4, [0, 2, 4, 6]), (5, [0, 2, 3, 4, 6]), (2, [4, 6])]
)
def test_a_vocabulary_of_another_size(size, expected):
    """Tokens leave by how rare they are, stop tokens (6) last; others come by how frequent they are."""
    counts = np.array([5, 0, 3, 9, 7, 1, 0])
    assert resized_vocabulary(counts, size, [0, 2, 4, 6], {6}).tolist() == expected
