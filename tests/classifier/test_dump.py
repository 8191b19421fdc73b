"""Labels against real verification of full trees, greedy and sampled; the files, and how a dump resumes."""

import json
import os
import shutil
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from drafttrain.classifier import dump
from drafttrain.classifier.config import DumpConfig
from drafttrain.classifier.data import read_rows
from drafttrain.classifier.dump import accepted_nodes, label_trees, write_trees
from drafttrain.classifier.model import Classifier
from drafttrain.data.config import PromptSet
from drafttrain.inference.acceptance import AcceptanceRule, accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import TreeProposer
from drafttrain.run.c2t import dump_trees
from drafttrain.run.cli import main
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy, expand_best
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [20, 21]]


class TargetWithNoise(Drafter):
    """Drafts the target's own tokens, disturbed; no model drafter is like it."""

    def __init__(self, target: FrozenTarget):
        self.target, self.draft_vocab_size = target, target.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(target.vocab_size, target.vocab_size, generator=generator)

    def new_state(self, batch, max_len):
        return [[] for _ in range(batch)]

    def update(self, state, tokens, tapped, counts):
        for row, count in enumerate(counts.tolist()):
            state[row] += tokens[row, :count].tolist()

    @torch.no_grad()
    def expand(self, state, tree, frontier):
        rows = []
        for row, nodes in enumerate(frontier.tolist()):
            for node in nodes:
                path = tree.tokens[row, tree.ancestors()[row, node]].tolist()
                ids = torch.tensor([state[row] + path])
                final = self.target.base(input_ids=ids).last_hidden_state[:, -1]  # [1, H]
                rows.append(self.target.head(final)[0] + self.noise[path[-1]])
        return torch.stack(rows).log_softmax(-1).view(*frontier.shape, -1)

    def to_target(self, ids):
        return ids


class Recorded(Eagle2Policy):
    """Grows full trees and, as the rule of the same decoding, notes which nodes another rule accepts."""

    def grow(self, drafter, state, root):
        self.tree = expand_best(drafter, state, root, self.top_k, self.max_depth, entropies=True)
        return self.tree

    def watch(self, rule):
        self.found = found = []

        class Watched(AcceptanceRule):
            def __call__(self, tree, logits):
                accepted = rule(tree, logits)
                if tree.width > 1:
                    labels = torch.zeros(tree.width, dtype=torch.bool)
                    labels[accepted.path[0, : int(accepted.counts[0])]] = True
                    found.append((tree, labels[1:]))
                return accepted

        return Watched()


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_labels_are_what_verification_accepts(tiny_target, tmp_path, temperature):
    config = DumpConfig(PromptSet("x", "x"), 6, top_k=3, max_depth=3, temperature=temperature, seed=5, rows=3)
    drafter = TargetWithNoise(tiny_target)
    record = write_trees(config, tiny_target, drafter, PROMPTS, tmp_path, {})
    table = pq.read_table(tmp_path / "shard-00000.parquet").to_pydict()
    columns = {name: np.array(values) for name, values in table.items()}
    n_trees = 0
    for number, prompt in enumerate(PROMPTS):
        rule = accept_greedy
        if temperature:
            rule = AcceptMatching([SamplingParams(temperature, seed=5 * 1_000_003 + number)])
        policy = Recorded(3, 3, None)
        [text], _ = decode_all(
            tiny_target, TreeProposer(drafter, policy), [prompt], 6 + 8, accept=policy.watch(rule)
        )
        place = 0
        for tree, labels in policy.found:
            if place >= 6:
                break
            mine = columns["tree"] == number * 6 + place
            assert mine.sum() == tree.width - 1 == 3 + 9 + 9
            assert columns["accepted"][mine].tolist() == labels.tolist()
            assert columns["d"][mine].tolist() == tree.depths[0, 1:].tolist()
            np.testing.assert_allclose(columns["P"][mine], tree.joint_log_probs()[0, 1:].exp(), rtol=1e-4)
            np.testing.assert_allclose(columns["p"][mine], tree.log_probs[0, 1:].exp(), rtol=1e-4)
            np.testing.assert_allclose(columns["H"][mine], tree.entropies[0, 1:], rtol=1e-4)
            rank = columns["rank"][mine]
            assert rank.tolist() == [0, 1, 2] * 7
            above = tree.parents[0, 1:].numpy()
            assert columns["parent_rank"][mine].tolist() == np.where(above, rank[above - 1], -1).tolist()
            n_trees += 1
            place += 1 + int(labels.sum())
    assert record["trees"] == n_trees == len(set(columns["tree"]))
    assert record["rows"] == len(columns["tree"]) == n_trees * 21 == n_trees * record["nodes"]
    assert record["accepted"] == columns["accepted"].sum() > n_trees / 2
    assert record["left_out"] == 0 and 0 < columns["accepted"][columns["d"] == 3].sum()


