"""The studies of PipeDec on tiny models."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafttrain.data.prompts import Prompt
from drafttrain.drafters.auto import load_drafter
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.member import Task
from drafttrain.pipeline.outlook import known_texts
from drafttrain.pipeline.part import load_part
from drafttrain.pipeline.replay import replay, replay_policy
from drafttrain.report.pictures import sheet
from drafttrain.run.pipeline import LOST
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from studies import goals
from studies.figures import pipedec, pipedec_counts, pipedec_ranks
from studies.goals import Run
from studies.pipedec import (
    algorithm1,
    counts,
    fault,
    hits,
    memory,
    mismatches,
    modes,
    pacing,
    pictures,
    tasks,
    top_k,
    tuning,
    upkeep,
)
from studies.pipedec.ratios import ratio
from studies.pipedec.timestep import spent
from studies.seed.pairs import Pair, load_pair


def test_hits_grow_with_width_and_fall_with_stages(tiny_target, tiny_bundle):
    drafter = load_drafter(tiny_bundle, tiny_target)
    pair = Pair("B", tiny_target, drafter)
    texts = known_texts(tiny_target, drafter.config.tapped_blocks, [[5, 6, 7], [8]], 16, SamplingParams())
    narrow, wide, deep = (
        hits.count(pair, texts, *shape) for shape in ((2, 1, 1), (2, 64, 128), (6, 64, 128))
    )
    tokens = sum(len(text.answer) - 1 for text in texts)
    assert narrow["tokens"] == wide["tokens"] == deep["tokens"] == tokens
    assert narrow["hit_rate"] <= wide["hit_rate"] and narrow["static_share"] <= wide["static_share"]
    for row, groups in ((narrow, 2), (wide, 2), (deep, 6)):
        assert 1 <= row["timesteps_per_token"] <= groups and row["nodes_per_timestep"] > 0
    best = hits.count(pair, texts, 6, 64, 128, best_first=True)
    assert best["hit_rate"] >= deep["hit_rate"] and best["best_first"]


def test_trees_of_paced_ranks_are_those_of_least_time(tiny_target, tiny_bundle):
    """A timestep of trees in flight takes a stage's time; a static tree its drafts and all stages in turn."""
    drafter, stages = load_drafter(tiny_bundle, tiny_target), 5
    prompts, taps = [[5, 6, 7], [8]], drafter.config.tapped_blocks
    texts = known_texts(tiny_target, taps, prompts, 16, SamplingParams())
    found = pacing.choose(drafter, texts, stages, 60, 15, (1, 3))
    own = [(text.prompt, text.answer, text.tapped) for text in texts]
    tokens, expected = sum(len(text.answer) - 1 for text in texts), {}
    for shape in [*((*shape, 1) for shape in pacing.SHAPES), (4, 4, 3), (8, 8, 3)]:  # 32 nodes at most
        steps = sum(len(replay(drafter, *text, stages, *shape).steps) for text in own)
        expected[pacing.NAME.format(*shape)] = 60 * steps / tokens
    for tree in pacing.TREES:
        rounds = [one for text in own for one in replay_policy(drafter, *text, parse_policy(tree))]
        expected[tree] = sum(15 * len(one.drafted) + 60 * stages for one in rounds) / tokens
    assert found["ms"] == pytest.approx(expected)
    assert found["ms"][found["tree"]] == min(found["ms"][tree] for tree in pacing.TREES)
    assert found["ms"][pacing.NAME.format(*(found[key] for key in ("width", "children", "layers")))] == min(
        ms for name, ms in found["ms"].items() if name.startswith("width")
    )


