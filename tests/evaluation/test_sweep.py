"""Fronts and ratios by hand; a sweep end to end, continued, with a classifier that it is given."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from drafttrain.bundle import load_bundle
from drafttrain.classifier.model import Classifier
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import read_prompts
from drafttrain.evaluation import sweep as module
from drafttrain.evaluation.diagnose import diagnose
from drafttrain.evaluation.sweep import Point, compare_families, pareto_front, sweep
from drafttrain.inference.decode import decode_all
from drafttrain.inference.stats import DecodeStats
from drafttrain.run.cli import main
from drafttrain.utils.errors import UserError


def point(tree: str, accept_len: float, verified: float) -> Point:
    return Point(tree, accept_len, verified, 0, 0, 0, 0.0, 0.0, 0.0)


def test_fronts():
    points = [
        point("a", 2.0, 10),
        point("a", 1.5, 4),
        point("a", 1.9, 12),
        point("a", 2.0, 9),
        point("a", 1.5, 5),
    ]
    assert [(p.accept_len, p.verify_per_step) for p in pareto_front(points)] == [(1.5, 4), (2.0, 9)]


def test_ratios_at_equal_accept_len():
    base = [point(f"eagle2:total={n}", 1 + n / 10, n) for n in (2, 6, 10)]  # accept_len 1.2 to 2.0
    half = [point("c2t:beta=0.1", 1.4, 2), point("c2t:beta=0.2", 2.4, 7)]  # half of it everywhere
    far = [point("joint", 3.0, 9)]
    [found] = compare_families([*base, *half, *far], "eagle2")
    assert (found.family, found.low, found.high) == ("c2t", 1.4, 2.0)
    assert found.mean == pytest.approx(0.5)
    assert list(found.at) == pytest.approx([1.55, 1.7, 1.85]) and list(found.at.values()) == pytest.approx(
        [0.5] * 3
    )
    assert compare_families(half, "eagle2") == []


def counted_point(tree: str, by_prompt: list[list[int]]) -> Point:
    """Return a point of such counts of its prompts."""
    emitted, steps, verified = (sum(column) for column in zip(*by_prompt))
    made = point(tree, emitted / steps, verified / steps)
    return replace(made, by_prompt=by_prompt)


def test_intervals_resample_prompts_and_make_new_fronts():
    """Against one resample after another, on points of the drawn prompts."""
    rng = np.random.default_rng(3)
    settings = {"c2t": (1, 3, 5, 9), "eagle2": (2, 4, 8, 12)}
    points = []
    for family, sizes in settings.items():
        for size in sizes:
            steps = rng.integers(5, 9, 6)
            emitted = steps + rng.binomial(steps * 2, size / 14)
            counts = np.stack([emitted, steps, steps * size], 1)  # [6, 3]
            points.append(counted_point(f"{family}:n={size}", counts.tolist()))
    [found] = compare_families(points, "eagle2")
    means = []
    for row in np.random.default_rng(0).integers(6, size=(module.RESAMPLES, 6)):
        drawn = [counted_point(p.tree, [p.by_prompt[i] for i in row]) for p in points]
        own, base = (pareto_front([p for p in drawn if p.family == family]) for family in ("c2t", "eagle2"))
        low = max(own[0].accept_len, base[0].accept_len)
        high = min(own[-1].accept_len, base[-1].accept_len)
        if low <= high:
            grid = np.linspace(low, high, module.GRID)
            verified = (
                np.interp(grid, [p.accept_len for p in front], [p.verify_per_step for p in front])
                for front in (own, base)
            )
            means.append(np.divide(*verified).mean())
    assert len(means) > 900 and found.interval == pytest.approx(np.quantile(means, [0.025, 0.975]).tolist())
    assert found.interval[0] < found.mean < found.interval[1]

    alone = [replace(p, by_prompt=p.by_prompt[:1]) for p in points]
    older = [replace(p, by_prompt=[]) for p in points]
    assert all(compare_families(made, "eagle2")[0].interval is None for made in (alone, older))
    apart = [counted_point("a:n=1", [[4, 4, 4]] * 2), counted_point("b:n=1", [[4, 4, 8]] * 2)]
    assert compare_families(apart, "b")[0].interval == [0.5, 0.5]
    silent = [counted_point("a:n=1", [[4, 4, 0], [4, 4, 4]]), counted_point("b:n=1", [[4, 4, 8]] * 2)]
    assert np.isnan(module.resampled_means(silent, "a", "b")).mean() == pytest.approx(0.25, abs=0.05)
    assert module.interval_of(np.full(3, np.nan)) is None


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    model = Classifier(hidden=4)
    with torch.no_grad():
        model.outer.bias.fill_(1.0)
    model.save(tmp_path / "classifier", {})
    return tmp_path / "classifier"


CPU = {"dtype": "float32", "device": "cpu"}


def test_end_to_end(tiny_bundle, questions, classifier, tmp_path, monkeypatch, capsys):
    trees = ["eagle2:top_k=3,max_depth=2,total=4", "c2t:beta=0.3,top_k=2,max_depth=2", "dymax:threshold=0.01"]
    prompts = PromptSet("prompts", str(questions), 2)
    options = {"max_new_tokens": 8, "dtype": "float32", "device": "cpu", "classifier": classifier}
    points, comparisons = sweep(tiny_bundle, prompts, trees[:2], tmp_path / "out", **options)

    loaded = load_bundle(tiny_bundle, dtype="float32", device="cpu", classifier=classifier)
    for found, tree in zip(points, trees):
        stats, by_prompt = DecodeStats(), []
        for prompt in read_prompts(questions, 2):
            ids = prompt.token_ids(loaded.target.tokenizer)
            own = decode_all(loaded.target, loaded.proposer(tree), [ids], 8)[1]
            by_prompt.append([own.new_tokens - 1, own.steps, own.verify_tokens])
            stats += own
        assert (found.tree, found.accept_len) == (tree, stats.accept_len)
        assert found.by_prompt == by_prompt
        assert found.verify_per_step == stats.verify_tokens / stats.steps > 0

    decoded = []
    real = module.decode
    monkeypatch.setattr(module, "decode", lambda *args, **rest: decoded.append(1) or real(*args, **rest))
    again, _ = sweep(tiny_bundle, prompts, trees, tmp_path / "out", **options)
    assert again[:2] == points and len(decoded) == 1  # the new policy alone
    written = [json.loads(line) for line in (tmp_path / "out" / "points.jsonl").read_text().splitlines()]
    assert [row["tree"] for row in written] == trees
    printed = capsys.readouterr().out
    assert "dymax:threshold=0.01" in printed and "eagle2" in printed
    retrained = shutil.copytree(load_bundle(tiny_bundle, **CPU).target.name, tmp_path / "target")
    options |= {"target": str(retrained)}
    weights = load_file(retrained / "model.safetensors")
    other = {name: 1.01 * weight for name, weight in weights.items()}
    save_file(other, retrained / "model.safetensors", {"format": "pt"})
    sweep(tiny_bundle, prompts, trees[:1], tmp_path / "out", **options)
    assert len(decoded) > 1  # the counts of another target are not taken
    sweep(tiny_bundle, prompts, trees[:1], tmp_path / "out", "eagel2", **options)
    assert "no tree of eagel2 among them" in capsys.readouterr().out


def test_a_small_lm_in_one_file(tiny_llama, write_gguf, questions, tmp_path):
    path = str(write_gguf(tmp_path / "small.gguf", *tiny_llama))
    options = {"max_new_tokens": 8, "dtype": "float32", "device": "cpu", "target": path}
    points, _ = sweep(
        path, PromptSet("prompts", str(questions), 2), ["chain:length=3"], tmp_path / "out", **options
    )
    assert points[0].accept_len > 1
    rest = {"max_new_tokens": 8, "dtype": "float32", "target": path}
    found = diagnose(path, str(questions), limit=2, **rest, console=Console(quiet=True))
    assert found.accept_len > 1


def test_several_prompts_at_a_time(tiny_bundle, questions, tmp_path, monkeypatch):
    trees = ["chain:length=2", "eagle2:top_k=3,max_depth=2,total=4"]
    prompts = PromptSet("prompts", str(questions), 3)
    options = {"max_new_tokens": 8, "dtype": "float32", "device": "cpu"}
    single, _ = sweep(tiny_bundle, prompts, trees, tmp_path / "single", **options)
    batched, _ = sweep(tiny_bundle, prompts, trees, tmp_path / "batched", rows=2, **options)
    assert all(point.tokens_per_second > 0 for point in single)
    assert batched == [replace(point, tokens_per_second=0.0) for point in single]  # not timed

    decoded = []
    real = module.decode
    monkeypatch.setattr(module, "decode", lambda *args, **rest: decoded.append(1) or real(*args, **rest))
    assert sweep(tiny_bundle, prompts, trees, tmp_path / "batched", rows=2, **options)[0] == batched
    assert not decoded
    fewer = PromptSet("prompts", str(questions), 2)
    again, _ = sweep(tiny_bundle, fewer, trees[:1], tmp_path / "batched", rows=2, **options)
    assert decoded and again[0].steps < batched[0].steps
    with pytest.raises(UserError, match="--rows: must be >= 1, got 0"):
        sweep(tiny_bundle, prompts, trees, tmp_path / "none", rows=0, **options)


@pytest.mark.parametrize(
    "damage", ["a list", "no stats", "a key less", "another type", "half", "a row", "no prompts", "edited"]
)
def test_a_file_that_holds_no_counts_is_measured_again(damage, tiny_bundle, questions, tmp_path):
    prompts = PromptSet("prompts", str(questions), 1)
    options = {"max_new_tokens": 2, "dtype": "float32", "device": "cpu", "rows": 2}
    first, _ = sweep(tiny_bundle, prompts, ["chain:length=1"], tmp_path, **options)
    [path] = (tmp_path / "measurements").iterdir()
    kept = json.loads(path.read_text())
    if damage == "no stats":
        del kept["stats"]
    elif damage == "a key less":
        del kept["stats"]["steps"]
    elif damage == "another type":
        kept["stats"]["steps"] = "many"
    elif damage == "a row":
        kept["stats"] = [1, 2]
    elif damage == "no prompts":
        del kept["by_prompt"]
    elif damage == "edited":
        kept["by_prompt"][0][0] += 1
    path.write_text("[1]" if damage == "a list" else json.dumps(kept)[: 20 if damage == "half" else None])
    again, _ = sweep(tiny_bundle, prompts, ["chain:length=1"], tmp_path, **options)
    assert again == first and json.loads(path.read_text())["stats"]["steps"] == first[0].steps


def chat_file(path, *chats: list[str]) -> str:
    path.write_text("".join(json.dumps({"id": str(i), "turns": chat}) + "\n" for i, chat in enumerate(chats)))
    return str(path)


def test_turns_at_several_prompts_at_a_time(tiny_bundle, tmp_path, monkeypatch):
    """Chats of one and of two turns; every turn that ends advances the progress."""
    file = chat_file(tmp_path / "chats.jsonl", ["The fox", "And then?"], ["A dog"], ["The sun", "Why?"])
    options = {"max_new_tokens": 5, "dtype": "float32", "device": "cpu"}
    prompts, trees = PromptSet("chats", file, turns=2), ["chain:length=2"]
    single, _ = sweep(tiny_bundle, prompts, trees, tmp_path / "single", **options)
    advanced = []

    @contextmanager
    def counted(title, total, unit):
        advanced.append((title, total))
        yield lambda: advanced.append(1)

    monkeypatch.setattr(module, "counted", counted)
    batched, _ = sweep(tiny_bundle, prompts, trees, tmp_path / "batched", rows=2, **options)
    assert batched == [replace(point, tokens_per_second=0.0) for point in single]
    assert advanced == [("chain:length=2 (1 of 1)", 5), 1, 1, 1, 1, 1]

    single_turns = PromptSet("chats", chat_file(tmp_path / "short.jsonl", ["A"], ["B"]), turns=3)
    sweep(tiny_bundle, single_turns, trees, tmp_path / "short", rows=2, **options)
    assert advanced[6:] == [("chain:length=2 (1 of 1)", 2), 1, 1]


def test_a_later_turn_that_cannot_fit_fails_before_anything_is_decoded(tiny_bundle, tmp_path, monkeypatch):
    file = chat_file(tmp_path / "chats.jsonl", ["A dog"], ["The fox", "over the lazy dog " * 2000])
    decoded = []
    monkeypatch.setattr(module, "decode", lambda *args, **rest: decoded.append(1) or iter(()))
    options = {"max_new_tokens": 5, "dtype": "float32", "device": "cpu", "rows": 2}
    with pytest.raises(UserError, match="chats: prompt 1: .* must fit into the .* positions of"):
        sweep(tiny_bundle, PromptSet("chats", file, turns=2), ["chain:length=2"], tmp_path / "out", **options)
    assert not decoded


def test_out_is_a_folder(tiny_bundle, questions, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out: must be a folder, got .*file, which is a file"):
        sweep(tiny_bundle, PromptSet("one", str(questions)), ["chain:length=2"], tmp_path / "file")


def test_the_command_draws_the_points(tiny_bundle, questions, tmp_path):
    words = ["--task", str(questions), "--limit", "1", "--out", str(tmp_path), "--max-new-tokens", "4"]
    words += ["--dtype", "float32", "--trees", "chain:length=1", "chain:length=2"]
    assert main(["benchmark", "--table", "sweep", "--method", str(tiny_bundle), *words]) == 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_classifier(tiny_bundle, questions, tmp_path, capsys):
    words = ["--task", str(questions), "--out", str(tmp_path / "out"), "--trees", "chain:length=1", "c2t"]
    assert main(["benchmark", "--table", "sweep", "--method", str(tiny_bundle), *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after the lines of loading
    assert error.startswith("drafttrain: ") and error.endswith("train one with drafttrain c2t")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="classifier.json: no such file"):
        sweep(tiny_bundle, PromptSet("x", str(questions)), ["c2t"], tmp_path, classifier=tmp_path)
