"""Publishing, with the real client against a stand-in for the Hub: whole or not at all, and what comes down
again decodes the same tokens."""

import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants
from rich.console import Console

from drafttrain.bundle_files import GENERATE, REQUIREMENTS
from drafttrain.export.card import model_card
from drafttrain.export.config import ExportConfig
from drafttrain.export.push import prepare, push
from drafttrain.export.write import export
from drafttrain.hub import CONTENTS
from drafttrain.run.cli import main
from drafttrain.self_draft.build import write_cache
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.counting import TokenFile
from drafttrain.utils.manifest import MANIFEST
from tests.export.hub import Hub, Repo

ROOT = Path(__file__).parents[2]
TOKEN = "hf_secretsecretsecret"
ROW = {
    "prompts": 8,
    "accept_len": 2.0,
    "accept_len_nonrepeated": 1.9,
    "repetition": 0.1,
    "tokens_per_second": 50.0,
    "speedup": 1.5,
    "speedup_transformers": 1.7,
}
EVALUATION = {"tree": "chain:length=3", "dtype": "float32", "threads": 1, "tasks": {"MT-bench": ROW}}


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    (tmp_path / "eval.json").write_text(json.dumps(EVALUATION))
    config = ExportConfig(name="tiny", license="mit", base_model="someone/tiny")
    return export(config, tiny_bundle, tmp_path / "bundle", tmp_path / "eval.json")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in that this process's client talks to, with a token that may write."""
    hub = Hub()
    hub.tokens = {TOKEN: ("someone", True), "hf_reader": ("someone", False)}
    for name, value in (("ENDPOINT", hub.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield hub
    hub.close()


def run(bundle, *words: str) -> int:
    return main(["push", str(bundle), "--repo", "someone/drafter", *words])


def refused(capsys) -> str:
    """Return the one line on standard error after the list of files; it never holds the token."""
    out, err = capsys.readouterr()
    line = [line for line in err.splitlines() if line.startswith("drafttrain: ")]
    assert len(line) == 1 and TOKEN not in out + err and "Traceback" not in err, err
    return line[0]


# publishing


def test_round_trip_in_processes_of_their_own(bundle, tiny_target_folder, hub, tmp_path):
    hub.repos["someone/tiny"] = Repo(private=False)
    target = {path.name: path.read_bytes() for path in tiny_target_folder.iterdir()}
    hub.repos["someone/tiny"].commit("main", target)
    other = {"config.json": b'{"model_type": "llama"}', "model-00001-of-00002.safetensors": b"x"}
    hub.repos["someone/large"] = Repo(private=False)
    hub.repos["someone/large"].commit("main", other)
    code = f"""
from drafttrain.run.cli import main
assert main(["push", {str(bundle)!r}, "--repo", "someone/drafter", "--revision", "v2"]) == 0
from drafttrain import SpeculativeDecoder
from drafttrain.utils.errors import UserError
from drafttrain.bundle import load_bundle
places = [{str(bundle)!r}, "someone/drafter@v2"]
decoders = [SpeculativeDecoder.from_pretrained(p, dtype="float32", device="cpu") for p in places]
results = [d.generate("Could you please explain", 24) for d in decoders]
assert decoders[1].target.name == "someone/tiny", decoders[1].target.name
assert results[0].token_ids == results[1].token_ids and len(results[0].token_ids) == 24
assert results[0].stats.verify_tokens == results[1].stats.verify_tokens > 0
assert results[0].token_ids == decoders[1].autoregressive("Could you please explain", 24).token_ids
assert load_bundle("someone/drafter@v2", target=decoders[1].target).tree == "chain:length=3"
try:  # a target's id, by mistake
    load_bundle("someone/large")
except UserError as error:
    assert "holds a llama model; give the folder of a drafter" in str(error)
print("same tokens")
"""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("same tokens\n"), done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert not any("model-00001" in address for address in hub.resolved)
    assert any("someone/large" in address for address in hub.resolved)
    assert set(hub.repos["someone/drafter"].files("main")) == {".gitattributes"}


def contents(folder):
    """The files of a folder and the folders in it, by name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_files_of_the_bundle_and_nothing_else(bundle, hub, capsys):
    (bundle / "notes.txt").write_text("mine")
    (bundle / ".env").write_text("secret")
    (bundle / "stage.json").write_text("{}")
    (bundle / "checkpoints").mkdir()
    (bundle / "checkpoints" / "model.safetensors").write_text("old")
    assert run(bundle) == 0
    out = capsys.readouterr().out
    repo = hub.repos["someone/drafter"]
    files = repo.files()
    names = {
        "README.md",
        "card.json",
        "config.json",
        "eval.json",
        "model.safetensors",
        GENERATE,
        REQUIREMENTS,
    }
    assert set(files) == {*names, ".gitattributes"}
    assert b"DRAFTER = 'someone/drafter'" in files[GENERATE]
    assert files[REQUIREMENTS].startswith(b"# drafttrain, from a clone")
    assert files["model.safetensors"] == (bundle / "model.safetensors").read_bytes()
    assert files["eval.json"] == (bundle / "eval.json").read_bytes()
    assert json.loads(files["config.json"])["target"]["name"] == "someone/tiny"
    assert f"{hub.url}/someone/drafter/commit/{repo.branches['main']}" in out
    assert all(name in out for name in names) and "someone/drafter, branch main" in out
    assert hub.steps().count("commit") == 1 and not repo.private


def test_the_card_says_where_it_is(bundle, hub):
    assert run(bundle) == 0
    card = hub.repos["someone/drafter"].files()["README.md"].decode()
    assert 'from_pretrained("someone/drafter")' in card and "PATH_OR_HUB_ID" not in card
    assert card == model_card(bundle, "someone/drafter")


def test_a_later_bundle_replaces_the_earlier_one(bundle, hub):
    """A classifier that the new bundle lacks would draft for it, too."""
    (bundle / "classifier.json").write_text("{}")
    (bundle / "costs.png").write_bytes(b"picture")
    assert run(bundle) == 0
    repo = hub.repos["someone/drafter"]
    repo.commit("main", {**repo.files(), "someones-own.md": b"theirs"})
    (bundle / "classifier.json").unlink()
    (bundle / "costs.png").unlink()
    assert run(bundle) == 0
    assert "someones-own.md" in repo.files()
    assert not {"classifier.json", "costs.png"} & repo.files().keys()


def test_pushed_twice_nothing_large_is_sent_again(bundle, hub):
    assert run(bundle) == 0
    hub.calls.clear()
    assert run(bundle) == 0
    assert "put" not in hub.steps()


def test_metadata_that_the_hub_takes(bundle, hub):
    """Its data sets have names without spaces, even if tasks have them."""
    tasks = {"Natural Questions": ROW, "CNN/DM (2 turns)": ROW}
    (bundle / "eval.json").write_text(json.dumps({**EVALUATION, "tasks": tasks}))
    assert run(bundle) == 0
    results = ModelCard(hub.repos["someone/drafter"].files()["README.md"].decode()).data.eval_results
    assert {(one.dataset_name, one.dataset_type) for one in results} == {
        ("Natural Questions", "Natural-Questions"),
        ("CNN/DM (2 turns)", "CNN-DM-2-turns-"),
    }


@pytest.mark.parametrize(
    "facts, expected",
    [
        ({"license": "Apache 2.0"}, "license. must be one of"),
        (
            {"hub_datasets": ["responses of the target"]},
            "datasets. with value .responses of the target. is not",
        ),
    ],
)
def test_metadata_that_the_hub_refuses(facts, expected, bundle, hub, capsys):
    known = json.loads((bundle / "card.json").read_text())
    (bundle / "card.json").write_text(json.dumps({**known, **facts}))
    assert run(bundle) == 2
    line = refused(capsys)
    assert re.search(expected, line) and line.endswith("nothing was published")
    assert set(hub.repos["someone/drafter"].files()) == {".gitattributes"}


def test_a_pull_request_is_a_revision_too(bundle, hub):
    """It is there already, and is nothing that could be made or removed as a branch."""
    assert run(bundle) == 0
    repo = hub.repos["someone/drafter"]
    repo.branches["refs/pr/1"] = repo.commit("old", {"README.md": b"x"})
    hub.calls.clear()
    assert run(bundle, "--revision", "refs/pr/1") == 0
    assert "model.safetensors" in repo.files("refs/pr/1") and "branch" not in hub.steps()
    assert run(bundle, "--revision", "feature/x") == 0
    assert "model.safetensors" in repo.files("feature/x")


@pytest.mark.parametrize("name", ["a b", "-x", "x/", "a..b", "x.lock", "a~1"])
def test_no_branch(name, bundle, capsys):
    assert run(bundle, f"--revision={name}") == 2
    assert capsys.readouterr().err.startswith("drafttrain: --revision: must be ")


@pytest.mark.parametrize("revision", ["main", "v2"])
def test_a_commit_whose_answer_got_lost_is_there(revision, bundle, hub, capsys):
    hub.fail("commit", 0, done=True)
    assert run(bundle, "--revision", revision) == 0
    repo = hub.repos["someone/drafter"]
    assert "model.safetensors" in repo.files(revision)
    assert f"{hub.url}/someone/drafter/commit/{repo.branches[revision]}\n" in capsys.readouterr().out


def test_private(bundle, hub, capsys):
    assert run(bundle, "--private") == 0
    assert hub.repos["someone/drafter"].private
    hub.repos["someone/drafter"].private = False
    assert run(bundle, "--private") == 2
    assert "exists and is public" in refused(capsys)
    assert hub.steps().count("commit") == 1


def test_dry_run_sends_nothing(bundle, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")  # it needs no account either
    assert run(bundle, "--dry-run", "--out", str(tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert hub.calls == [] and "someone/drafter" in out
    written = contents(tmp_path / "out")
    assert json.loads(written.pop(MANIFEST)) == {n: sha256(data).hexdigest() for n, data in written.items()}
    assert set(written) >= {"README.md", "config.json", "model.safetensors", GENERATE, REQUIREMENTS}
    for name, content in written.items():
        assert f"{len(content):>13,}  {name}\n" in out
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(bundle) == 0
    uploaded = hub.repos["someone/drafter"].files()
    assert written == {name: content for name, content in uploaded.items() if name != ".gitattributes"}
    assert run(bundle, "--out", "x") == 2


def test_a_dry_run_replaces_nothing_but_a_dry_run(bundle, hub, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("of someone/drafter")
    (tmp_path / "data" / "chats.json").write_text("[]")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "data", bundle, tmp_path / "file", tmp_path):
        before = sorted(tmp_path.rglob("*"))
        assert run(bundle, "--dry-run", "--out", str(place)) == 2
        assert "holds something else than a dry run for someone/drafter" in refused(capsys)
        assert sorted(tmp_path.rglob("*")) == before
    for _ in range(2):
        assert run(bundle, "--dry-run", "--out", str(tmp_path / "out")) == 0
    (tmp_path / "out" / "README.md").write_bytes(b"Caf\xe9 someone/drafter")  # Latin-1
    assert run(bundle, "--dry-run", "--out", str(tmp_path / "out")) == 2
    assert "holds something else than a dry run" in refused(capsys)


def changed_weights(out):
    with open(out / "model.safetensors", "ab") as file:
        file.write(b"mine")


def a_folder_of_that_name(out):
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").mkdir()
    (out / "model.safetensors" / "mine.txt").write_text("mine")


def a_link(out):
    (out / "eval.json").unlink()
    (out / "eval.json").symlink_to(out.parent / "mine.json")
    (out.parent / "mine.json").write_text("mine")


def one_more_file(out):
    (out / "mine.txt").write_text("mine")


def a_licence(out):
    (out / "LICENSE").write_text("mine")


@pytest.mark.parametrize("change", [changed_weights, a_folder_of_that_name, a_link, one_more_file, a_licence])
def test_what_a_user_has_put_into_a_dry_run_stays(bundle, hub, tmp_path, capsys, change):
    out = tmp_path / "out"
    assert run(bundle, "--dry-run", "--out", str(out)) == 0
    change(out)
    assert run(bundle, "--dry-run", "--out", str(out)) == 2
    assert "holds something else than a dry run for someone/drafter" in refused(capsys)
    assert any("mine" in path.read_text(errors="replace") for path in out.rglob("*") if path.is_file())


def test_a_bundle_is_no_dry_run_even_with_its_card(bundle, hub, tmp_path, capsys):
    """Its base model may begin with the repository's name, and its card may be one that was published."""
    card = (bundle / "README.md").read_text()
    other = shutil.copytree(bundle, tmp_path / "other")
    for place, repo in ((other, "someone/tin"), (other, "someone/tiny"), (bundle, "someone/drafter")):
        if place == bundle:
            card = model_card(bundle, repo)
            (bundle / "README.md").write_text(card)
        assert repo in card
        link = tmp_path / f"link to {repo.split('/')[1]}"
        link.symlink_to(place)
        before = contents(place)
        for out in (place, link):
            assert main(["push", str(bundle), "--repo", repo, "--dry-run", "--out", str(out)]) == 2
            assert f"holds something else than a dry run for {repo}" in refused(capsys)
        assert contents(place) == before


def test_the_working_directory_is_no_place_for_a_dry_run(bundle, hub, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["push", str(bundle.resolve()), "--repo", "a/b", "--dry-run", "--out", "."]) == 2
    assert "must be a folder of its own, got the working directory" in refused(capsys)


def test_folders_of_the_maker_are_reported(bundle, hub, capsys, tmp_path):
    facts = json.loads((bundle / "card.json").read_text())
    facts["command"] = "drafttrain run x.yaml --corpus.sources '[{path: /home/me/chats.json}]'"
    facts["notes"] = ["and/or 3/4 of it, see https://example.org/a/b", "in `docs/a/b.md`"]
    (bundle / "card.json").write_text(json.dumps(facts))
    found = prepare(bundle, "someone/drafter").warnings
    assert [warning.split(" is ")[0] for warning in found] == ["card.json: command"]
    assert run(bundle, "--dry-run", "--out", str(tmp_path / "out")) == 0
    assert "look before you publish: card.json: command is drafttrain run" in refused(capsys)
    facts["notes"] += ["of `/home/me/chats.json`", "[/home/me/a.jsonl,/home/me/b.jsonl]", "file:///x"]
    (bundle / "card.json").write_text(json.dumps(facts))
    found = [warning.split(" is ")[0] for warning in prepare(bundle, "someone/drafter").warnings]
    assert set(found) == {"card.json: command", *(f"card.json: notes.{i}" for i in (2, 3, 4))}


# what goes wrong


@pytest.mark.parametrize(
    "step, status, expected",
    [
        ("create", 500, "the Hub answered 500: repeat the same command"),
        ("validate-yaml", 500, "the Hub answered 500"),
        ("preupload", 403, "no right to write there"),
        ("batch", 500, "the Hub answered 500"),
        ("put", 500, "the Hub answered 500"),
        ("put", 403, "no right to write there"),
        ("put", 0, "cannot be reached"),
        ("verify", 500, "the Hub answered 500"),
        ("commit", 401, "the Hub does not accept the token: log in with"),
        ("commit", 500, "the Hub answered 500"),
        ("commit", 0, "cannot be reached"),
    ],
)
def test_an_interrupted_upload_leaves_no_visible_revision(step, status, expected, bundle, hub, capsys):
    (bundle / "costs.png").write_bytes(b"picture")
    hub.fail(step, status, after=1 if step == "put" else 0)  # one large file is there already
    assert run(bundle, "--revision", "v2") == 2
    line = refused(capsys)
    assert expected in line and line.endswith("nothing was published")
    for repo in hub.repos.values():
        assert set(repo.branches) == {"main"} and set(repo.files()) == {".gitattributes"}
    hub.failures.clear()
    assert run(bundle, "--revision", "v2") == 0
    assert "model.safetensors" in hub.repos["someone/drafter"].files("v2")


def test_a_failure_leaves_the_branch_that_was_there(bundle, hub, capsys):
    assert run(bundle, "--revision", "v2") == 0
    repo = hub.repos["someone/drafter"]
    before = dict(repo.branches)
    (bundle / "eval.json").write_text(json.dumps({**EVALUATION, "threads": 2}))
    hub.fail("commit", 500)
    assert run(bundle, "--revision", "v2") == 2
    assert repo.branches == before


def test_ctrl_c_leaves_no_branch(bundle, hub, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        push(prepare(bundle, "someone/drafter"), revision="v2")
    assert set(hub.repos["someone/drafter"].branches) == {"main"}


@pytest.mark.parametrize(
    "token, repo, expected",
    [
        ("hf_wrong", "someone/drafter", "the Hub does not accept the token"),
        ("hf_reader", "someone/drafter", "no right to write there"),
        (TOKEN, "another/drafter", "no right to write there"),
        ("hf_wr\u00f6ng", "someone/drafter", "the upload failed"),
    ],
)
def test_tokens_and_rights(token, repo, expected, bundle, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", token)
    assert main(["push", str(bundle), "--repo", repo]) == 2
    line = refused(capsys)
    assert expected in line and token not in line
    assert hub.repos == {}


def test_without_a_token(bundle, hub, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert run(bundle) == 2
    assert "no token for the Hub; log in with" in refused(capsys) and hub.calls == []


def test_without_the_hub(bundle, hub, monkeypatch, capsys):
    hub.close()
    assert run(bundle) == 2
    assert f"the Hub at {hub.url} cannot be reached" in refused(capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(bundle) == 2
    assert "switched off by HF_HUB_OFFLINE" in refused(capsys)


def test_a_fault_of_this_machine_is_not_blamed_on_the_hub(bundle, hub, monkeypatch, capsys):
    def unreadable(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "model.safetensors")

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", unreadable)
    assert run(bundle) == 2
    line = refused(capsys)
    assert "Permission denied: 'model.safetensors'" in line and "cannot be reached" not in line


@pytest.mark.parametrize("repo", ["drafter", "a/b/c", "some one/drafter", "someone/", "someone/x..y"])
def test_no_repository(repo, bundle, capsys):
    assert main(["push", str(bundle), "--repo", repo]) == 2
    assert refused(capsys) == f"drafttrain: --repo: must be user/name, got {repo}"


@pytest.mark.parametrize("name", ["targets/tiny", "./tiny", "../tiny", "targets/tiny.gguf"])
def test_a_target_in_a_folder_is_no_hub_id(name, bundle, tmp_path, monkeypatch, hub, capsys):
    """Folders look like ids: the published config would name somebody else's repository, or none."""
    (tmp_path / "here" / "targets" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    facts, config = (json.loads((bundle / file).read_text()) for file in ("card.json", "config.json"))
    config["target"]["name"] = name
    (bundle / "config.json").write_text(json.dumps(config))
    (bundle / "card.json").write_text(json.dumps({**facts, "base_model": None}))
    assert run(bundle) == 2
    line = f"its card needs export.base_model (the target's Hub id user/name, got {name}); set"
    assert line in refused(capsys) and hub.calls == []
    (bundle / "card.json").write_text(json.dumps(facts))
    assert run(bundle) == 0
    monkeypatch.chdir(tmp_path)  # from where the folder is not to be seen
    assert run(bundle) == 0
    published = json.loads(hub.repos["someone/drafter"].files()["config.json"])
    assert published["target"]["name"] == "someone/tiny"


def cut_off_ngrams(folder: Path) -> None:
    """A bundle's n-gram cache without its last byte."""
    (folder / "work").mkdir()
    np.array([1, 2, 3, 1, 2, 3, 9], np.uint16).tofile(folder / "work" / "tokens")
    file = TokenFile(folder / "work" / "tokens", 9)
    config = NgramConfig(gram=3, min_count=1, top=3, processes=1)
    cache = write_cache(config, file, folder, {"tokenizer_hash": "abc"}, Console(quiet=True))[0]
    os.truncate(folder / "ngrams.bin", cache.shape.n_bytes - 1)


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda folder: (folder / "eval.json").unlink(), "must hold an eval.json with results"),
        (
            lambda folder: (folder / "eval.json").write_text('{"tasks": {}}'),
            "must hold an eval.json with results",
        ),
        (lambda folder: (folder / "config.json").unlink(), "no config.json there"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
            "must be a drafter's",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50),
            "model.safetensors: cannot be read",
        ),
        (cut_off_ngrams, r"ngrams.bin: \d+ bytes where ngrams.json says \d+: cut off"),
        (lambda folder: (folder / "ngrams.bin").write_bytes(b"x"), "no n-gram cache here"),
        (
            lambda folder: (folder / "classifier.safetensors").write_bytes(b"x" * 50),
            "classifier.safetensors: cannot be read",
        ),
        (lambda folder: (folder / "card.json").write_text('{"nmae": "x"}'), "must have no other keys than"),
        (
            lambda folder: (folder / "card.json").write_text("{}"),
            r"its card needs export.base_model \(.*\) and export.license \(.*, got none\); set what is",
        ),
        (
            lambda folder: (folder / "card.json").write_text('{"base_model": "../tiny", "license": "mit"}'),
            r"its card needs export.base_model \(.*, got ../tiny\); set what is missing in the recipe",
        ),
        (
            lambda folder: (folder / "card.json").write_text('{"base_model": "someone/tiny"}'),
            r"its card needs export.license \(the weights' licence as the Hub spells it, got none\)",
        ),
    ],
)
def test_what_is_no_finished_bundle(spoil, expected, bundle, hub, capsys):
    spoil(bundle)
    assert run(bundle) == 2
    assert re.search(expected, refused(capsys)) and hub.calls == []


def test_known_files_are_those_that_the_parts_of_a_bundle_write(tmp_path):
    from drafttrain.calibration.calibration import FILE as calibration
    from drafttrain.classifier import model, train
    from drafttrain.report.pictures import CLASSIFIER_PICTURES
    from drafttrain.self_draft.corpus_cache import DATA, FILE
    from drafttrain.self_draft.settings import SETTINGS as self_draft

    written = {calibration, self_draft, model.FILE, model.WEIGHTS, *CLASSIFIER_PICTURES}
    assert written | {train.REPORT, DATA, FILE, "costs.png", "reliability.png"} <= CONTENTS.keys()


def test_the_committed_card_is_what_its_bundle_renders():
    folder = ROOT / "model_cards" / "smollm2-135m-edd"
    assert model_card(folder) == (folder / "README.md").read_text(encoding="utf-8")
    unknown = contents(folder).keys() - CONTENTS.keys() - {"README.md"}
    assert unknown == set()  # all of it would be published