def test_best_first_trees_of_paced_ranks(tiny_target, tiny_bundle):
    drafter = load_drafter(tiny_bundle, tiny_target)
    texts = known_texts(tiny_target, drafter.config.tapped_blocks, [[5, 6, 7]], 12, SamplingParams())
    found = pacing.choose(drafter, texts, 3, 60, 15, best_first=True)
    [text] = texts
    for shape in pacing.BEST_FIRST:
        trace = replay(drafter, text.prompt, text.answer, text.tapped, 3, *shape, best_first=True)
        ms = 60 * len(trace.steps) / (len(text.answer) - 1)
        assert found["ms"][pacing.NAME.format(*shape)] == pytest.approx(ms)
    assert found["best_first"] and (found["width"], found["children"], found["layers"]) in pacing.BEST_FIRST
    keys = pipedec_ranks.paced_keys({"3": found}, 3)
    assert keys["best_first"] == "true" and keys["layers"] == found["layers"]


def test_ratios_are_means_over_tasks_of_medians_over_repeats(capsys):
    rates = {"pp": (10, 10, 40), "stpp": (20, 5, 10), "pipedec": (30, 30, 40)}
    rows = [
        {
            "prompt": f"{'ab'[i > 1]}/{i}",
            "repeat": repeat,
            "mode": mode,
            "tokens": [1] * 121,
            "seconds": 121 / rate[i] * (1, 1, 9)[repeat],
            "decoding": 120 / rate[i],
        }
        for mode, rate in rates.items()
        for i in range(3)
        for repeat in range(3)
    ]
    assert modes.per_token(rows, "pp") == pytest.approx({("a", "0"): 0.1, ("a", "1"): 0.1, ("b", "2"): 0.025})
    assert modes.per_token(rows, "pp", "decoding") == pytest.approx(modes.per_token(rows, "pp"))
    modes.show(rows, modes.MODES, 0.25)
    out = capsys.readouterr().out
    static = (0.2 / 0.25 + 0.025 / 0.1) / 2
    assert (
        f"stpp: {static:.3f} (" in out and "pipedec: 2.000 (2.000 to 2.000) times" in out and "25.00%" in out
    )
    assert "the same" in out
    rows[0]["tokens"] = [2] * 121
    modes.show(rows, modes.MODES, 0.0)
    assert "different" in capsys.readouterr().out


def test_an_interval_covers_prompts_of_each_task():
    base = {("a", str(i)): 2.0 + i for i in range(8)} | {("b", "0"): 3.0}
    found = ratio(base, dict.fromkeys(base, 1.0))
    assert found["tasks"] == {"a": 5.5, "b": 3.0} and found["value"] == 4.25
    assert (2 + 3) / 2 <= found["interval"][0] < 4.25 < found["interval"][1] <= (9 + 3) / 2
    assert ratio(base, base) == {"value": 1.0, "interval": [1.0, 1.0], "tasks": {"a": 1.0, "b": 1.0}}


@pytest.fixture
def pair(tiny_target, tiny_bundle):
    return Pair("B", tiny_target, load_drafter(tiny_bundle, tiny_target))


@pytest.fixture
def some_tasks():
    rows = {"a": ["Why is the sky blue?", "Count to ten."], "b": ["What is new?"]}
    return {task: [Prompt(str(i), [text]) for i, text in enumerate(texts)] for task, texts in rows.items()}


def test_prompts_written_are_those_read(some_tasks, tiny_target, tmp_path):
    tasks.write_prompts(some_tasks, tmp_path / "prompts.jsonl")
    found = tasks.read_written(tmp_path / "prompts.jsonl", tiny_target.tokenizer)
    assert found == {
        (task, one.id): one.token_ids(tiny_target.tokenizer)
        for task, own in some_tasks.items()
        for one in own
    }
    assert tasks.sizes(some_tasks) == {"a": 2, "b": 1}
    everything = tasks.read_tasks({"wmt14": str(tmp_path / "prompts.jsonl")}, 3)
    assert tasks.sizes(everything) == {**dict.fromkeys(tasks.FILES, 3), "wmt14": 3}
    assert "wmt14" not in tasks.read_tasks({})


