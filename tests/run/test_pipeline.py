"""`drafttrain pipeline` starts its ranks, writes what they decode, and reports mistakes in one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.pipeline.config import PipelineConfig, balanced
from drafttrain.run.cli import main
from drafttrain.run.recipe import load_settings
from drafttrain.run.simulate import read_costs
from drafttrain.utils.errors import UserError
from tests.run.ranks import recipe_words, started_ranks


@pytest.fixture
def words(tiny_target_folder, tmp_path):
    return recipe_words(tiny_target_folder, tmp_path, ["Why is the sky blue?", "Count to ten."])


MEASURED = ["--stages.blocks", "measured"]


@pytest.mark.parametrize(
    ("mode", "at_once", "stages"),
    [
        ("pipedec", 1, []),
        ("stpp", 2, MEASURED),
        ("pipedec", 1, [*MEASURED, "--drafter_rank", "alone", "--stages.groups", "[2, 1]"]),
        ("pp", 1, [*MEASURED, "--dtype", "bfloat16", "--drafter_rank", "alone"]),
    ],
)
def test_it_decodes_what_the_whole_target_decodes(
    words, tiny_bundle, tiny_target, tmp_path, mode, at_once, stages, capfd
):
    more = ["--drafter", str(tiny_bundle), "--mode", mode, "--stages.ranks", "3"]
    more += ["--concurrency", str(at_once), "--link", "{gbit: 10, ms: 0.5}", *stages]
    if stages:  # forked: the command's own ranks take seconds to begin
        world_size = load_settings(PipelineConfig, words[0], [*words[1:], *more]).world_size
        with started_ranks([[*words, *more]] * world_size, tmp_path) as ranks:
            assert [rank.wait(120) for rank in ranks] == [0] * world_size
        shown = (tmp_path / "0.out").read_text()
    else:
        assert main(["pipeline", *words, *more]) == 0
        shown = capfd.readouterr().out
    assert f"mode {mode}, prompts 2" in shown and f", out {tmp_path / 'out'}\n" in shown
    assert ("hit rate" in shown) == (mode != "pp")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    config = load_settings(PipelineConfig, words[0], words[1:])
    ids = [prompt.token_ids(tiny_target.tokenizer) for prompt in read_prompts(config.prompts)]
    plain, _ = decode_all(tiny_target, NoProposer(), ids, config.max_new_tokens)
    if "bfloat16" not in stages:
        assert [row["token_ids"] for row in rows] == plain
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["hit_rate"] is None) == (mode == "pp") and summary["late"] is None
    assert len(summary["blocks"]) == 3 and sum(summary["blocks"]) == 4 and min(summary["blocks"]) >= 1
    assert (
        summary["tokens"] == sum(len(row["token_ids"]) for row in rows) > 0
        and summary["machine"]["threads"] == 1
    )


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--mode", "pipedec"], "drafter: must be set for mode pipedec, got null"),
        (["--width", "0"], "width: must be >= 1, got 0"),
        (["--stages.ranks", "0"], "stages.ranks: must be >= 1, got 0"),
        (["--stages.ranks", "1000"], "stages.ranks: must be <= 4, the target's blocks, got 1000"),
        (
            ["--stages.blocks", "[1, 2, 1]"],
            "stages.blocks: must have 2 numbers, as stages.ranks, got [1, 2, 1]",
        ),
        (["--stages.blocks", "[0, 4]"], "stages.blocks: must be >= 1, got [0, 4]"),
        (["--stages.blocks", "equal"], "stages.blocks: must be a list or one of measured or null, got equal"),
        (
            ["--stages.blocks", "measured", "--pace.stage_ms", "4"],
            "stages.blocks: must not be measured where times are declared, got pace.stage_ms",
        ),
        (["--stages.groups", "[3]"], "stages.groups: must add up to stages.ranks (2), got [3]"),
        (["--pace.stage_ms", "-1"], "pace.stage_ms: must be >= 0, got -1"),
        (["--pace.curve", "[[1, 4], [8, 2]]"], "pace.curve: must have positive, finite milliseconds that do"),
        (["--pace.curve", "[[0, 4]]"], "pace.curve: must have ascending whole sizes from 1 on, got [0"),
        (
            ["--pace.curve", "[[1, 4]]", "--pace.stage_ms", "4"],
            "pace.curve: must not be given beside pace.stage_ms, got [[1.0, 4.0]]; remove one",
        ),
        (["--children", "0"], "children: must be >= 1, got 0"),
        (["--concurrency", "0"], "concurrency: must be >= 1, got 0"),
        (["--pace.draft_ms", ".nan"], "pace.draft_ms: must be >= 0 and < inf, got nan"),
        (["--link", "{gbit: 0}"], "link.gbit: must be > 0, got 0"),
        (["--drafter_rank", "alone"], "drafter_rank: must be beside without a drafter, got alone"),
        (["--tree", "timed"], "tree: must need no calibration, classifier or draws, got timed; take chain"),
        (
            ["--tree", "bogus"],
            "tree: must be one of chain, static, paths, vct, eagle1, cape, eagle2, pct, joint",
        ),
        (
            ["--tree", "pct:threshold=none"],
            "tree: must have a threshold if it is pct, got pct:threshold=none; write",
        ),
        (["--mode", "stpp", "--drafter", "x", "--tree", "static:foo=1"], "foo"),
        (["--sampling.top_p", "0"], "sampling.top_p: must be > 0 and <= 1, got 0"),
        (["--prompts", "nope.jsonl"], "prompts: must be a file or a folder, got nope.jsonl, which does"),
    ],
)
def test_wrong_settings_are_one_line(words, more, problem, capsys):
    assert main(["pipeline", *words, *more]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and problem in lines[0]


def test_costs_are_measured_and_simulated(words, tiny_bundle, tmp_path, capfd):
    more = ["--drafter", str(tiny_bundle), "--mode", "pipedec", "--pace.stage_ms", "4", "--limit", "1"]
    assert main(["pipeline", *words, *more, "--calibrate"]) == 0
    path = tmp_path / "out" / "costs.json"
    assert f"{path}" in capfd.readouterr().out
    costs = read_costs(str(path))
    for group in (*costs.groups, *costs.alone, costs.judging):
        assert len(group) == len(costs.sizes) and all(0.004 <= seconds < 1 for seconds in group)
    assert 0 < costs.hop[0] < 1 and 0 < costs.broadcast < 1 and 0 < costs.sync < 1 and costs.beside
    assert costs.waiting < costs.sync  # less the work that trees, caches and the head are
    measured = costs.machines("pp")
    falling = replace(costs, hop=[3.0, 1.0, *range(5, 5 + len(costs.sizes) - 2)])  # by noise
    assert falling.machines("pp", 2).sending(0, 1) == falling.machines("pp", 2).sending(0, 2) == 2.0
    rows = {name: sorted(getattr(costs, name)) for name in ("judging", "draft", "draft_alone", "hop")}
    groups = {name: [sorted(one) for one in getattr(costs, name)] for name in ("groups", "alone")}
    costs = replace(costs, **rows, **groups)
    flight = costs.machines("pipedec")
    assert flight.sync == costs.waiting > 0
    assert [group(1) for group in flight.alone] == [group[0] for group in costs.alone]
    assert flight.draft_alone(1) == costs.draft_alone[0]
    for mode, part in (("pp", costs.alone[-1]), ("stpp", costs.judging)):
        assert costs.machines(mode).stages[-1](1) == part[0]
    assert replace(costs, waiting=0.0).end == costs.sync  # a file of an earlier version
    assert costs.machines("pp").broadcast == costs.token > 0
    assert replace(costs, token=0.0).machines("pp").broadcast == costs.broadcast
    assert costs.machines("stpp").broadcast == costs.round > 0  # messages are part of it
    assert costs.machines("stpp").sending(0, 1) == costs.machines("pp").sending(0, 1) == 0
    assert replace(costs, round=0.0).machines("stpp").broadcast == costs.broadcast
    busy = {mode: costs.machines(mode, 2) for mode in ("pp", "stpp")}  # with several requests all ranks work
    assert [group(1) for group in busy["pp"].stages] == [group[0] for group in costs.groups]
    assert busy["stpp"].stages[-1](32) >= busy["pp"].stages[-1](32) and busy["pp"].draft(1) == costs.draft[0]
    assert busy["pp"].broadcast == costs.broadcast and busy["pp"].sending(0, 1) == costs.hop[0]

    simulated = ["recipes/tiny/pipeline/simulate.yaml", *words[1:-2], "--out", str(tmp_path / "simulated")]
    simulated += ["--drafter", str(tiny_bundle), "--dtype", "float32", "--costs", str(path)]
    declared = ["--target_ms", "null", "--draft_ms", "null"]
    assert main(["pipeline", "--simulate", *simulated, *declared]) == 0
    found = json.loads((tmp_path / "simulated" / "simulation.json").read_text())
    assert found["rows"][0]["pp"] == pytest.approx(sum(group(1) for group in measured.stages) + costs.token)
    assert main(["pipeline", "--simulate", *simulated, *declared, "--concurrency", "2"]) == 0
    assert main(["pipeline", "--simulate", *simulated]) == 2
    assert "target_ms: must be null beside costs" in capfd.readouterr().err
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"blocks": [3, 2]}))
    assert main(["pipeline", "--simulate", *simulated, *declared]) == 2
    assert f"costs: must be of a target with 4 blocks, got {path} of one with 5" in capfd.readouterr().err
    n = len(costs.sizes)
    parts = {"draft": [0.0] * n, "judging": [float("inf")], "hop": None, "sizes": 3, "groups": 1.0}
    parts |= {"waiting": float("nan"), "sync": -1.0, "round": float("inf"), "broadcast": [1.0]}
    for name, broken in parts.items():
        kept = {key: value for key, value in values.items() if key != name}
        path.write_text(json.dumps(kept if broken is None else kept | {name: broken}))
        assert main(["pipeline", "--simulate", *simulated, *declared]) == 2
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("drafttrain")]
        assert len(lines) == 1 and "costs: must" in lines[0]


def test_a_dry_run_shows_what_each_rank_would_hold(words, tiny_bundle, tiny_target, tmp_path, capsys):
    more = [
        "--drafter",
        str(tiny_bundle),
        "--stages.ranks",
        "3",
        "--drafter_rank",
        "alone",
        "--mode",
        "pipedec",
    ]
    assert main(["pipeline", *words, *more, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:6]]
    assert [row[1] for row in rows] == ["none", "0 to 1", "2 to 2", "3 to 3"]
    whole = sum(weight.numel() * 4 for weight in {*tiny_target.model.parameters()})
    tied = tiny_target.model.config.tie_word_embeddings
    again = tied * tiny_target.vocab_size * tiny_target.hidden_size * 4  # on the first and on the last
    assert sum(float(row[2]) for row in rows) == pytest.approx((whole + again) / 1e6, abs=0.2)
    assert float(rows[0][4]) > 0 and not any(float(row[4]) for row in rows[1:])
    assert "3.00 at 1.0" in lines[-1] and not (tmp_path / "out").exists()
    assert main(["pipeline", *words, *more, *MEASURED, "--mode", "pp", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "pipedec" not in shown and "measured at the start; these are balanced by weights" in shown


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--calibrate", "--dry-run"], "--calibrate: must not be given beside --dry-run"),
        (["--calibrate"], "drafter: must be set for --calibrate, got null"),
        (["--prompts", "null"], "prompts: must be set, got null"),
        (["--out", "null"], "out: must be set, got null"),
        (["--out", "README.md"], "out: must be a folder, got README.md, which is a file or in one"),
        (["--out", "README.md/x"], "out: must be a folder, got README.md/x, which is a file or in one"),
        (["--simulate"], "smollm2-2.yaml: must be a recipe of a simulation (--simulate), got one of ranks"),
        (["--dry-run", "--stages.blocks", "[1, 2]"], "stages.blocks: must add up to the 4 blocks of"),
        (["--dry-run", "--stages.ranks", "9"], "stages.ranks: must be <= 4, the target's blocks, got 9"),
    ],
)
def test_what_does_not_go_together_is_one_line(words, more, problem, capsys):
    assert main(["pipeline", *words, *more]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and problem in lines[0]


def test_blocks_are_balanced():
    assert balanced(30, 2, 8.0) == [19, 11] and balanced(4, 1, 3.0) == [4]
    for n, ranks, head in ((30, 14, 8.0), (80, 14, 1.0), (5, 5, 9.0), (4, 3, 0.0)):
        blocks = balanced(n, ranks, head)
        assert sum(blocks) == n and min(blocks) >= 1 and len(blocks) == ranks
        assert max(blocks[:-1]) - min(blocks[:-1]) <= 1
    with pytest.raises(UserError, match="stages.ranks: must be <= 4, the target's blocks, got 5"):
        balanced(4, 5, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        "config of the target",
        "weights of the target",
        "config of the drafter",
        "weights of the drafter",
        "prompts and stop tokens",
    ],
)
def test_ranks_with_other_files_end(words, tiny_target_folder, tiny_bundle, tmp_path, other):
    """Folders of the same name on two hosts, of which one has another version of the model."""
    from safetensors.torch import load_file, save_file

    for host in "ab":
        shutil.copytree(tiny_target_folder, tmp_path / host / "target")
        shutil.copytree(tiny_bundle, tmp_path / host / "drafter")
        (tmp_path / host / "drafter/classifier.safetensors").write_text(host)  # not compared
    what, _, where = other.partition(" of the ")
    if what == "weights":
        weights = load_file(tmp_path / f"b/{where}/model.safetensors")
        largest = max(weights, key=lambda name: weights[name].numel())  # of which some bytes are compared
        weights[largest] += 1
        save_file(weights, tmp_path / f"b/{where}/model.safetensors", {"format": "pt"})
    elif what == "config":
        stored = json.loads((tmp_path / f"b/{where}/config.json").read_text())
        stored["_name_or_path"] = "another"
        (tmp_path / f"b/{where}/config.json").write_text(json.dumps(stored))
    else:
        (tmp_path / "b/target/generation_config.json").write_text('{"eos_token_id": [0, 7, 11]}')
    words = [os.path.abspath(words[0]), "--target", "./target", *words[3:], "--probe", "false"]
    words += ["--drafter", "./drafter", "--mode", "stpp"] if where == "drafter" else []
    with started_ranks([words] * 2, tmp_path, [tmp_path / "a", tmp_path / "b"]) as ranks:
        assert [rank.wait(60) for rank in ranks] == [2, 2]
    for rank in range(2):
        [line] = (tmp_path / f"{rank}.err").read_text().splitlines()
        assert f"{other}: must be the same at all ranks, got others at rank 1 than at rank 0; start" in line


def test_an_unreachable_host_is_one_line(words):
    """Without torch's warnings and C++ frames, which are dozens of lines."""
    port = "29511"  # nobody listens there, as there is no such host
    place = {"MASTER_ADDR": "nosuch.invalid", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # of a name server that does not answer
    command = [sys.executable, "-m", "drafttrain.run.cli", "pipeline", *words, "--timeout_s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | place, timeout=300)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout
    assert line.startswith("drafttrain: rank 1: lost a connection while it waited to join the others at ")
    assert f" at nosuch.invalid:{port} (timed out); see what the other ranks say" in line


def test_a_port_of_another_program_is_one_line(words):
    """Which takes the connection and never answers: torch's store would wait for it for ever."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "1"}
        command = [sys.executable, "-m", "drafttrain.run.cli", "pipeline", *words, "--timeout_s", "1"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place, timeout=300)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout
    assert f" at 127.0.0.1:{port} (it does not answer as rank 0; another program may have the port: " in line


def test_ranks_with_other_recipes_end_before_they_load(words, tiny_target_folder, tmp_path):
    """Here there are no weights, which loading would report."""
    target = shutil.copytree(tiny_target_folder, tmp_path / "target")
    for weights in target.glob("*.safetensors*"):
        weights.unlink()
    words += ["--target", str(target), "--timeout_s", "240"]  # for starts that take long
    with started_ranks([[*words, "--width", str(4 + rank)] for rank in range(2)], tmp_path) as ranks:
        assert [rank.wait(300) for rank in ranks] == [2, 2]
    for rank in range(2):
        [line] = (tmp_path / f"{rank}.err").read_text().splitlines()
        assert line == (
            "drafttrain: recipe and versions: must be the same at all ranks, got others at rank 1 than "
            "at rank 0; start all ranks with the same recipe, files and versions"
        )
