"""Figures of topic `baselines`: what our side counts, how it is compared. A script plays vLLM."""

import importlib
import json
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.target_lm.loading import load_target
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError
from studies import ROOT
from studies.goals import Run

# Plays vLLM: emits what a file has, and reports that of two drafts the first was accepted.
PLAYER = """#!{python}
import json, sys
job, answers = json.load(sys.stdin), json.load(open({answers!r}))
assert all(drafter["method"] for drafter in job["drafters"])
json.dump({{d["name"]: answers[d["name"]] for d in job["drafters"]}}, open(sys.argv[2], "w"))
"""


@pytest.fixture
def module(monkeypatch, questions):
    module = importlib.import_module("studies.figures.vllm")
    monkeypatch.setattr(module, "MT_BENCH", str(questions))
    monkeypatch.setattr(module, "NEW_TOKENS", 8)
    return module


@pytest.fixture(scope="module")
def target(tiny_target_folder):
    return load_target(str(tiny_target_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def bundles(target, tmp_path_factory) -> dict[str, Path]:
    """A small LM that is the target itself with some noise, so that part of its drafts is accepted, and
    untrained MEDUSA and EAGLE drafters."""
    place = tmp_path_factory.mktemp("bundles")
    found = {}
    for kind, settings in {
        "causal_lm": {"model": target.name},
        "eagle": {"train_head": False},
        "medusa": {"heads": 2},
        "vdm": {},
    }.items():
        vocabulary = torch.arange(target.vocab_size if kind == "causal_lm" else 300)
        drafter = new_drafter(target, DrafterConfig(kind=kind, **settings), vocabulary)
        if kind == "causal_lm":
            with torch.no_grad():
                drafter.lm.lm_head.weight += 0.05 * torch.randn_like(drafter.lm.lm_head.weight)
        found[kind] = place / kind
        drafter.save_pretrained(found[kind])
    return found


PROMPTS = [[5, 301, 44], [7, 480, 12, 99, 3], [250], [1, 2, 3, 4]]


def test_counts_are_those_of_single_steps(module, target, bundles):
    """Against a chain of drafts worked out again at each step, whose end reaches beyond the output's."""
    found = module.decode_here(target, bundles["causal_lm"], PROMPTS, 3, 20)
    outputs = decode_all(target, NoProposer(), PROMPTS, 24)[0]
    stop, drafts, accepted = target.eos_token_ids, 0, [0, 0, 0]
    drafter, policy = load_drafter(bundles["causal_lm"], target), ChainPolicy(3)
    for prompt, output, ours in zip(PROMPTS, outputs, found["outputs"]):
        assert ours == module.until_stop(output, stop, 20)
        length = 1
        while length < len(ours):
            text = torch.tensor([[*prompt, *output[: length - 1]]])
            state = drafter.new_state(1, 64)
            drafter.update(state, text, torch.zeros(1, text.shape[1], 0), torch.tensor([text.shape[1]]))
            chain = policy.grow(drafter, state, torch.tensor([output[length - 1]])).tokens[0, 1:].tolist()
            right = [a == b for a, b in zip(chain, output[length:])] + [False]
            count = right.index(False)
            drafts += 1
            accepted = [total + (i < count) for i, total in enumerate(accepted)]
            length += count + 1
    assert (found["drafts"], found["accepted"]) == (drafts, accepted)
    assert 0 < accepted[2] < accepted[0] < drafts


def test_outputs_end_at_the_first_stop_token(module):
    assert module.until_stop([4, 2, 7, 2], {2}, 10) == [4, 2]
    assert module.until_stop([4, 3, 7], {2}, 2) == [4, 3]


def test_compared(module, target):
    [output], _ = decode_all(target, NoProposer(), PROMPTS[:1], 6)
    other = [*output[:3], (output[3] + 1) % 500, *output[4:]]
    here = {"outputs": [output, output], "drafts": 10, "accepted": [5, 2]}
    there = {"outputs": [output, other], "drafts": 20, "accepted": [10, 5]}
    found = module.compare(target, [PROMPTS[0]] * 2, here, there)
    assert (found["prompts"], found["mismatches"], found["ties"]) == (2, 1, 0)
    assert found["differences"][0]["position"] == 3
    assert found["gap"] == pytest.approx(0.05)
    assert found["acceptance"] == {"here": [0.5, 0.2], "vllm": [0.5, 0.25]}


def test_eagle_is_compared_over_all_tokens(module, target, bundles, tmp_path):
    found = module.export_all([bundles["eagle"]], tmp_path)["eagle"]
    assert "drafts over 512 tokens, here over 300" in found["notes"][0]
    assert torch.equal(load_file(f"{found['own']}/model.safetensors")["draft_to_target"], torch.arange(512))
    drafter = load_drafter(found["own"], target)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)


def test_bundles_that_vllm_does_not_serve_are_refused(module, tiny_bundle, bundles, tmp_path):
    with pytest.raises(UserError, match="vLLM serves no edd"):
        module.export_all([tiny_bundle], tmp_path)
    with pytest.raises(UserError, match="another bundle has the name vdm too"):
        module.export_all([bundles["vdm"], bundles["vdm"]], tmp_path)


@pytest.fixture
def player(tmp_path, target, bundles, module) -> Path:
    """An interpreter that plays vLLM: the same outputs and counts as ours, but for one draft token."""
    answers = {}
    prompts = module.spread(module.read_prompts(module.MT_BENCH), 4)
    ids = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    for name, folder in bundles.items():
        own = module.export_all([folder], tmp_path / "answers")[name]["own"]
        answers[name] = module.decode_here(target, Path(own), ids, 2 if name == "medusa" else 3, 8)
        answers[name]["drafts"] *= 2
        answers[name]["accepted"] = [2 * count for count in answers[name]["accepted"]]
    answers["causal_lm"]["accepted"][0] += 1
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    script = tmp_path / "python"
    script.write_text(PLAYER.format(python=sys.executable, answers=str(tmp_path / "answers.json")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_figures(module, bundles, player, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "exportable", lambda kinds=(): [bundles[name] for name in kinds or bundles])
    monkeypatch.setattr(module, "DTYPES", ("float32",))
    monkeypatch.chdir(tmp_path)
    run = Run("baselines", vllm_python=str(player), limit=4)
    found = module.vllm(run)
    assert found["vllm_text_mismatches"] == {
        "value": 0,
        "ok": None,
        "why": "not measured in bf16",
        "ties": {"float32": 0},
        "texts_that_differ": {"float32": dict.fromkeys(bundles, 0)},
        "prompts": 16,
        "size": {"prompts": {"mt_bench": 4}},
    }
    gap = found["vllm_acceptance_gap"]
    drafts = json.loads((tmp_path / "answers.json").read_text())["causal_lm"]["drafts"]
    assert gap["value"] == pytest.approx(1 / drafts) and gap["gaps"]["float32"]["vdm"] == 0
    monkeypatch.setattr(module, "exportable", lambda kinds=(): [bundles["vdm"]])
    assert module.transformers(run)["transformers_mismatches"]["value"] == 0


def test_a_difference_that_is_no_tie_is_a_mismatch(module, bundles, player, tmp_path, monkeypatch, capsys):
    answers = json.loads((tmp_path / "answers.json").read_text())
    answers["vdm"]["outputs"][1][2] = (answers["vdm"]["outputs"][1][2] + 1) % 500
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    places = ["--vllm-python", str(player), "--out", str(tmp_path / "out"), "--prompts", "4"]
    words = [str(bundles["vdm"]), *places, "--max-new-tokens", "8", "--dtypes", "float32"]
    assert module.main(words) == 1
    assert json.loads(capsys.readouterr().out)["float32"]["vdm"]["mismatches"] == 1


def test_without_vllm_or_bundles_figures_are_skipped(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in (Run("baselines"), Run("baselines", vllm_python="python")):
        assert all("skipped" in figure for figure in module.vllm(run).values())
    assert "skipped" in module.transformers(Run("baselines"))["transformers_mismatches"]


def test_a_failing_vllm_is_one_line(module, bundles, tmp_path, capsys):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho broken; exit 3\n")
    script.chmod(0o755)
    words = [str(bundles["vdm"]), "--vllm-python", str(script), "--out", str(tmp_path / "out")]
    assert module.main([*words, "--prompts", "2", "--dtypes", "float32"]) == 2
    assert "vLLM ended with 3; see " in capsys.readouterr().err


def test_names_and_goals(module):
    goals = {name: goal for group in module.GROUPS for name, goal in group.goals.items()}
    assert goals == {
        "vllm_text_mismatches": "== 0",
        "vllm_acceptance_gap": "<= 0.02",
        "transformers_mismatches": "== 0",
    }


def test_the_script_finds_what_it_reads():
    script = ROOT / "studies/check_vllm.sh"
    text = script.read_text()
    [read] = re.findall(r'^\. "\$\(dirname "\$\{BASH_SOURCE\[0\]\}"\)/(.+)"$', text, re.MULTILINE)
    assert (script.parent / read).exists()
    [module] = re.findall(r"exec python -m (\S+)", text)
    assert importlib.import_module(module).main
