"""The scripts that measure trees and profile decoding, run on the tiny target."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.classifier.data import read_rows
from drafttrain.classifier.dump import SCHEMA
from drafttrain.classifier.model import Classifier
from drafttrain.data.config import PromptSet, Source
from drafttrain.drafters.config import DrafterConfig
from drafttrain.run import calibrate as stage
from drafttrain.run.calibrate import calibrate
from drafttrain.self_draft.build import build_ngrams
from drafttrain.self_draft.config import NgramConfig
from drafttrain.training.config import TrainingConfig
from drafttrain.trees.features import FEATURES
from tests.conftest import SENTENCES, with_cheap_drafts


def load(name: str) -> ModuleType:
    return importlib.import_module(f"studies.{name}")


@pytest.fixture
def trees(tiny_bundle, questions, tmp_path, monkeypatch):
    """`main` of studies/trees.py over the tiny bundle and four chats; returns the folder it writes to."""
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions)), max_new_tokens=8, rounds=1)
    calibrate(config, tiny_bundle, tmp_path / "calibration", device="cpu")
    with_cheap_drafts(tmp_path / "calibration")
    module = load("trees")
    monkeypatch.setattr(module, "MT_BENCH", str(questions))
    monkeypatch.setattr(module, "TASKS", {"MT-bench": (str(questions), 2), "other": (str(questions), 1)})
    monkeypatch.setattr(module, "TREES", {**module.TREES, "VCT": "vct:width=2,depth=2", "PCT": "pct:width=2"})
    monkeypatch.setattr(module, "NEW_TOKENS", 6)

    def run(what: str) -> Path:
        places = ["--bundle", str(tiny_bundle), "--calibration", str(tmp_path / "calibration")]
        assert module.main([what, *places, "--limit", "2", "--out", str(tmp_path / "out")]) == 0
        return tmp_path / "out"

    return run


def test_table2(trees):
    lines = (trees("table2") / "table2.md").read_text().splitlines()
    names = ["VCT", "CAPE", "EAGLE-2", "PCT", "PCT w/o removing leaves", "PCT w/o expected gain"]
    assert [line.split("|")[1].strip() for line in lines[2:8]] == names
    assert all(len(line.split("|")) == 2 + 1 + 5 * 2 for line in lines[:8])
    assert lines[-1].startswith("Answers: MT-bench 4, other 2;")


def test_width(trees):
    out = trees("width")
    found = json.loads((out / "width.json").read_text())
    assert list(found) == [str(n) for n in range(1, 9)] and found["1"]["nodes"] < found["8"]["nodes"]
    assert (out / "width.png").stat().st_size > 5000


def test_categories(trees):
    out = trees("categories")
    assert set(json.loads((out / "categories.json").read_text())) == {"x"}
    raw = [json.loads(line) for line in (out / "categories.jsonl").read_text().splitlines()]
    assert len(raw) == 2 and all(len(row["nodes"]) == len(row["tokens"]) for row in raw)


def test_sample(trees):
    text = (trees("sample") / "sample.md").read_text()
    assert "without drafts (6 tokens in 6 iterations)" in text and "EDD + PCT" in text


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
def analysis(labelled, tiny_bundle, questions, tmp_path, monkeypatch):
    """`main` of studies/c2t_analysis.py over those trees and the tiny bundle."""
    module = load("c2t_analysis")
    monkeypatch.setattr(module, "MT_BENCH", str(questions))
    monkeypatch.setattr(module, "TUNING", str(questions))
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    Classifier(hidden=2).save(tmp_path / "classifier", {})

    def run(what: str) -> Path:
        places = ["--bundle", str(tiny_bundle), "--classifier", str(tmp_path / "classifier")]
        places += ["--trees", str(labelled), "--out", str(tmp_path / "out"), "--limit", "2"]
        assert module.main([what, *places]) == 0
        return tmp_path / "out"

    run.module = module
    return run


def test_heatmaps_of_bias(analysis):
    out = analysis("heatmaps")
    found = json.loads((out / "heatmaps.json").read_text())
    assert np.sum(found["nodes"]) == 80 * 15 and len(found["bias"]) == 7
    assert found["probability"][0] == pytest.approx([0.5, 0.2, 0.1])
    assert found["bias"][6] == [None] * 3  # no entropy above 6
    for row in found["bias"][:4]:
        assert -0.4 < row[0] < -0.1 and row[1:] == pytest.approx([0.2, 0.1])
    assert (out / "heatmaps.png").stat().st_size > 5000


def test_surfaces_sizes_and_drafting_time(analysis):
    assert (analysis("surfaces") / "surfaces.png").stat().st_size > 5000
    points = (analysis("sizes") / "sizes" / "points.jsonl").read_text().splitlines()
    assert [json.loads(line)["tree"].partition(":")[0] for line in points] == [
        "eagle1",
        *["eagle2"] * 2,
        *["c2t"] * 4,
    ]
    rows = json.loads((analysis("drafting") / "drafting.json").read_text())
    for name, row in rows.items():
        assert row["drafter"] > 0 and row["rest"] > 0
        assert (row["classifier"] > 0) == name.startswith("c2t") == (row["entropy"] > 0)


def test_thresholds(analysis):
    rows = json.loads((analysis("thresholds") / "thresholds.json").read_text())
    assert rows[0]["tree"].startswith("pct:") and rows[0]["over_pct"] == 1
    assert sum("expand" in row["tree"] for row in rows) == 4 and rows[-1]["tokens_per_second"] > 0


def test_fine_tuning_against_a_shift(analysis):
    found = json.loads((analysis("shift") / "shift.json").read_text())
    assert set(found) == {"config", "elsewhere", "fine-tuned", "here"}
    # what knows nothing is as good as chance, what has learned here ranks the accepted first
    assert found["here"]["at"]["0.1"] > found["elsewhere"]["at"]["0.1"]


def test_trainings_from_before_a_setting_are_known():
    """What an earlier version trained is what this one would train, if all that is new stays off."""
    old = json.loads(json.dumps({"drafter": asdict(DrafterConfig(kind="vdm")), "training": {"lr": 0.5}}))
    del old["drafter"]["anchor"], old["drafter"]["kv_heads"]
    now = {"drafter": asdict(DrafterConfig(kind="vdm")), "training": asdict(TrainingConfig(lr=0.5))}
    assert load("baselines").with_defaults(old) == json.loads(json.dumps(now))


def test_what_features_are_worth(labelled, tmp_path):
    module = load("c2t_features")
    rows = read_rows(labelled, FEATURES)
    chains = module.chain_nodes(rows)
    assert np.bincount(rows.tree[chains]).tolist() == [4] * 80  # one node a layer
    assert (rows.x[chains, FEATURES.index("rank")] == 0).all()
    first_three = rows.tree < 3
    accepted = [int(rows.accepted[rows.tree == tree].sum()) for tree in range(10)]
    known = dict(zip(module.KNOWN, module.known_features(rows, per_prompt=8).T))
    for tree in range(10):  # the ninth begins another prompt
        mine, before = rows.tree == tree, accepted[max(tree - 3, 8 * (tree // 8)) : tree]
        assert set(known["last"][mine]) == {before[-1] if before else -1}
        assert known["recent"][mine][0] == pytest.approx(np.mean(before) if before else -1)
        assert set(known["place"][mine]) == {tree % 8} and set(known["H1"][mine]) == {rows.x[60 * tree, 1]}

    few, at = rows.take(first_three), np.array([0.5, 1.0])
    best = sorted(zip(few.joint, few.accepted), key=lambda node: -node[0])
    counts = np.cumsum([hit for _, hit in best])
    expected = [(np.searchsorted(counts, 3 * a) + 1) / 3 for a in at]
    assert module.taken(few.joint, few.accepted, 3, at) == pytest.approx(expected, abs=1 / 3)
    at = []
    for n in (2, 7):  # accepted among the n best of each tree
        trees = [few.take(few.tree == tree) for tree in range(3)]
        kept = [tree.accepted[np.argsort(-tree.joint, kind="stable")[:n]].sum() for tree in trees]
        at.append(sum(kept) / 3)
    least, most = module.fixed_size(few, 3, np.array(at))
    assert at[0] < at[1] and 1 <= least <= 2 < most <= 7

    assert module.main([str(labelled), "--out", str(tmp_path / "features")]) == 0
    found = json.loads((tmp_path / "features" / "features.json").read_text())
    assert len(found["chains"]) == 1 + len(module.SETS) and len(found["trees"]) == 2 + len(module.SETS)
    assert all(len(row["seeds"]) == 3 for row in list(found["chains"].values())[1:])


def test_transfer_to_another_drafter(analysis):
    analysis.module.BETAS = (0.3, 0.1)
    out = analysis("transfer")
    found = json.loads((out / "transfer.json").read_text())
    families = {point["tree"].partition(":")[0] for point in found["points"]}
    assert families == {"here", "few trees", "fine-tuned", "elsewhere", "joint"}
    assert len(found["points"]) == 5 * 2 and "elsewhere" in found["over here"]
    tuned = json.loads((out / "fine-tuned" / "classifier.json").read_text())
    assert tuned["training"]["fine_tuned_from"] and tuned["training"]["batch_size"] == 64


def test_an_analysis_without_a_classifier_is_refused(tiny_bundle, tmp_path, capsys):
    words = ["drafting", "--bundle", str(tiny_bundle), "--out", str(tmp_path / "out")]
    assert load("c2t_analysis").main(words) == 2
    assert "has no classifier; train one" in capsys.readouterr().err


def test_mistakes_are_one_line(capsys, tmp_path):
    assert load("trees").main(["width", "--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert load("profile_decode").main(["--bundle", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("no config.json there" in line for line in lines)


def test_profile(tiny_bundle, questions, capsys):
    words = ["--bundle", str(tiny_bundle), "--prompts", str(questions), "--tokens", "6", "--rows", "3"]
    assert load("profile_decode").main(words) == 0
    printed = capsys.readouterr().out
    assert "ms per step:" in printed and "tree policy" in printed and "aten::" in printed


@pytest.mark.parametrize("study", ["ablation", "branches", "noise", "code"])
def test_self_draft_studies(study, tiny_target_folder, tiny_llama, tmp_path, monkeypatch, capsys):
    module = load("self_draft")
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES * 2))
    config = NgramConfig([Source(str(tmp_path / "text.txt"))], processes=1, held_out=0.0)
    build_ngrams(config, tiny_llama[1], tmp_path / "ngrams")
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"Question {i}?"]} for i in range(4)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(module, "MT_BENCH", questions)
    monkeypatch.setattr(module, "CODE", {"one": str(questions)})
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(module, "SIZES", (2, 3))
    monkeypatch.setattr(module, "NOISE", (1, 2))
    places = ["--target", str(tiny_target_folder), "--ngrams", str(tmp_path / "ngrams"), "--dtype", "float32"]
    status = module.main([study, *places, "--limit", "4", "--out", str(tmp_path / "out")])
    if study == "noise" and status:
        assert "pip install sacrebleu rouge-score" in capsys.readouterr().err
        return
    found = json.loads((tmp_path / "out" / f"{study}.json").read_text())
    wanted = {"ablation": module.ABLATIONS, "branches": ["2x2", "2x3", "3x2", "3x3"], "noise": ["1", "2"]}
    wanted["code"] = ["one"]
    assert list(found) == list(wanted[study])
    if study == "ablation":
        assert all(row["accept_len"] >= 1 and set(row["categories"]) == {"a", "b"} for row in found.values())
    if study == "noise":
        assert all(0 <= score <= 1 for row in found.values() for score in row.values())