def test_counted_trees_give_figures_and_are_not_grown_twice(
    tiny_target_folder, some_tasks, tmp_path, monkeypatch
):
    monkeypatch.setattr(pipedec_counts, "SEEDS", range(2))
    monkeypatch.setattr(tasks, "TUNING", tmp_path / "prompts.jsonl")
    tasks.write_prompts(some_tasks, tmp_path / "prompts.jsonl")
    pair = load_pair("A", str(tiny_target_folder), str(tiny_target_folder), "float32")  # always right
    monkeypatch.setattr(pipedec_counts, "ROUNDS", 1)
    pipedec_counts.measure_curves(pair, tmp_path)
    [*_, link] = pipedec_counts.machines_here(14, pair.target, tmp_path).links
    assert link.bytes == 4 * pair.target.hidden_size  # it is in fp32

    def measured():
        greedy = pipedec_counts.simulated(pair, some_tasks, tmp_path, 12)
        greedy |= pipedec_counts.hits(pair, some_tasks, tmp_path, 12)
        greedy |= pipedec_counts.best_first(pair, some_tasks, tmp_path, 12)
        return greedy | pipedec_counts.slowdown(pair, some_tasks, tmp_path / "sampled", tmp_path, 12)

    (tmp_path / "sampled").mkdir()

    found = measured()
    assert set(found) == {
        *pipedec_counts.SIMULATED_FIGURES,
        *pipedec_counts.HIT_FIGURES,
        pipedec_counts.BEST_FIRST_FIGURE,
        "sampling_slowdown",
    }
    for name, row in found.items():
        assert row["value"] > 0, name
    assert found["sim14_vs_pp"]["with_costs_of_this_machine"]["pp"] > 0
    assert all(row["pp"] > 0 for row in found["deep_hits"]["by_stages"].values())
    assert found[pipedec_counts.BEST_FIRST_FIGURE]["over_layers"]["value"] >= 1  # it is always right
    shape = ("flight", None, 14, pipedec_counts.WIDTH, pipedec_counts.CHILDREN)
    rows = [
        counts.Counted(**json.loads(line)) for line in (tmp_path / "counts.jsonl").read_text().splitlines()
    ]
    [own] = [one for one in rows if one.shape == shape and (one.task, one.prompt) == ("b", "0")]
    text = counts.texts(pair, some_tasks, 12, counts.GREEDY, tmp_path / "greedy.json")["b", "0"]
    trace = replay(pair.drafter, text.prompt, text.answer, text.tapped, 14, *shape[3:])
    assert [(s.tokens, s.hits) for s in own.trace().steps] == [(s.tokens, s.hits) for s in trace.steps]
    assert own.hits == trace.hits and own.tokens == len(text.answer) - 1
    hits = sum(one.hits for one in rows if one.shape == shape)
    looked_for = sum(one.tokens for one in rows if one.shape == shape)  # the first, and not the last
    assert counts.hit_rate(rows, shape) == pytest.approx(hits / looked_for)
    [own] = [one for one in rows if one.shape == ("best_first", *shape[1:]) and one.task == "b"]
    trace = replay(pair.drafter, text.prompt, text.answer, text.tapped, 14, *shape[3:], best_first=True)
    assert own.trace() == trace and own.follows and own.looked_for == own.tokens
    chain = ("static", None, 4, 1, pipedec_counts.CHILDREN)
    assert counts.hit_rate(rows, chain) == 1.0  # what follows the deepest layer was not looked for
    assert all(one.hits < one.tokens for one in rows if one.shape == chain)
    tuned = [json.loads(line) for line in (tmp_path / "tuning/counts.jsonl").read_text().splitlines()]
    assert {(one["groups"], one["width"]) for one in tuned} == {(d, k) for k, d in counts.EAGLE_SHAPES}
    assert sum(one.kind == "eagle2" for one in rows) == 3  # the one that was chosen, against all texts
    monkeypatch.setattr(counts, "_grow", None)  # everything is there
    assert measured() == found
    with pytest.raises(UserError, match="greedy.json: must be of this target and these settings, got others"):
        counts.texts(pair, some_tasks, 13, counts.GREEDY, tmp_path / "greedy.json")


