"""The C2T paper's tables and figures, on made-up trees and the tiny target."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.classifier.data import Rows, read_rows
from drafttrain.classifier.dump import SCHEMA
from drafttrain.classifier.model import Classifier
from drafttrain.data.prompts import read_prompts
from drafttrain.trees.features import FEATURES
from drafttrain.utils.errors import UserError
from studies.c2t import features, figure2, figure7, figure11, figures9_10, states, table4, table7, thresholds


@pytest.fixture
def labelled(tmp_path):
    """Trees of 60 nodes; the most probable of three tokens below the root is accepted in three of four."""
    rng, n = np.random.default_rng(0), 60 * 80
    rank, depth = np.tile(np.arange(3), n // 3), np.tile(np.repeat([1, 2, 3, 4], 15), n // 60)
    p = np.choose(rank, [0.5, 0.2, 0.1])
    columns = {
        "tree": np.repeat(np.arange(80), 60),
        "P": p**depth,
        "H": rng.random(n) * 4,
        "d": depth,
        "p": p,
        "rank": rank,
        "parent_rank": rank - 1,
        "accepted": (rank == 0) & (rng.random(n) < 0.75**depth),
    }
    folder = tmp_path / "labelled"
    folder.mkdir()
    arrays = {f.name: pa.array(columns[f.name]).cast(f.type, safe=False) for f in SCHEMA}
    pq.write_table(pa.table(arrays), folder / "shard-00000.parquet")
    shards = [{"file": "shard-00000.parquet", "rows": n}]
    record = {"format_version": 1, "made_from": {"max_new_tokens": 8}, "trees": 80, "shards": shards}
    (folder / "trees.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def analysis(labelled, tiny_bundle, questions, tmp_path):
    """Runs a study over those trees and the tiny bundle; returns the folder it writes to."""
    Classifier(hidden=2).save(tmp_path / "classifier", {})
    values = {
        "--bundle": str(tiny_bundle),
        "--classifier": str(tmp_path / "classifier"),
        "--trees": str(labelled),
        "--prompts": str(questions),
        "--limit": "2",
        "--new-tokens": "6",
    }

    def run(study: ModuleType, *names: str) -> Path:
        words = [word for name in names for word in (f"--{name}", values[f"--{name}"])]
        assert study.main([*words, "--out", str(tmp_path / "out")]) == 0
        return tmp_path / "out"

    return run


DECODED = ("bundle", "classifier", "prompts", "limit", "new-tokens")


def test_heatmaps_of_bias(analysis):
    out = analysis(figure2, "trees")
    found = json.loads((out / "heatmaps.json").read_text())
    assert np.sum(found["nodes"]) == 80 * 15 and len(found["bias"]) == 7
    assert found["probability"][0] == pytest.approx([0.5, 0.2, 0.1])
    assert found["bias"][6] == [None] * 3  # no entropy above 6
    for row in found["bias"][:4]:
        assert -0.4 < row[0] < -0.1 and row[1:] == pytest.approx([0.2, 0.1])
    assert (out / "heatmaps.png").stat().st_size > 5000


def test_surfaces_sizes_and_drafting_time(analysis):
    assert (analysis(figures9_10, "classifier") / "surfaces.png").stat().st_size > 5000
    points = (analysis(table4, *DECODED) / "sizes" / "points.jsonl").read_text().splitlines()
    assert [json.loads(line)["tree"].partition(":")[0] for line in points] == [
        "eagle1",
        *["eagle2"] * 2,
        *["c2t"] * 4,
    ]
    rows = json.loads((analysis(figure11, *DECODED) / "drafting.json").read_text())
    for name, row in rows.items():
        assert row["drafter"] > 0 and row["rest"] > 0
        assert (row["classifier"] > 0) == name.startswith("c2t") == (row["entropy"] > 0)


def test_thresholds(analysis):
    rows = json.loads((analysis(thresholds, *DECODED) / "thresholds.json").read_text())
    assert rows[0]["tree"].startswith("pct:") and rows[0]["over_pct"] == 1
    assert sum("expand" in row["tree"] for row in rows) == 4 and rows[-1]["tokens_per_second"] > 0


def test_fine_tuning_against_a_shift(analysis):
    found = json.loads((analysis(figure7, "classifier", "trees") / "shift.json").read_text())
    assert set(found) == {"config", "elsewhere", "fine-tuned", "here"}
    # what knows nothing is as good as chance, what has learned here ranks the accepted first
    assert found["here"]["at"]["0.1"] > found["elsewhere"]["at"]["0.1"]


def test_what_features_are_worth(labelled, tmp_path):
    rows = read_rows(labelled, FEATURES)
    chains = features.chain_nodes(rows)
    assert np.bincount(rows.tree[chains]).tolist() == [4] * 80  # one node a layer
    assert (rows.x[chains, FEATURES.index("rank")] == 0).all()
    first_three = rows.tree < 3
    accepted = [int(rows.accepted[rows.tree == tree].sum()) for tree in range(10)]
    known = dict(zip(features.KNOWN, features.known_features(rows, per_prompt=8).T))
    for tree in range(10):  # the ninth begins another prompt
        mine, before = rows.tree == tree, accepted[max(tree - 3, 8 * (tree // 8)) : tree]
        assert set(known["last"][mine]) == {before[-1] if before else -1}
        assert known["recent"][mine][0] == pytest.approx(np.mean(before) if before else -1)
        assert set(known["place"][mine]) == {tree % 8} and set(known["H1"][mine]) == {rows.x[60 * tree, 1]}

    few, at = rows.take(first_three), np.array([0.5, 1.0])
    best = sorted(zip(few.joint, few.accepted), key=lambda node: -node[0])
    counts = np.cumsum([hit for _, hit in best])
    expected = [(np.searchsorted(counts, 3 * a) + 1) / 3 for a in at]
    assert features.taken(few.joint, few.accepted, 3, at) == pytest.approx(expected, abs=1 / 3)
    at = []
    for n in (2, 7):  # accepted among the n best of each tree
        trees = [few.take(few.tree == tree) for tree in range(3)]
        kept = [tree.accepted[np.argsort(-tree.joint, kind="stable")[:n]].sum() for tree in trees]
        at.append(sum(kept) / 3)
    least, most = features.fixed_size(few, 3, np.array(at))
    assert at[0] < at[1] and 1 <= least <= 2 < most <= 7

    assert features.main(["--trees", str(labelled), "--out", str(tmp_path / "features")]) == 0
    found = json.loads((tmp_path / "features" / "features.json").read_text())
    assert len(found["chains"]) == 1 + len(features.SETS) and len(found["trees"]) == 2 + len(features.SETS)
    assert all(len(row["seeds"]) == 3 for row in list(found["chains"].values())[1:])


def test_states_are_those_of_parents(tiny_bundle, questions, monkeypatch):
    monkeypatch.setattr(states, "LEAST", 0.0)
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    prompts = [prompt.token_ids(bundle.target.tokenizer) for prompt in read_prompts(questions, 2)]
    known = states.known_nodes(bundle, prompts, new_tokens=3)
    p, drafter = known.rows.x[:, FEATURES.index("p")], bundle.drafter
    place = np.searchsorted(drafter.draft_to_target.numpy(), known.token)
    probabilities = drafter.lm_head(known.states.float()).softmax(-1).numpy()  # [S, D]
    np.testing.assert_allclose(probabilities[known.state, place], p, rtol=0.01)
    assert set(known.prompt) == {0, 1} and np.unique(known.rows.tree, return_counts=True)[1].tolist() == [
        1010
    ] * (known.rows.tree.max() + 1)
    assert "keep_outputs" not in vars(drafter)
    below = known.parent >= 0
    joint, depth = known.rows.joint, known.rows.depth
    np.testing.assert_allclose(joint[below], joint[known.parent[below]] * p[below], rtol=0.01)
    assert (depth[below] == depth[known.parent[below]] + 1).all() and (depth[~below] == 1).all()
    score = np.random.default_rng(0).random(len(p))
    least = states.with_ancestors(score, known)
    for node in range(0, len(p), 97):
        path = [node]
        while known.parent[path[-1]] >= 0:
            path.append(known.parent[path[-1]])
        assert least[node] == score[path].min()


def test_what_states_are_worth(monkeypatch):
    """States that say what no feature says are worth something, to judges that read them alone."""
    rng = np.random.default_rng(0)
    trees, each = 240, 24
    n = trees * each
    vectors, state = torch.from_numpy(rng.standard_normal((n // 4, 16))).half(), np.arange(n) // 4
    accepted = (vectors[:, 0].numpy()[state] > 1) & (np.arange(n) % 4 == 0)
    p = np.where(np.arange(n) % 4 == 0, 0.3, 0.2) + 0.01 * rng.random(n)
    x = np.stack([p, rng.random(n), np.ones(n), p, np.arange(n) % 4], 1).astype(np.float32)
    tree = np.repeat(np.arange(trees), each)
    rows = Rows(x, x[:, 0], accepted, tree, np.ones(n, np.int8))
    known = states.Known(rows, tree // 4, np.full(n, -1), state, vectors, rng.integers(0, 50, n))
    monkeypatch.setattr(states, "WIDTHS", (16,))
    monkeypatch.setattr(states, "RATE", 1e-2)
    monkeypatch.setattr(states, "ACCEPTED", {"trees": np.array([0.3, 0.5]), "chains": np.array([0.1])})
    found = states.compare(known, torch.from_numpy(rng.standard_normal((50, 16))).float())
    blind, sees, both = (row["mean"] for row in list(found["trees"].values())[1:])
    assert blind > 0.85 and sees < 0.5 and both < 0.6
    assert found["chains"].keys() == found["trees"].keys()
    monkeypatch.setattr(states, "ACCEPTED", {"trees": np.array([7.0]), "chains": np.array([0.1])})
    with pytest.raises(UserError, match="--limit: too few accepted nodes"):
        states.compare(known, torch.zeros(50, 16))


def test_transfer_to_another_drafter(analysis, monkeypatch):
    monkeypatch.setattr(table7, "BETAS", (0.3, 0.1))
    out = analysis(table7, "trees", *DECODED)
    found = json.loads((out / "transfer.json").read_text())
    families = {point["tree"].partition(":")[0] for point in found["points"]}
    assert families == {"here", "few trees", "fine-tuned", "elsewhere", "joint"}
    assert len(found["points"]) == 5 * 2 and "elsewhere" in found["over here"]
    tuned = json.loads((out / "fine-tuned" / "classifier.json").read_text())
    assert tuned["training"]["fine_tuned_from"] and tuned["training"]["batch_size"] == 64


def test_an_analysis_without_a_classifier_is_refused(tiny_bundle, tmp_path, capsys):
    assert figure11.main(["--bundle", str(tiny_bundle), "--out", str(tmp_path / "out")]) == 2
    assert "has no classifier; train one" in capsys.readouterr().err
