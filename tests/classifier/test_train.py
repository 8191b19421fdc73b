"""The classifier finds the probabilities that synthetic labels were drawn with; files, splits, mistakes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from drafttrain.classifier.config import ClassifierConfig
from drafttrain.classifier.data import read_rows, split_by_tree, thin_negatives
from drafttrain.classifier.dump import SCHEMA
from drafttrain.classifier.metrics import quality, recall_curve
from drafttrain.classifier.model import Classifier
from drafttrain.classifier.train import predict, train_classifier
from drafttrain.run.cli import main
from drafttrain.utils.errors import UserError

TREES, NODES = 400, 200


def true_probability(p: np.ndarray, h: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Mostly the joint probability, less so under much entropy and further down."""
    return 1 / (1 + np.exp(-(6 * p - 0.5 * h - 0.2 * d - 2.5)))


@pytest.fixture(scope="module")
def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    n = TREES * NODES
    p, h, d = rng.random(n) ** 3, rng.random(n) * 6, rng.integers(1, 12, n)
    return {
        "tree": np.repeat(np.arange(TREES), NODES) * 3,
        "P": p,
        "H": h,
        "d": d,
        "p": p ** (1 / d),
        "rank": rng.integers(0, 10, n),
        "parent_rank": rng.integers(-1, 10, n),
        "accepted": rng.random(n) < true_probability(p, h, d),
    }