def test_texts_are_of_the_prompts_and_the_drafter_that_are_asked_for(pair, some_tasks, tmp_path):
    path, whole = tmp_path / "greedy.json", [(name, one) for name, own in some_tasks.items() for one in own]
    few = {"a": some_tasks["a"][1:]}
    first = counts.texts(pair, few, 6, counts.GREEDY, path)
    found = counts.texts(pair, some_tasks, 6, counts.GREEDY, path)  # the others are decoded as well
    assert list(found) == [(name, one.id) for name, one in whole]
    assert found["a", "1"].answer == first["a", "1"].answer
    for (name, prompt), text in found.items():
        [ids] = [p.token_ids(pair.target.tokenizer) for p in some_tasks[name] if p.id == prompt]
        [alone] = known_texts(pair.target, [], [ids], 6, SamplingParams())
        assert (text.prompt, text.answer) == (ids, alone.answer)
    again = counts.texts(pair, few, 6, counts.GREEDY, path)
    assert list(again) == list(first) and len(json.loads(path.read_text())["answers"]) == 3
    other = {"b": [Prompt("0", ["Another question"])]}
    with pytest.raises(UserError, match="must be of this drafter and these prompts, got others"):
        counts.texts(pair, other, 6, counts.GREEDY, path)
    pair.source = "another drafter"
    with pytest.raises(UserError, match="must be of this drafter and these prompts, got others"):
        counts.texts(pair, few, 6, counts.GREEDY, path)


def test_static_trees_fit_what_accelerators_take_at_once():
    nodes = [1 + width * depth for _, _, depth, width, _ in counts.statics(pipedec_counts.CHILDREN)]
    assert max(*nodes, 1 + counts.EAGLE_NODES) <= pipedec_counts.WIDTH


def test_pictures_show_what_was_counted(tiny_target_folder, some_tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "WIDTHS", (1, 3))
    monkeypatch.setattr(pictures, "ALL_CHILDREN", (1, 2))
    monkeypatch.setattr(tasks, "read_tasks", lambda more, limit: some_tasks)
    pair = load_pair("A", str(tiny_target_folder), str(tiny_target_folder), "float32")  # always right
    args = Namespace(limit=None, new_tokens=10, wmt14=None, out=tmp_path)
    rows, seeds = pictures.grow(pair, args, range(1)), range(1)
    drawn = dict(pictures.timelines(rows, pair.target.hidden_size))
    charts = pictures.charts(rows, pair.target.hidden_size, seeds)
    drawn |= {name: str(sheet(panels, [])) for name, panels in charts.items()}
    assert list(drawn) == [f"figure{n}" for n in (1, 2, 4, 5, 6, 7, 8)]
    found = pictures.numbers(charts["figure4"])
    assert [x for x, _ in found["hit rate"]["2 children"]] == [1.0, 3.0]
    assert pictures.numbers(charts["figure5"])["latency by stages"].keys() >= {"pp, 7 stages"}
    for name, picture in drawn.items():
        assert ElementTree.fromstring(picture).tag.endswith("svg"), name
    small = pictures.of(rows, ("flight", None, *pictures.SMALL))[0]
    course = "".join("h" if hit else "m" if token else "." for _, _, token, hit in small.rounds[:20])
    assert course.startswith("..h") and course in drawn["figure2"]
    static = counts.best_static(rows, counts.statics(pictures.CHILDREN), pictures.accelerators(14, 64))
    [chart] = pictures.figure_8(rows, static, pictures.accelerators(14, 64))
    in_turn, trees, flight = (series.ys for series in chart.series)
    assert in_turn[2] > 2.5 * in_turn[0] and len(set(flight)) == 1  # three prompts, and no more
    assert in_turn[2] == pytest.approx(in_turn[7]) and trees[0] > in_turn[0]
    asked = [(one.task, one.prompt) for one in pictures.in_turn(pictures.of(rows, static), 2)]
    assert asked == [("a", "0"), ("b", "0")]


