"""llama.cpp as a rival: the GGUF files that it reads, its installation, and the jobs that it gets."""

import importlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants

from drafttrain.evaluation.metrics import MethodRun
from drafttrain.utils.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def llamacpp(monkeypatch):
    """studies/llamacpp.py."""
    return importlib.import_module("studies.llamacpp")


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0), ("q8_0", 0.02)])
def test_gguf_has_the_weights_and_metadata_of_its_source(
    llamacpp, tiny_llama, write_gguf, tmp_path, kind, tolerance
):
    source = write_gguf(tmp_path / "source.gguf", *tiny_llama)
    llamacpp.write_gguf(source, tmp_path / "out.gguf", kind)
    before, after = GGUFReader(source), GGUFReader(tmp_path / "out.gguf")
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert after.fields[name].contents() == field.contents(), name
    assert after.get_field("general.file_type").contents() == llamacpp.FILE_TYPES[kind]
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for one, other in zip(before.tensors, after.tensors):
        expected, found = (quants.dequantize(x.data, x.tensor_type) for x in (one, other))
        expected = torch.tensor(expected).bfloat16().float().numpy()
        assert other.tensor_type == (llamacpp.KINDS[kind] if found.ndim > 1 else 0)
        if found.ndim == 1 or not tolerance:  # bf16 numbers of this size fit into f16
            np.testing.assert_allclose(found, expected, rtol=0, atol=2**-24)
        else:
            assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_models_are_written_once(llamacpp, tiny_llama, write_gguf, tmp_path, monkeypatch):
    downloads = []

    def download(folder):
        downloads.append(folder)
        folder.mkdir()
        return write_gguf(folder / "tiny.gguf", *tiny_llama)

    monkeypatch.setattr(llamacpp, "download_gguf", download)
    paths = llamacpp.models(tmp_path / "llama")
    assert paths == llamacpp.models(tmp_path / "llama") and len(downloads) == 1
    assert set(paths) == {"f16", "q8_0"} and all(path.stat().st_size for path in paths.values())
    assert sorted(tmp_path.glob("llama/*")) == sorted(paths.values())  # nothing is left of the download


def npm(monkeypatch, llamacpp, names):
    """An npm that installs libraries of these names."""
    calls = []

    def run(command, **options):
        calls.append(command)
        libraries = Path(command[command.index("--prefix") + 1]) / llamacpp.LIBRARIES
        if names:
            libraries.mkdir(parents=True)
        for name in names:
            (libraries / name).write_text(name)
        return subprocess.CompletedProcess(command, 0 if names else 1, "", "\nnpm error network\nmore\n")

    monkeypatch.setattr(llamacpp.subprocess, "run", run)
    monkeypatch.setattr(llamacpp.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(llamacpp.platform, "system", lambda: "Linux")
    monkeypatch.setattr(llamacpp.platform, "machine", lambda: "x86_64")
    return calls


def test_install_happens_once_and_avx2_keeps_no_newer_kernel(llamacpp, monkeypatch, tmp_path):
    names = ["libggml-cpu-haswell.so", "libggml-cpu-zen4.so", "libggml-cpu-x64.so", "libllama.so"]
    calls = npm(monkeypatch, llamacpp, names)
    every = llamacpp.install(tmp_path / "llama")
    limited = llamacpp.install(tmp_path / "llama", avx2=True)
    assert llamacpp.install(tmp_path / "llama") == every and len(calls) == 1
    assert "--ignore-scripts" in calls[0]
    assert sorted(path.name for path in (every / llamacpp.LIBRARIES).iterdir()) == sorted(names)
    names.remove("libggml-cpu-zen4.so")
    assert sorted(path.name for path in (limited / llamacpp.LIBRARIES).iterdir()) == sorted(names)


def test_install_reports_in_one_line_what_is_missing(llamacpp, monkeypatch, tmp_path):
    npm(monkeypatch, llamacpp, [])
    with pytest.raises(UserError, match=r"^llama.cpp: npm cannot install it \(npm error network\); check"):
        llamacpp.install(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(llamacpp.shutil, "which", lambda name: None if name == "npm" else name)
    with pytest.raises(UserError, match="^llama.cpp: needs node and npm, got no npm; install"):
        llamacpp.install(tmp_path)
    monkeypatch.setattr(llamacpp.platform, "machine", lambda: "arm64")
    with pytest.raises(UserError, match="^llama.cpp: must run on Linux on x86-64"):
        llamacpp.install(tmp_path)


def node(monkeypatch, llamacpp, tmp_path, body):
    """A node whose script is this shell script."""
    path = tmp_path / "node"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_llamacpp_answers_jobs_line_by_line(llamacpp, monkeypatch, tmp_path):
    answer = '{"tokens": [5, 2], "seconds": 0.25, "forward_seconds": 0.125}'
    body = f"""echo '{{"kernel": "haswell", "threads": 3}}'
while read -r line; do echo "$line" >> {tmp_path}/jobs; echo '{answer}'; done"""
    node(monkeypatch, llamacpp, tmp_path, body)
    with llamacpp.running(tmp_path, tmp_path / "m.gguf", {2, 0}, 3) as running:
        assert running.described == {"kernel": "haswell", "threads": 3}
        assert running.decode([1, 7], 9) == MethodRun(0.25, [5, 2])
        assert running.decode((4,), 1) == MethodRun(0.25, [5, 2])
    assert running.process.returncode is not None
    assert (running.seconds, running.forward_seconds) == (0.5, 0.25)
    jobs = [json.loads(line) for line in (tmp_path / "jobs").read_text().splitlines()]
    assert jobs == [{"ids": [1, 7], "limit": 9, "stop": [0, 2]}, {"ids": [4], "limit": 1, "stop": [0, 2]}]


def test_llamacpp_that_dies_is_an_error(llamacpp, monkeypatch, tmp_path):
    node(monkeypatch, llamacpp, tmp_path, """echo '{"kernel": null, "threads": 1}'; exit 4""")
    with llamacpp.running(tmp_path, tmp_path / "m.gguf", {2}, 1) as running:
        running.process.wait()
        with pytest.raises(UserError, match="^llama.cpp: must answer, got exit status 4"):
            running.decode([1], 2)


def test_llamacpp_that_does_not_start_is_an_error(llamacpp, monkeypatch, tmp_path):
    node(monkeypatch, llamacpp, tmp_path, "exit 3")
    with (
        pytest.raises(UserError, match="^llama.cpp: must answer, got exit status 3; see its messages"),
        llamacpp.running(tmp_path, tmp_path / "m.gguf", {2}, 1),
    ):
        pass