def write_dump(folder, columns, shards: int = 2):
    """Write what `write_trees` would have written of these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, rows in enumerate(np.array_split(np.arange(len(columns["tree"])), shards)):
        arrays = {f.name: pa.array(columns[f.name][rows]).cast(f.type, safe=False) for f in SCHEMA}
        pq.write_table(pa.table(arrays), folder / f"shard-{number:05d}.parquet")
        listed.append({"file": f"shard-{number:05d}.parquet", "rows": len(rows)})
    record = {"format_version": 1, "made_from": {"bundle": "x"}, "shards": listed}
    (folder / "trees.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def trees(columns, tmp_path_factory):
    return write_dump(tmp_path_factory.mktemp("trees"), columns)


@pytest.fixture(scope="module")
def trained(trees, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    return train_classifier(ClassifierConfig(negatives=2), trees, out), out


def test_thinned_negatives_do_not_move_the_probabilities(trained, columns):
    report, out = trained
    assert report["training"]["negatives_kept"] < 0.5
    row = report["rows"]["C2T"]["all"]
    assert row["ece"] < 0.02 and row["confidence"] == pytest.approx(row["accepted"], abs=0.01)
    model = Classifier.load(out)
    x = np.stack([columns[name] for name in ("P", "H", "d")], 1).astype(np.float32)
    expected = true_probability(columns["P"], columns["H"], columns["d"])
    assert np.abs(predict(model, x) - expected).mean() < 0.015
    found = model.predict(x[:6].reshape(2, 3, 3))
    np.testing.assert_allclose(found.flatten(), predict(model, x[:6]), rtol=1e-4)
    assert found.shape == (2, 3) and found.dtype == np.float32
    far = np.array([[1.0, 0.0, 1.0], [0.0, 7.0, 11.0]], np.float32) * 1e4
    assert np.isfinite(model.predict(far)).all()


def test_baselines_are_judged_alike(trained):
    report, _ = trained
    rows = report["rows"]
    assert set(rows) == {"C2T", "joint probability", "logistic regression", "gradient boosting"}
    for name in ("logistic regression", "gradient boosting"):  # the labels are logistic in the features
        assert rows[name]["all"]["ece"] < 0.02
        assert rows[name]["all"]["auroc"] == pytest.approx(rows["C2T"]["all"]["auroc"], abs=0.01)
    assert rows["joint probability"]["all"]["brier"] > rows["C2T"]["all"]["brier"]
    depths = [depth for depth in rows["C2T"] if depth != "all"]
    assert depths == [str(d) for d in range(1, 12)]
    assert sum(rows["C2T"][d]["tokens"] for d in depths) == rows["C2T"]["all"]["tokens"] == 20 * NODES
    better, worse = (report["curves"][name]["at"]["0.1"] for name in ("C2T", "joint probability"))
    assert better > worse


def test_what_is_written(trained, capsys):
    report, out = trained
    names = ["classifier.json", "classifier.safetensors", "classifier_report.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "classifier.safetensors").stat().st_size < 5000
    described = json.loads((out / "classifier.json").read_text())
    assert described["features"] == ["P", "H", "d"] and described["hidden"] == 48
    assert described["training"]["trees"] == {"bundle": "x"} and described["training"]["lr"] == 1e-3
    stored = json.loads((out / "classifier_report.json").read_text())
    assert [entry["epoch"] for entry in stored["history"]] == list(range(1, 11))
    assert stored["history"][-1]["loss"] < stored["history"][0]["loss"]
    assert stored["rows"] == report["rows"]


def test_features_sizes_and_fine_tuning(trees, trained, tmp_path, capsys):
    words = ["c2t", "--trees", str(trees), "--out", str(tmp_path / "a"), "--no-baselines"]
    assert main([*words, "--features", "d,H", "--hidden", "4", "--epochs", "2"]) == 0
    assert Classifier.load(tmp_path / "a").features == ("d", "H")
    table = capsys.readouterr().out
    assert "joint probability" in table and "gradient boosting" not in table

    words = ["c2t", "--trees", str(trees), "--out", str(tmp_path / "b"), "--no-baselines"]
    words += ["--share", "0.5", "--epochs", "1", "--negatives", "5"]
    assert main([*words, "--from", str(trained[1])]) == 0
    tuned, before = Classifier.load(tmp_path / "b"), Classifier.load(trained[1])
    assert torch.equal(tuned.mean, before.mean) and not torch.equal(tuned.outer.weight, before.outer.weight)
    torch.testing.assert_close(tuned.outer.weight, before.outer.weight, atol=0.02, rtol=0)
    report = json.loads((tmp_path / "b" / "classifier_report.json").read_text())
    assert report["training"]["lr"] == 1e-4 and report["training"]["validation_rows"] == 20 * NODES
    assert report["rows"]["C2T"]["all"]["ece"] < 0.02  # another share of negatives, the same probabilities
    assert main([*words, "--from", str(trained[1]), "--hidden", "3"]) == 2
    assert "--hidden: must be left out with --from, whose features and size stay" in capsys.readouterr().err


def test_trees_stay_together(trees):
    rows = read_rows(trees, ("P", "rank"))
    assert rows.x.shape == (TREES * NODES, 2) and rows.x.dtype == np.float32
    training, validation = split_by_tree(rows, seed=1)
    assert not set(training.tree) & set(validation.tree)
    assert len(training) + len(validation) == len(rows) and len(validation) == 20 * NODES
    some, held_out = split_by_tree(rows, seed=1, share=0.1)
    assert len(some) == 38 * NODES and set(some.tree) < set(training.tree)
    assert set(held_out.tree) == set(validation.tree)
    thin, kept = thin_negatives(training, 1.5, seed=0)
    positives = int(training.accepted.sum())
    assert thin.accepted.sum() == positives and len(thin) == positives + round(1.5 * positives)
    assert kept == pytest.approx(1.5 * positives / (~training.accepted).sum(), rel=1e-3)
    every, kept = thin_negatives(training, 1e9, seed=0)
    assert len(every) == len(training) and kept == 1


def test_metrics():
    c = np.array([0.9, 0.8, 0.3, 0.2, 0.1], np.float32)
    hit = np.array([True, False, True, False, False])
    assert quality(c, hit & ~hit, 0.25).recall is None  # there is nothing to recall
    found = quality(c, hit, 0.25)
    assert (found.recall, found.theta) == (1.0, 0.6) and found.auroc == pytest.approx(5 / 6)
    assert found.auprc == pytest.approx((1 + 2 / 3) / 2) and quality(c, ~hit | hit, 0.5).auprc is None
    curve = recall_curve(c, hit)
    assert np.interp([0.2, 0.4, 0.6, 1], curve["theta"], curve["recall"]) == pytest.approx(
        [0.5, 0.5, 1, 1], abs=0.05
    )


# mistakes


def change(columns, **values):
    return {**columns, **values}


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda c: change(c, H=np.where(c["tree"] == 0, np.nan, c["H"])), "200 rows hold NaN"),
        (
            lambda c: change(c, accepted=c["accepted"] & False),
            "got 0 accepted of 80000; train the drafter further",
        ),
        (
            lambda c: change(c, accepted=c["accepted"] | True),
            "got 80000 accepted of 80000; take more prompts",
        ),
        (lambda c: {name: values[:0] for name, values in c.items()}, "holds no nodes"),
        (lambda c: change(c, tree=c["tree"] * 0), "1 trees are too few"),
    ],
)
def test_useless_rows(broken, message, columns, tmp_path):
    folder = write_dump(tmp_path / "trees", broken(columns), shards=1)
    with pytest.raises(UserError, match=message) as error:
        train_classifier(ClassifierConfig(epochs=1), folder, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_damaged_dumps(columns, tmp_path):
    some = {name: values[: 20 * NODES] for name, values in columns.items()}
    folder = write_dump(tmp_path / "trees", some)
    shard = folder / "shard-00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="shard-00001.parquet: cannot be read .* run the same"):
        read_rows(folder, ("P",))
    shard.unlink()
    with pytest.raises(UserError, match="shard-00001.parquet: no such file"):
        read_rows(folder, ("P",))
    pq.write_table(pa.table({"P": [0.5], "tree": [1]}), shard)
    with pytest.raises(UserError, match="has no columns H, accepted, d"):
        read_rows(folder, ("P", "H"))
    pq.write_table(pq.read_table(folder / "shard-00000.parquet").slice(3), shard)
    with pytest.raises(UserError, match="1997 rows in place of 2000"):
        read_rows(folder, ("P",))
    (folder / "trees.json").write_text('{"format_version": 7}')
    with pytest.raises(UserError, match="no trees of format 1"):
        read_rows(folder, ("P",))
    with pytest.raises(UserError, match="no trees.json here"):
        read_rows(tmp_path, ("P",))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"features": ("P", "x")}, "features: must be some of P,H,d,p,rank, each once, got P,x"),
        ({"features": ("P", "P")}, "each once"),
        ({"features": ()}, "must be some of"),
        ({"hidden": 0}, "hidden: must be >= 1 and <= 16384, got 0"),
        ({"lr": 0.0}, "lr: must be > 0, got 0.0"),
        ({"share": 1.5}, "share: must be > 0 and <= 1, got 1.5"),
        ({"negatives": float("nan")}, "negatives: must be > 0 and < inf, got nan"),
    ],
)
def test_impossible_settings(settings, message, trees, tmp_path):
    with pytest.raises(UserError, match=message):
        train_classifier(ClassifierConfig(**settings), trees, tmp_path)


def test_other_classifiers_are_refused(trained, tmp_path):
    model = Classifier(("P", "H"), 3)
    with pytest.raises(UserError, match="classifier.json: no such file"):
        Classifier.load(tmp_path)
    model.save(tmp_path, {})
    assert Classifier.load(tmp_path).features == ("P", "H")
    described = json.loads((tmp_path / "classifier.json").read_text())
    for changes, message in (
        ({"format_version": 2}, "no classifier of format 1; train it again"),
        ({"features": ["P", "size"]}, "features: must be some of P,H,d,p,rank, each once, got P,size"),
        ({"hidden": 5}, r"classifier.safetensors: cannot be read \(.* \S*…\); train it again"),
        ({"features": None}, "cannot be read"),
    ):
        (tmp_path / "classifier.json").write_text(json.dumps({**described, **changes}))
        with pytest.raises(UserError, match=message) as error:
            Classifier.load(tmp_path)
        assert "\n" not in str(error.value)
    with torch.no_grad():
        model.outer.bias.fill_(torch.nan)
    model.save(tmp_path, {})
    with pytest.raises(UserError, match="not finite"):
        Classifier.load(tmp_path)
    (tmp_path / "classifier.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="classifier.safetensors: cannot be read"):
        Classifier.load(tmp_path)


def test_a_half_written_classifier_is_none(tmp_path, monkeypatch):
    """Weights of one classifier with the features of another would have the right shapes."""
    Classifier(("P", "H"), 3).save(tmp_path, {})
    monkeypatch.setattr("drafttrain.classifier.model.write_json", lambda path, value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Classifier(("P", "d"), 3).save(tmp_path, {})
    with pytest.raises(UserError, match="classifier.json: no such file"):
        Classifier.load(tmp_path)


def test_a_feature_that_never_varied_counts_for_nothing():
    """Trees of one layer have one depth; the classifier may grow deeper ones."""
    torch.manual_seed(0)
    classifier = Classifier(["P", "d"], 8)
    x = torch.stack([torch.rand(50), torch.ones(50)], 1)  # [N, 2]
    classifier.fit_scale(x, 0.3)
    deeper = torch.stack([x[:, 0], torch.full((50,), 7.0)], 1)
    assert torch.equal(classifier.logits(x), classifier.logits(deeper))
    loss = classifier.logits(x).square().sum()
    loss.backward()
    assert classifier.inner.weight.grad[:, 1].eq(0).all() and classifier.inner.weight.grad[:, 0].any()
    torch.testing.assert_close(
        torch.from_numpy(classifier.predict(deeper.numpy())), classifier.logits(x).sigmoid().detach()
    )


def test_fine_tuning_scales_a_feature_that_had_never_varied(columns, tmp_path):
    """Trees of one layer first, then deeper ones, whose depths are scaled like the other features."""
    flat = write_dump(tmp_path / "flat", change(columns, d=np.ones_like(columns["d"])))
    deep = write_dump(tmp_path / "deep", columns)
    train_classifier(ClassifierConfig(epochs=2, negatives=2), flat, tmp_path / "a", baselines=False)
    before = Classifier.load(tmp_path / "a")
    assert before.inner.weight[:, 2].eq(0).all() and before.std[2] == 1
    config = ClassifierConfig(epochs=2, negatives=2)
    train_classifier(config, flat, tmp_path / "same", tmp_path / "a", baselines=False)
    still = Classifier.load(tmp_path / "same")
    assert still.inner.weight[:, 2].eq(0).all() and torch.equal(still.mean, before.mean)

    train_classifier(config, deep, tmp_path / "b", tmp_path / "a", baselines=False)
    tuned = Classifier.load(tmp_path / "b")
    assert tuned.inner.weight[:, 2].ne(0).any()
    assert torch.equal(tuned.mean[:2], before.mean[:2]) and torch.equal(tuned.std[:2], before.std[:2])
    assert tuned.mean[2] == pytest.approx(columns["d"].mean(), abs=0.5)
    assert tuned.std[2] == pytest.approx(columns["d"].std(), abs=0.2)
    x = torch.from_numpy(np.stack([columns[name] for name in ("P", "H", "d")], 1).astype(np.float32))
    expected = before.logits(x)
    before.fit_unused_scale(x)
    assert torch.equal(before.logits(x), expected) and before.std[2] > 3