def test_all_modes_write_the_targets_texts(pair, tiny_target_folder, some_tasks):
    prompts = [one.token_ids(pair.target.tokenizer) for one in some_tasks["a"]]
    rows = mismatches.compare_both(pair, str(tiny_target_folder), prompts, 8)
    assert [row["differ"] for row in rows] == [0] * (6 * 2 * 6) and {row["texts"] for row in rows} == {2}
    assert sum(row["follows"] for row in rows) == 2 * 2 * 6
    assert sum(row["best_first"] for row in rows) == 6 * 2 * 2


def test_a_small_lm_that_is_the_target_has_all_its_tokens(tiny_target_folder):
    found = top_k.compare(str(tiny_target_folder), str(tiny_target_folder), "float32", 400)
    assert found["long"]["positions"] == 400 and found["short"]["positions"] == 25 * 80
    assert all(set(row["accuracy"].values()) == {1.0} for row in found.values())


def test_the_targets_own_answers_are_looked_up_in_a_small_lm(
    tiny_target_folder, tmp_path, monkeypatch, capsys
):
    read = top_k.read_tasks
    monkeypatch.setattr(top_k, "read_tasks", lambda more, limit: {"gsm8k": read(more, 2)["gsm8k"]})
    monkeypatch.setattr(top_k, "ANSWER", 8)
    models = "--target", str(tiny_target_folder), "--drafter", str(tiny_target_folder), "--dtype", "float32"
    words = [*models, "--texts", "answers", "code", "--new-tokens", "400", "--out", str(tmp_path)]
    assert top_k.main(words) == 0
    own, code = (json.loads((tmp_path / f"top_k_{text}.json").read_text()) for text in ("answers", "code"))
    assert own["answers"]["positions"] == 16 and code["long"]["positions"] == 400
    assert set(own["answers"]["accuracy"].values()) == set(code["long"]["accuracy"].values()) == {1.0}
    assert "answers, answers (16 positions): 1.0000 of 1, " in capsys.readouterr().out


def test_shares_count_the_first_k():
    wanted, drafted = torch.tensor([[1], [2]]), torch.arange(16).expand(2, 16)
    assert top_k.shares(wanted, drafted)["accuracy"] == {1: 0.0, 2: 0.5, 4: 1.0, 8: 1.0, 16: 1.0}


def test_upkeep_is_measured_on_a_full_tree(pair, tiny_target_folder, monkeypatch):
    monkeypatch.setattr(upkeep, "LAYERS", 5)
    monkeypatch.setattr(upkeep, "WIDTH", 3)
    stage, tree = upkeep.grown(pair, load_part(str(tiny_target_folder), range(2), torch.float))
    assert tree.depth == 5 and stage.tree.width == tree.tree.width == 1 + 5 * 3
    found = upkeep.upkeep(pair, str(tiny_target_folder), 1)
    assert set(found) == {"stage", "drafter", "growing"}
    assert all(0 < seconds < 1 for seconds in found.values())


def test_what_is_simulated_keeps_the_trees_that_were_measured(tmp_path, monkeypatch):
    def stop(*words):
        raise UserError("stop")

    run, best = Run("pipedec"), dict.fromkeys(modes.MODES, {"cut": [2, 2], "tree": "chain:length=2"})
    monkeypatch.setattr(goals, "RAW", tmp_path)
    monkeypatch.setattr(run, "check_quiet", lambda: None)
    monkeypatch.setattr(pipedec_ranks, "load_pair", stop)
    best["pipedec"] |= {"width": 2, "children": 2}
    (run.folder(pipedec_ranks.REAL) / tuning.RAW).write_text(json.dumps({"best": best}))
    trees = run.folder(pipedec_ranks.PACED_RAW.format("trees")) / pipedec_ranks.PACED_TREES
    shape = {"width": 2, "children": 2, "layers": 1, "best_first": False, "tree": "chain:length=2"}
    trees.write_text(json.dumps(dict.fromkeys(map(str, pipedec_ranks.SIMULATED), shape)))
    with pytest.raises(UserError, match="stop"):
        pipedec_ranks.sim_error(run)
    assert trees.exists()