def test_a_node_counts_only_if_its_ancestors_do():
    """Root 1 with children 2 and 3; both have a child 4, and the target generates 3, 4, then ends."""
    tree = TokenTree.root_only(torch.tensor([1]))
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[2, 3]]), torch.zeros(1, 2))
    tree = tree.append(torch.tensor([[1, 2]]), torch.tensor([[4, 4]]), torch.zeros(1, 2))
    tree = tree.append(torch.tensor([[4]]), torch.tensor([[0]]), torch.zeros(1, 1))
    accepted = accepted_nodes(tree, torch.tensor([[1, 3, 4, -1]]))
    assert accepted.tolist() == [[True, False, True, False, True, False]]


class Knows(Drafter):
    """Drafts from the texts themselves, and notes what it has observed."""

    draft_vocab_size = 50

    def __init__(self, texts):
        self.texts, self.seen = texts, [[] for _ in texts]

    def new_state(self, batch, max_len):
        return None

    def update(self, state, tokens, tapped, counts):
        assert torch.equal(tapped[..., 0].long(), tokens)
        for row, count in enumerate(counts.tolist()):
            self.seen[row] += tokens[row, :count].tolist()

    def expand(self, state, tree, frontier):
        log_probs = torch.full((*frontier.shape, 50), -20.0)
        for row, nodes in enumerate(frontier.tolist()):
            for i, node in enumerate(nodes):
                at = len(self.seen[row]) + int(tree.depths[row, node]) + 1
                # every fifth token is not known, and there is nothing after the end
                if at < len(self.texts[row]) and self.texts[row][at] % 5:
                    log_probs[row, i, self.texts[row][at]] = 0.0
        return log_probs

    def to_target(self, ids):
        return ids


def test_walks_as_decoding_does():
    """Rows of unequal length: each begins after its prompt, goes on after what was accepted, and ends."""
    texts = [list(range(1, 31)), [7, 8, 9, 11, 12, 49]]
    ids = torch.tensor([texts[0], texts[1] + [-1] * 24])
    drafter = Knows(texts)
    steps = label_trees(
        drafter,
        ids,
        ids.clamp(min=0)[..., None].float(),
        starts=torch.tensor([4, 2]),
        ends=torch.tensor([20, 5]),
        top_k=2,
        max_depth=3,
    )
    roots: list[list[int]] = [[], []]
    for tree, accepted, at, active in steps:
        for row in active.nonzero()[:, 0].tolist():
            assert int(tree.tokens[row, 0]) == texts[row][at[row]]
            assert drafter.seen[row] == texts[row][: at[row]]
            roots[row].append((int(at[row]), int(accepted[row].sum()) - 1))
    # text position i holds i + 1; multiples of 5 are not drafted
    assert roots[0] == [(4, 3), (8, 0), (9, 3), (13, 0), (14, 3), (18, 0), (19, 3)]
    assert roots[1] == [(2, 3)]


def test_rows_that_are_not_finite_are_left_out(tiny_target, tmp_path):
    class Broken(TargetWithNoise):
        def expand(self, state, tree, frontier):
            log_probs = super().expand(state, tree, frontier)
            return log_probs.masked_fill((tree.depths.gather(1, frontier) == 1)[..., None], torch.nan)

    config = DumpConfig(PromptSet("x", "x"), 2, top_k=2, max_depth=2)
    record = write_trees(config, tiny_target, Broken(tiny_target), PROMPTS[:1], tmp_path, {})
    assert record["rows"] == 2 * record["trees"] and record["left_out"] == 4 * record["trees"] > 0
    assert set(pq.read_table(tmp_path / "shard-00000.parquet")["d"].to_pylist()) == {1}


@pytest.fixture
def dumped(tiny_bundle, questions, tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "SHARD_PROMPTS", 2)
    config = DumpConfig(PromptSet("x", str(questions)), 5, top_k=4, max_depth=2)

    def run(**changes):
        changed = DumpConfig(**{**vars(config), **changes})
        return dump_trees(changed, tiny_bundle, tmp_path / "out", dtype="float32", device="cpu")

    return run, tmp_path / "out"


def test_resumes_and_repeats_what_is_damaged(dumped, monkeypatch, capsys):
    run, out = dumped
    whole = run()
    assert whole["nodes"] == 4 + 16 and [shard["prompts"] for shard in whole["shards"]] == [2, 2]
    assert "at most 20 trees" in capsys.readouterr().out
    contents = [pq.read_table(out / shard["file"]) for shard in whole["shards"]]
    grown = []
    real = dump._write_shard
    monkeypatch.setattr(dump, "_write_shard", lambda *args: grown.append(args[5].name) or real(*args))
    assert run()["rows"] == whole["rows"] and grown == []

    os.truncate(out / "shard-00001.parquet", 100)  # a copy that was cut off
    (out / ".shard-00001.parquet.tmp").write_bytes(b"x")  # a killed writer's
    run()
    assert grown == ["shard-00001.parquet"]
    assert sorted(path.name for path in out.iterdir()) == [
        "shard-00000.parquet",
        "shard-00001.parquet",
        "trees.json",
    ]
    for shard, before in zip(whole["shards"], contents):
        assert pq.read_table(out / shard["file"]) == before


