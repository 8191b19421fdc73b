"""The examples of docs/extending.md work: their files are written, their lines added, and both are used."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafttrain.bundle import load_bundle
from drafttrain.decoder import SpeculativeDecoder
from drafttrain.drafters import config as drafter_config
from drafttrain.drafters.config import KINDS, DrafterConfig
from drafttrain.evaluation import benchmark as benchmark_module
from drafttrain.evaluation.benchmark import BenchmarkConfig, TaskSpec, benchmark
from drafttrain.evaluation.methods import MethodSpec
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.run import cli
from drafttrain.trees import policies
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.policies import POLICIES
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from tests.conftest import write_jsonl

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [20, 21]]
FILE = re.compile(
    r"^`drafttrain/(\w+)/(\w+)\.py`[^\n]*:\n\n```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.fixture
def page(tmp_path, monkeypatch) -> None:
    """The package with the files and lines of the page."""
    for folder, module, language, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            place = tmp_path / "package" / folder
            place.mkdir(parents=True)
            (place / f"{module}.py").write_text(text, encoding="utf-8")
            package = importlib.import_module(f"drafttrain.{folder}")
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
            monkeypatch.delitem(sys.modules, f"drafttrain.{folder}.{module}", raising=False)
            continue
        changed = importlib.import_module(f"drafttrain.{folder}.{module}")
        names = dict(vars(changed))
        imports, entries = [], []
        for line in re.findall(r"^\+(.*)$", text, re.MULTILINE):
            (entries if line.startswith(" ") else imports).append(line)
        exec("\n".join(imports), names)
        table = POLICIES if changed is policies else KINDS
        for name, entry in eval("{" + "".join(entries) + "}", names).items():
            monkeypatch.setitem(table, name, entry)


def test_the_page_has_two_files_and_two_lines():
    found = FILE.findall(PAGE.read_text(encoding="utf-8"))
    assert [(folder, module) for folder, module, *_ in found] == [
        ("trees", "beam"),
        ("trees", "policies"),
        ("drafters", "mlp"),
        ("drafters", "config"),
    ]
    assert drafter_config.KINDS is KINDS


@pytest.mark.usefixtures("page")
def test_the_policy_decodes_the_text_of_the_target(tiny_bundle):
    bundle = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    expected = decode_all(bundle.target, NoProposer(), PROMPTS, 12)[0]
    for tree in ("beam", "beam:share=1,width=1", "beam:share=0.01,width=4,max_depth=3,total=24"):
        for max_rows in (1, 3):
            outputs, stats = decode_all(bundle.target, bundle.proposer(tree), PROMPTS, 12, max_rows=max_rows)
            assert outputs == expected
    assert stats.verify_tokens / stats.steps > 12
    policy = parse_policy("beam:total=3")
    decoder = SpeculativeDecoder.from_pretrained(str(tiny_bundle), dtype="float32", tree=policy)
    assert decoder.generate(PROMPTS[2], 12).token_ids == expected[2]


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    "tree, message",
    [
        ("beam:width=0", "tree 'beam:width=0': width: must be >= 1, got 0"),
        ("beam:share=2", "tree 'beam:share=2': share: must be > 0 and <= 1, got 2.0"),
        (
            "beam:shares=1",
            "settings of share=…, .*, got 'shares=1'; did you mean share",
        ),
    ],
)
def test_the_settings_of_the_policy_are_checked(tree, message):
    with pytest.raises(UserError, match=message):
        parse_policy(tree)


RECIPE = """\
target: {{model: {target}, dtype: float32, device: cpu}}
corpus: {{sources: [{{path: chats.jsonl}}], max_length: 128, validation_fraction: 0.1}}
drafter: {{tapped_blocks: [-2], draft_vocab_size: 200}}
training:
  {{row_length: 128, rows_per_batch: 2, max_steps: 6, lr: 3e-3, schedule: constant, logging_steps: 1,
   eval_new_tokens: 4, eval_prompt_limit: 1, bf16: false}}
"""


@pytest.fixture
def recipe(tiny_target_folder, tmp_path, monkeypatch) -> str:
    """A recipe over a few chats that repeat themselves, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    answers = [{"from": "gpt", "value": f"The {word} is there. " * 4} for word in ("sun", "moon")]
    chats = [[{"from": "human", "value": f"Why is the sky {i}?"}, answers[i % 2]] for i in range(30)]
    rows = [{"id": f"{i}", "conversations": turns} for i, turns in enumerate(chats)]
    write_jsonl(tmp_path / "chats.jsonl", rows)
    (tmp_path / "small.yaml").write_text(RECIPE.format(target=tiny_target_folder), encoding="utf-8")
    return "small.yaml"


@pytest.mark.usefixtures("page")
def test_the_drafter_trains_drafts_and_is_benchmarked(recipe, tiny_target_folder, monkeypatch, capsys):
    assert cli.main(["run", recipe, "--drafter.kind", "mlp", "--output", "runs/mlp", "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert cli.main(["run", recipe, "--drafter.kind", "mlp", "--output", "runs/mlp"]) == 0
    stored = load_file("runs/mlp/bundle/model.safetensors")
    trained = sum(tensor.numel() for tensor in stored.values() if tensor.is_floating_point())
    assert "embed_tokens.weight" not in stored
    assert f"parameters: {trained / 1e3:.3g} k" in planned
    losses = [step["loss"] for step in read_json("runs/mlp/bundle/training_log.json") if "loss" in step]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]

    bundle = load_bundle("runs/mlp/bundle", dtype="float32", device="cpu")
    expected = decode_all(bundle.target, NoProposer(), PROMPTS, 12)[0]
    for tree in ("chain:length=3", "eagle2:top_k=3,max_depth=3,total=7"):
        for max_rows in (1, 2, 4):  # rows end and are refilled
            outputs, _ = decode_all(bundle.target, bundle.proposer(tree), PROMPTS, 12, max_rows=max_rows)
            assert outputs == expected

    monkeypatch.setattr(benchmark_module, "check_quiet", lambda refuse: None)
    write_jsonl(Path("questions.jsonl"), [{"question_id": 1, "category": "x", "turns": ["Why?"]}])
    config = BenchmarkConfig(
        target=str(tiny_target_folder),
        methods=[MethodSpec.parse("mlp=runs/mlp/bundle@chain:length=2")],
        tasks=[TaskSpec.parse("questions=questions.jsonl")],
        max_new_tokens=6,
        dtype="float32",
        device="cpu",
    )
    rows = {row["method"]: row for row in benchmark(config, "runs/compared")["rows"]}
    assert rows["mlp"]["identical"] == 1 and rows["mlp"]["accept_len"] >= 1


@pytest.mark.usefixtures("page")
def test_the_settings_of_the_drafter_are_checked():
    DrafterConfig(kind="mlp", draft_vocab_size=100).check()
    with pytest.raises(UserError, match="drafter.layers: must be 1 for kind mlp, got 2; it is for edd"):
        DrafterConfig(kind="mlp", layers=2).check()