@pytest.fixture
def recipe(tiny_target_folder, tiny_bundle, some_tasks, tmp_path):
    """The tiny recipe with its places, as arguments of a study."""
    tasks.write_prompts(some_tasks, tmp_path / "prompts.jsonl")
    places = {"target": tiny_target_folder, "drafter": tiny_bundle, "prompts": tmp_path / "prompts.jsonl"}
    pairs = [f"{key}={value}" for key, value in {**places, "out": tmp_path, "limit": "null"}.items()]
    return [
        "--recipe",
        "recipes/tiny/pipeline/smollm2-2.yaml",
        *(w for pair in pairs for w in ("--set", pair)),
    ]


def test_modes_are_measured_in_turn_and_gone_on_with(recipe, tmp_path, monkeypatch, capsys):
    def rows(*words):
        words = [*recipe, *map(str, words), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["modes", *words])  # with which the ranks are started
        assert modes.main(words) == 0
        return json.loads((tmp_path / "modes.json").read_text())["rows"]

    first = rows("--repeats", 1, "--cut", "pp=1,3")
    turns = [modes.MODES[(turn + number) % 3] for number in range(3) for turn in range(3)]
    assert [row["mode"] for row in first] == turns and modes.same_texts(first)
    assert all(0 < row["decoding"] < row["seconds"] for row in first)
    more = rows("--repeats", 2, "--resume", "--limit", 2, "--cut", "pp=1,3")
    assert more[:9] == first and modes.same_texts(more)
    assert [row["mode"] for row in more[9:]] == ["stpp", "pipedec", "pp", "pipedec", "pp", "stpp"]
    assert [row["repeat"] for row in more[9:]] == [1] * 6
    capsys.readouterr()
    for other in (["--cut", "pp=2,2"], ["--cut", "pp=1,3", "--set", "layers=2"], ["--mode", "stpp"]):
        words = [*recipe, "--out", str(tmp_path), "--resume", *other]
        monkeypatch.setattr(sys, "argv", ["modes", *words])
        assert modes.main(words) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "must be of these settings, modes and cuts, got others; leave out --resume" in line


def test_memory_of_a_rank_is_about_its_share(recipe):
    done = subprocess.run(
        [sys.executable, "-m", "studies.pipedec.memory", *recipe],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    row = json.loads(done.stdout.strip().splitlines()[-1])
    assert row["share"] > 0 and row["bytes"] > 0


def test_pages_of_weights_are_known_by_the_file_that_a_link_leads_to(tmp_path):
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux")
    blob, link = tmp_path / "a blob", tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1 << 18)}, blob)
    link.symlink_to(blob)
    before = memory.resident({str(link.resolve())})[1]
    with safe_open(link, framework="pt") as file:
        weights = file.get_tensor("x")
    assert weights.sum() == 1 << 18  # which reads all pages
    assert memory.resident({str(link.resolve())})[1] - before >= 4 << 18
    assert memory.resident({str(link)})[1] == 0 == before


def test_a_cut_has_a_mode_and_numbers():
    assert modes.cuts(["pp=19,11", "stpp=1,2,3"]) == {"pp": [19, 11], "stpp": [1, 2, 3]}
    for wrong in ("19,11", "pp=", "xx=1,2", "pp=1,-2"):
        with pytest.raises(UserError, match="--cut: must be like pp=19,11"):
            modes.cuts([wrong])


def test_a_static_tree_has_as_many_nodes_as_the_tree_in_flight():
    """Trees at the end of a text are smaller, so that a width of nodes / layers is too little."""
    flight, tried = ("flight", None, 2, 4, 3), []
    rows = [counts.Counted("task", "a", *flight, 8, 8, [[[1], [5, 5], 1, 1]] * 8, True)]

    def grown(shape, most=99):
        tried.append(width := shape[3])
        sizes = [[[1], 1 + 2 * min(width, most)], [[1], 1 + min(width, most)]]
        return [counts.Counted("task", "a", *shape, 8, 8, sizes, judged=8)]

    assert counts.nodes_each(rows, flight) == 10
    shape = counts.equal_nodes(list(rows), flight, 3, grown)
    assert shape == ("static", None, 2, 7, 3) and tried == [5, 7]
    tried.clear()
    assert counts.equal_nodes(list(rows), flight, 3, lambda shape: grown(shape, 5))[3] == tried[-1] == 7