def interrupt_second_shard(monkeypatch) -> Callable:
    """Raise KeyboardInterrupt in place of writing the second shard; return what writes shards."""
    real = dump._write_shard

    def killed(*args):
        if args[5].name == "shard-00001.parquet":
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(dump, "_write_shard", killed)
    return real


def test_killed_between_shards(dumped, monkeypatch):
    run, out = dumped
    real = interrupt_second_shard(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(json.loads((out / "trees.json").read_text())["shards"]) == 1
    monkeypatch.setattr(dump, "_write_shard", real)
    assert len(run()["shards"]) == 2
    assert len(run(seed=1)["shards"]) == 2  # which greedy texts do not depend on
    with pytest.raises(UserError, match="holds trees of another drafter, other prompts or settings"):
        run(temperature=1.0)


def test_the_limit_can_grow(dumped, questions):
    """Shards whose prompts stay are kept, the others are grown again."""
    run, out = dumped
    few = run(prompts=PromptSet("x", str(questions), 3))["shards"]
    assert [shard["prompts"] for shard in few] == [2, 1]
    shards = run()["shards"]
    assert [shard["prompts"] for shard in shards] == [2, 2]
    assert shards[0] == few[0] and shards[1]["fingerprint"] != few[1]["fingerprint"]
    other = run(prompts=PromptSet("x", str(questions), 2))["shards"]  # the first and the third
    assert [shard["prompts"] for shard in other] == [2] and other[0]["fingerprint"] != few[0]["fingerprint"]
    shards = run()["shards"]
    trees = [tree for shard in shards for tree in pq.read_table(out / shard["file"])["tree"].to_pylist()]
    assert {tree // 5 for tree in trees} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": 0}, "top_k: must be >= 1 and <= 127, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be >= 1, got 0"),
        ({"top_k": 300}, "top_k: must be >= 1 and <= 127, got 300"),
        ({"temperature": -1.0}, "temperature: must be >= 0, got -1"),
        ({"max_new_tokens": 600}, "prompt 81: .* must fit into the 512 positions"),
        ({"prompts": PromptSet("x", "nowhere.jsonl")}, "nowhere.jsonl: no such file"),
    ],
)
def test_unusable_settings(dumped, changes, message):
    with pytest.raises(UserError, match=message):
        dumped[0](**changes)


def test_trees_of_another_format_are_refused(dumped):
    run, out = dumped
    out.mkdir()
    (out / "trees.json").write_text('{"format_version": 0}')
    with pytest.raises(UserError, match="no trees of format 1"):
        run()


def test_command(tiny_bundle, questions, tmp_path, capsys):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    words = [
        "--prompts",
        str(questions),
        "--trees",
        str(tmp_path / "out"),
        "--limit",
        "1",
        "--dtype",
        "float32",
    ]
    words += ["--max-new-tokens", "3", "--top-k", "3", "--max-depth", "2", "--temperature", "0.7"]
    assert main(["c2t", str(bundle), *words]) == 0
    assert "trees of 12 nodes" in capsys.readouterr().out
    Classifier().save(bundle, {})  # a classifier beside the drafter does not make it another
    assert main(["c2t", str(bundle), *words]) == 0
    made_from = json.loads((tmp_path / "out" / "trees.json").read_text())["made_from"]
    assert made_from["temperature"] == 0.7 and made_from["seed"] == 0 and made_from["top_k"] == 3


def test_what_an_interrupted_dump_of_other_prompts_lists(tiny_target, tmp_path, monkeypatch):
    """Shards of the earlier selection are not among those of this one."""
    monkeypatch.setattr(dump, "SHARD_PROMPTS", 1)
    config = DumpConfig(PromptSet("x", "x"), 6, top_k=3, max_depth=3, rows=3)
    given = config, tiny_target, TargetWithNoise(tiny_target)
    shards = write_trees(*given, PROMPTS, tmp_path, {})["shards"]
    assert len(read_rows(tmp_path, ["P", "d"])) == sum(shard["rows"] for shard in shards)
    interrupt_second_shard(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        write_trees(*given, PROMPTS[1:], tmp_path, {}, shards)
    record = json.loads((tmp_path / "trees.json").read_text())
    assert not record["finished"] and [one["file"] for one in record["shards"]] == ["shard-00000.parquet"]
    with pytest.raises(UserError, match="must be a finished dump, got an interrupted one"):
        read_rows(tmp_path, ["P", "d"])


def test_a_shard_of_the_same_size_with_other_bytes_is_repeated(dumped):
    run, out = dumped
    whole = run()
    path = out / whole["shards"][0]["file"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert run()["rows"] == whole["rows"] and path.read_bytes() != bytes(data)


def test_a_damaged_classifier_can_be_replaced(tiny_bundle, questions, tmp_path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (bundle / "classifier.json").write_text("{}")
    config = DumpConfig(PromptSet("x", str(questions), 1), 2, top_k=2, max_depth=2)
    assert dump_trees(config, bundle, tmp_path / "out", dtype="float32", device="cpu")["trees"] > 0
