"""`drafttrain pipeline --simulate` on tiny targets: a table, its file, and mistakes in one line."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import drafttrain
from drafttrain.kernels.build import variant
from drafttrain.pipeline import outlook
from drafttrain.pipeline.config import SimulateConfig
from drafttrain.pipeline.outlook import Row, as_table
from drafttrain.run.cli import main
from drafttrain.run.recipe import load_settings
from drafttrain.run.simulate import read_costs
from drafttrain.target_lm.loading import load_target
from drafttrain.utils.errors import UserError

RECIPE = "recipes/tiny/pipeline/simulate.yaml"
NO_TIMES = ["--target_ms", "null", "--draft_ms", "null"]


@pytest.fixture
def words(tiny_target_folder, tiny_bundle, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "prompt": "Why is the sky blue?"}) + "\n")
    place = {"--target": tiny_target_folder, "--drafter": tiny_bundle, "--prompts": prompts}
    pairs = {**place, "--out": tmp_path / "out", "--dtype": "float32"}
    return [RECIPE, *(str(word) for pair in pairs.items() for word in pair)]


@pytest.mark.parametrize("more", [[], NO_TIMES])
def test_a_table_by_stages(words, more, tmp_path, capsys):
    assert main(["pipeline", "--simulate", *words, *more]) == 0
    out = capsys.readouterr().out
    assert "| 1 |" in out and "| 3 |" in out
    found = json.loads((tmp_path / "out" / "simulation.json").read_text())
    one, three = found["rows"]
    assert one["hit_rate"] == 0 and one["timesteps_per_token"] == 1
    assert three["timesteps_per_token"] == pytest.approx(3 - 2 * three["hit_rate"], abs=0.4)
    if not more:  # 400 ms for any number of tokens, 2 links, 11 tokens
        assert one["pp"] == pytest.approx(0.4) and three["pp"] == pytest.approx(0.4, rel=1e-2)
        assert three["pipedec"] < three["pp"] + 0.01


def test_costs_of_a_target_of_few_positions(words, tiny_target_folder, tmp_path):
    """They are measured in the context that is left, here of 172 tokens."""
    folder = shutil.copytree(tiny_target_folder, tmp_path / "target")
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 300}
    (folder / "config.json").write_text(json.dumps(settings))
    own = ["--target", str(folder), "--drafter", str(folder), "--stages", "[2]", "--children", "2"]
    assert main(["pipeline", "--simulate", *words, *own, "--target_ms", "null"]) == 0


@pytest.mark.parametrize(("dtype", "stock"), [("float32", 4), ("bfloat16", 2)])
def test_states_are_sent_as_they_are_computed(words, tmp_path, monkeypatch, dtype, stock):
    """On described machines they have 16 bits."""
    made, sizes, asked = outlook.cut, [], ["--dtype", dtype, "--stages", "[2]"]

    def cut(whole, stages, link):
        sizes.append(link.bytes)
        return made(whole, stages, link)

    monkeypatch.setattr(outlook, "cut", cut)
    for more in ([], ["--target_ms", "null"]):
        assert main(["pipeline", "--simulate", *words, *asked, *more]) == 0
    hidden = json.loads((Path(words[2]) / "config.json").read_text())["hidden_size"]
    sizes = sizes[::4]  # the same for every mode
    assert sizes == [2 * hidden, (stock if variant() is None else 4) * hidden]
    target = load_target(words[2], dtype=dtype, device="cpu")
    assert outlook.sent_bytes(target) == stock * hidden
    target.pack()
    assert outlook.sent_bytes(target) == sizes[1]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--stages", "[]"], "stages: must have at least one number, got []"),
        (["--stages", "[2, 0]"], "stages: must be >= 1 and <= 1000, got [2, 0]"),
        (["--target_ms", "[[1, 2, 3]]"], "target_ms: must be pairs of a size and its milliseconds, got [[1"),
        (["--target_ms", "[[4, 2], [1, 3]]"], "target_ms: must have ascending whole sizes from 1 on, got [4"),
        (
            ["--target_ms", "[[1, 2], [.inf, 3]]"],
            "target_ms: must have ascending whole sizes from 1 on, got [1",
        ),
        (
            ["--target_ms", "[[1, 2], [1.5, 3]]"],
            "target_ms: must have ascending whole sizes from 1 on, got [1",
        ),
        (["--draft_ms", "[[1, 2], [4, 1]]"], "draft_ms: must have positive, finite milliseconds that do not"),
        (["--draft_ms", "[[1, .nan]]"], "draft_ms: must have positive, finite milliseconds that do not fall"),
        (["--link.gbit", "0"], "link.gbit: must be > 0, got 0"),
        (["--link.gbit", ".inf"], "link.gbit: must be > 0 and < inf, got inf"),
        (["--concurrency", "0"], "concurrency: must be >= 1, got 0"),
        (["--children", "100000"], "children: must be <= "),
        (["--max_new_tokens", "9999"], "prompt and new tokens must fit into the 512 positions"),
        (["--out", "README.md"], "out: must be a folder, got README.md, which is a file or in one"),
        (
            ["--costs", "a.json"],
            "target_ms: must be null beside costs, got times; add --target_ms null --draft",
        ),
        (
            [*NO_TIMES, "--costs", "a.json"],
            "costs: must be a file of drafttrain pipeline --calibrate, got a.js",
        ),
        (
            [*NO_TIMES, "--costs", "README.md"],
            "got README.md, which is missing or no JSON; name its costs.json",
        ),
    ],
)
def test_wrong_settings_are_one_line(words, more, problem, capsys):
    assert main(["pipeline", "--simulate", *words, *more]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("drafttrain")]
    assert len(lines) == 1 and problem in lines[0]


def test_a_recipe_of_ranks_is_named(words, capsys):
    assert main(["pipeline", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{RECIPE}: must be a recipe of ranks, got one of a simulation (--simulate); name another" in line


def test_a_recipe_of_both_kinds_is_asked_for_what_is_wrong_in_it(words, tmp_path, capsys):
    keys = dict(zip(words[1::2], words[2::2]))
    lines = [f"{name}: {keys[f'--{name}']}" for name in ("target", "drafter", "prompts", "out")]
    (tmp_path / "both.yaml").write_text("\n".join(lines))
    for more, problem in ((["--width", "0"], "width: must be >= 1, got 0"), (["--bogus", "1"], "bogus")):
        for option in ([], ["--simulate"]):
            assert main(["pipeline", *option, str(tmp_path / "both.yaml"), *more]) == 2
            assert problem in capsys.readouterr().err


def test_steps_are_shown_by_the_command_alone(words, capsys):
    assert main(["pipeline", "--simulate", *words]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("drafttrain: ")]
    steps = "texts are decoded", "1 of 2: 1 stages", "2 of 2: 3 stages"
    assert said == [f"drafttrain: {step}" for step in steps]
    drafttrain.simulate(replace(load_settings(SimulateConfig, words[0], words[1:]), out=None))
    assert "drafttrain: " not in capsys.readouterr().err


def test_a_measured_target_has_no_more_stages_than_blocks(words, tmp_path, capsys):
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    costs = [*NO_TIMES, "--costs", str(tmp_path / "costs.json"), "--stages", "[2, 9]"]
    assert main(["pipeline", "--simulate", *words, *costs]) == 2
    assert "stages: must be <= 4, the target's blocks, beside costs, got 9" in capsys.readouterr().err


COSTS = {
    "sizes": [1, 2],
    "groups": [[0.1, 0.1]],
    "alone": [[0.1, 0.1]],
    **dict.fromkeys(("judging", "draft", "draft_alone"), [0.1, 0.1]),
    "hop": [0.0, 0.0],
    **dict.fromkeys(("broadcast", "sync"), 0.0),
    "beside": True,
}


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        (5, "costs: must be a file of drafttrain pipeline --calibrate, got "),
        ({**COSTS, "blocks": 5}, "costs: must have "),
        ({**COSTS, "blocks": ["all"]}, "costs: must have "),
        ({**COSTS, "sizes": ["a", "b"]}, "costs: must have "),
        ({**COSTS, "sizes": [2, 1]}, "costs: must have "),
        (COSTS | {"sizes": [], "groups": [[]], "alone": [[]], "judging": [], "draft": []}, "costs: must "),
    ],
)
def test_a_file_of_other_things_holds_no_costs(costs, problem, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    assert read_costs(str(tmp_path / "costs.json"), 2).groups == COSTS["groups"]
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    with pytest.raises(UserError, match=problem):
        read_costs(str(tmp_path / "costs.json"), 2)


def test_from_how_many_stages_on_a_tree_in_flight_wins():
    def said(*wins: tuple[int, bool]) -> str:
        rows = [Row(stages, 9.0, 3.0, 2.0 if won else 4.0, 1.0, 0.5, 1.0, (1, 2)) for stages, won in wins]
        ours, single = as_table(rows).splitlines()[-2:]
        assert single == "PipeDec does not beat one process with drafts"
        return ours

    assert said((7, True), (2, False), (4, True)).endswith("the best static tree from 4 stages on")
    assert said((2, True), (4, False), (7, True)).endswith("from 7 stages on")
    assert said((2, True), (4, False)) == said((2, False)) == "PipeDec does not beat the best static tree"


def test_prompts_at_a_time_fill_the_stages(words, tmp_path):
    """Three times the same prompt: with as many stages `pp` takes a third, and one in turn no less."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"{i}", "prompt": "Why?"}) + "\n" for i in range(3)))
    rows = []
    for at_once in ("1", "3"):
        more = ["--stages", "[3]", "--concurrency", at_once, "--link", "{gbit: 1000, ms: 0}"]
        more += ["--limit", "null"]
        assert main(["pipeline", "--simulate", *words, *more]) == 0
        rows += json.loads((tmp_path / "out" / "simulation.json").read_text())["rows"]
    one, three = rows
    assert three["pp"] == pytest.approx(one["pp"] / 3, rel=0.1) and three["stpp"] < one["stpp"]
    assert three["pipedec"] == pytest.approx(one["pipedec"]) and three["single"] == one["single"]


def test_a_program_gets_the_rows_of_the_command(words, tmp_path, capsys):
    assert main(["pipeline", "--simulate", *words]) == 0
    found = json.loads((tmp_path / "out" / "simulation.json").read_text())
    settings = replace(load_settings(SimulateConfig, words[0], words[1:]), out=None)
    rows = drafttrain.simulate(settings)
    assert json.loads(json.dumps([asdict(row) for row in rows])) == found["rows"]
    assert as_table(rows) in capsys.readouterr().out
    with pytest.raises(UserError, match=r"stages: must have at least one number, got \[\]"):
        drafttrain.simulate(replace(settings, stages=[]))
    assert main(["pipeline", "--simulate", *words, "--out", "null"]) == 2
    assert "out: must be set, got null; name a folder" in capsys.readouterr().err