@pytest.mark.parametrize(
    ("statuses", "lines", "ok"), [([LOST] * 2, 2, True), ([2, LOST], 2, False), ([LOST] * 2, 1, False)]
)
def test_lost_ranks_end_in_a_line_each(statuses, lines, ok, monkeypatch, tmp_path):
    said = ["drafttrain: rank 1 is lost"] * lines
    row = {"rank": 1, "how": "killed", "seconds": 3.0, "statuses": statuses, "said": said}
    monkeypatch.setattr(fault, "lose", lambda *given: row)
    monkeypatch.setattr(Run, "folder", lambda run, name: tmp_path)
    figure = pipedec.lost_ranks(Run("pipedec"))["fault_s"]
    assert (figure["ok"], figure["value"]) == (ok, 3.0)


@pytest.mark.parametrize("study", [hits, modes, tuning, memory, top_k, pictures, algorithm1])
def test_studies_explain_themselves(study, capsys):
    with pytest.raises(SystemExit) as end:
        study.main(["--help"])
    assert end.value.code == 0 and f"python -m {study.__name__}" in capsys.readouterr().out


def test_algorithm_1_is_attention_over_both_caches():
    generator = torch.Generator().manual_seed(0)
    heads, dim, n = 3, 4, 5
    past = tuple(torch.randn(heads, n, dim, generator=generator) for _ in range(2))
    weights = [torch.randn(heads * dim, heads * dim, generator=generator) for _ in range(4)]
    cache, shown = algorithm1.TwoLevelCache(past), []
    for added in (1, 3, 2):  # layers of a tree
        h = torch.randn(added, heads * dim, generator=generator)
        before = sum(len(one) for one in shown)
        mask = torch.rand(added, before + added, generator=generator) < 0.4
        mask[:, before:] = ~torch.eye(added, dtype=torch.bool)
        found = algorithm1.dynamic_tree_attention(h, cache, weights, mask)
        shown.append(h)
        q, k, v = (
            (x @ w).view(-1, heads, dim).transpose(0, 1)
            for x, w in zip((h, torch.cat(shown), torch.cat(shown)), weights)
        )
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        allowed = torch.cat([torch.ones(added, n, dtype=torch.bool), ~mask], 1)
        expected = algorithm1.one_cache_attention(q, k, v, allowed).transpose(0, 1).reshape(added, -1)
        torch.testing.assert_close(found, expected @ weights[3])
    assert cache.predict[0].shape == (heads, 6, dim) and cache.past is past


def test_a_timestep_is_made_of_its_tasks_and_the_time_between_them():
    log = [
        Task("C", "pre", 1, 0, 0.0, 1.0),
        Task("own", "grow", 1, 1, 1.0, 2.0),
        Task("C", "dec", 0, 1, 2.5, 3.0),
        Task("C", "dec", 1, 1, 3.0, 5.0),
        Task("V", "finish", 1, 1, 6.0, 6.0),
        Task("C", "sync", 0, 1, 6.0, 7.0),
        Task("send", 1, 2, 1, 7.0, 7.5),
        Task("V", "finish", 1, 2, 9.0, 9.0),
    ]
    assert spent(log) == [
        ("timestep", 3.0),
        ("grow", 1.0),
        ("draft", 0.5),
        ("dec", 2.0),
        ("cut the tree", 1.0),
        ("send", 0.5),
        ("grow to draft", 0.5),
        ("draft to dec", 0.0),
        ("dec to end", 1.0),
        ("end to cut the tree", 0.0),
        ("cut the tree to send", 0.0),
        ("send to end", 1.5),
    ]
