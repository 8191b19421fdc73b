"""Figures of topic `baselines`: exported drafters in the tools that they are exported for.

    bash studies/check_vllm.sh BUNDLE …         makes an environment with vLLM if there is none, and compares
    python -m studies.figures baselines --vllm-python ~/vllm/bin/python

vLLM and our engine decode the same prompts greedily with the same chains of drafts. Outputs may part where
the target is undecided. In bf16 the two best logits are often the very same number, and vLLM's texts with
chains of 3 and of 5 differ on most prompts. So what has to be exact is compared in fp32, where the same
weights leave hardly any room for that: ties on 5 % of the texts at most. In bf16, which is how drafters are
served, every difference has to be a tie: both tokens no further below the best logit than rounding was
measured to move it (`Difference.is_tie`). What bf16 gives is reported as measured: the texts that differ,
ties among them, and both engines' acceptance.

Acceptance at position i is the share of steps with drafts in which the i-th draft token was accepted.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import kind_of, read_config
from drafttrain.evaluation.exactness import first_difference
from drafttrain.export.formats import FORMATS, export_to, import_from
from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size

MT_BENCH = "data/eval/mt_bench.jsonl"
NEW_TOKENS = 64
CHAIN = 3
ROWS = 8  # decoded at once, here and there
MOST_TIES = 0.05  # of the prompts, in fp32
SERVED = ("causal-lm", "eagle", "medusa")  # what vLLM reads
DTYPES = ("float32", "bfloat16")


class Counter(AcceptanceRule):
    """The greedy rule, which notes how many draft tokens it accepted in each step of each prompt."""

    def __init__(self, prompts: int):
        self.accepted: list[list[int]] = [[] for _ in range(prompts)]
        self.rows: Sequence[int] = ()

    def set_active(self, numbers: Sequence[int]) -> None:
        self.rows = list(numbers)

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        found = accept_greedy(tree, logits)
        if tree.width > 1:  # else it is a prompt's own step
            for row, count in zip(self.rows, found.counts.tolist()):
                self.accepted[row].append(count - 1)
        return found


def until_stop(tokens: Sequence[int], stop: set[int], limit: int) -> list[int]:
    """Return tokens up to the first stop token, `limit` at most."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return list(tokens[: min(end, limit)])


def decode_here(
    target: FrozenTarget, folder: Path, prompts: Sequence[Sequence[int]], chain: int, new_tokens: int
) -> dict[str, Any]:
    """Return outputs and counters of our engine, counted as vLLM counts: a step in which the output reaches
    its end counts all that was accepted. So decoding goes on a little further than is asked for."""
    drafter = load_drafter(folder, target, dtype=target.dtype)
    counter, stop = Counter(len(prompts)), target.eos_token_ids
    proposer = TreeProposer(drafter, ChainPolicy(chain))
    longer = new_tokens + chain + 1
    outputs = decode_all(target, proposer, prompts, longer, (), accept=counter, max_rows=ROWS)[0]
    outputs = [until_stop(tokens, stop, new_tokens) for tokens in outputs]
    drafts, accepted = 0, [0] * chain
    for tokens, steps in zip(outputs, counter.accepted):
        length = 1  # the prompt's own step gives the first token
        for count in steps:
            if length >= len(tokens):
                break
            drafts += 1
            accepted = [total + (i < count) for i, total in enumerate(accepted)]
            length += count + 1
    return {"outputs": outputs, "drafts": drafts, "accepted": accepted}


def as_served(format: str, exported: Path, folder: Path) -> Path:
    """Return the exported drafter as a folder of our own, to be decoded with here. EAGLE-1 drafts over all of
    the target's tokens, not over its draft vocabulary alone."""
    import_from(format, exported, folder)
    if format == "eagle":
        config = read_json(folder / "config.json")
        config["draft_vocab_size"] = config["target_vocab_size"]
        write_json(folder / "config.json", config)
        weights = folder / "model.safetensors"
        ids = torch.arange(config["target_vocab_size"])
        save_file(load_file(weights) | {"draft_to_target": ids}, weights, metadata={"format": "pt"})
    return folder


def export_all(bundles: Sequence[Path], folder: Path) -> dict[str, dict[str, Any]]:
    """Export each bundle to what vLLM reads; return by name what is served, where it is read here, and the
    target it is for."""
    found = {}
    for bundle in bundles:
        config = read_config(bundle)
        formats = [name for name in SERVED if kind_of(config) in FORMATS[name].KINDS]
        if not formats:
            raise UserError(f"{bundle}: vLLM serves no {kind_of(config)}: leave it out")
        place = bundle.resolve()
        [format], name = formats, place.parent.name if place.name in ("drafter", "bundle") else place.name
        if name in found:
            raise UserError(f"{bundle}: another bundle has the name {name} too: rename one")
        exported = folder / name / format
        notes = export_to(format, bundle, exported).notes
        own = as_served(format, exported, folder / name / "own")
        most = min(CHAIN, config["heads"]) if format == "medusa" else CHAIN
        found[name] = {
            "format": format,
            "exported": str(exported.resolve()),
            "own": str(own),
            "tokens": most,
            "notes": list(notes),
            "target": config["target"]["name"],
        }
    return found


def serve(python: str, job: dict[str, Any], result: Path) -> dict[str, Any]:
    """Run studies/vllm_drafters.py.

    Raises:
        UserError: it failed.
    """
    command = [python, "studies/vllm_drafters.py", str(result)]
    with open(result.with_suffix(".log"), "wb") as log:
        done = subprocess.run(command, input=json.dumps(job).encode(), stdout=log, stderr=log)
    if done.returncode:
        raise UserError(f"vLLM ended with {done.returncode}; see {log.name}")
    return json.loads(result.read_text())


def compare(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    here: dict[str, Any],
    there: dict[str, Any],
) -> dict[str, Any]:
    """Compare texts and counters of our engine and of vLLM."""
    stop, limit = target.eos_token_ids, max(map(len, here["outputs"]))
    differences = []
    for i, (ids, ours, theirs) in enumerate(zip(prompts, here["outputs"], there["outputs"], strict=True)):
        found = first_difference(target, ids, ours, until_stop(theirs, stop, limit))
        if found is not None:
            tie = found.is_tie()
            logits = {"gap": found.gap, "below_best": found.below_best, "noise": found.noise}
            differences.append({"prompt": i, "position": found.position, **logits, "tie": tie})
    rates = {
        name: [count / max(run["drafts"], 1) for count in run["accepted"]]
        for name, run in (("here", here), ("vllm", there))
    }
    gaps = [abs(a - b) for a, b in zip(rates["here"], rates["vllm"], strict=True)]
    return {
        "prompts": len(prompts),
        "mismatches": sum(not one["tie"] for one in differences),
        "ties": sum(one["tie"] for one in differences),
        "gap": max(gaps),
        "acceptance": rates,
        "drafts": {"here": here["drafts"], "vllm": there["drafts"]},
        "differences": differences,
    }


def check(
    bundles: Sequence[Path],
    python: str,
    folder: Path,
    prompts: int | None,
    new_tokens: int,
    dtypes: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Export bundles, serve them with vLLM and compare: {dtype: {bundle: comparison}}.

    Args:
        python: interpreter of an environment with vLLM.
        folder: for exports, logs and results.
        prompts: how many of MT-bench's; None for all.
    """
    drafters = export_all(bundles, folder)
    names = {one["target"] for one in drafters.values()}
    if len(names) != 1:
        raise UserError(f"bundles for {', '.join(sorted(names))}: check those of one target at a time")
    report: dict[str, dict[str, Any]] = {}
    for dtype in dtypes:
        target = load_target(*names, dtype=dtype, device="cpu")
        chosen = spread(read_prompts(MT_BENCH), prompts)
        ids = [prompt.token_ids(target.tokenizer) for prompt in chosen]
        job = {
            "target": target.model.name_or_path,
            "dtype": dtype,
            "prompts": ids,
            "max_new_tokens": new_tokens,
            "stop": sorted(target.eos_token_ids),
            "drafters": [
                {
                    "name": name,
                    "method": FORMATS[one["format"]].SERVE,
                    "model": one["exported"],
                    "tokens": one["tokens"],
                }
                for name, one in drafters.items()
            ],
        }
        served = serve(python, job, folder / f"vllm_{dtype}.json")
        report[dtype] = {}
        for name, one in drafters.items():
            here = decode_here(target, Path(one["own"]), ids, one["tokens"], new_tokens)
            found = compare(target, ids, here, served[name])
            report[dtype][name] = {"format": one["format"], **found, "notes": one["notes"]}
            text = f"{found['mismatches']} mismatches, {found['ties']} ties of {len(ids)}"
            print(f"{dtype} {name}: {text}, acceptance gap {found['gap']:.4f}", file=sys.stderr)
        write_json(folder / "report.json", report)
    return report


def figures(report: dict[str, dict[str, Any]]) -> Measured:
    """Return the figures of a report of `check`. Mismatches are of all types; ties and acceptance have to
    hold in fp32, where outputs hardly part. What bf16 gives is reported beside them, differing texts
    included."""
    parts = {dtype: list(part.values()) for dtype, part in report.items()}
    exact = parts["float32"]
    compared = sum(one["prompts"] for one in exact)
    ties = {dtype: sum(one["ties"] for one in part) for dtype, part in parts.items()}
    rows = {dtype: {name: one["gap"] for name, one in part.items()} for dtype, part in report.items()}
    differing = {
        dtype: {name: one["mismatches"] + one["ties"] for name, one in part.items()}
        for dtype, part in report.items()
    }
    acceptance = {
        dtype: {name: one["acceptance"] for name, one in part.items()} for dtype, part in report.items()
    }
    # a figure without the dtype in which drafters are served is undecided
    decided = {} if "bfloat16" in report else {"ok": None, "why": "not measured in bf16"}
    size = {"prompts": {"mt_bench": min(one["prompts"] for part in parts.values() for one in part)}}
    return {
        "vllm_text_mismatches": {
            "value": sum(one["mismatches"] for part in parts.values() for one in part),
            "ok": ties["float32"] <= MOST_TIES * compared,
            "ties": ties,
            "texts_that_differ": differing,
            "prompts": compared,
            "size": size,
            **decided,
        },
        "vllm_acceptance_gap": {
            "value": max(one["gap"] for one in exact),
            "gaps": rows,
            "acceptance": acceptance,
            "size": size,
            **decided,
        },
    }


def exportable(kinds: Sequence[str] = SERVED) -> list[Path]:
    """Return committed bundles and trained baselines that can be exported to these formats, the first by path
    of each kind."""
    wanted = {kind for name in kinds for kind in FORMATS[name].KINDS}
    places = sorted(
        [*Path("model_cards").glob("*/config.json"), *Path("runs/baselines").glob("**/config.json")]
    )
    found: dict[str, Path] = {}
    for place in places:
        if "checkpoints" in place.parts:  # of trainings
            continue
        config = read_json(place)
        kind = kind_of(config) if isinstance(config, dict) else None
        if kind in wanted and (config.get("train_head") is False or kind != "eagle"):
            found.setdefault(kind, place.parent)
    return list(found.values())


def vllm(run: Run) -> Measured:
    """Compare the exported drafters in vLLM with our engine."""
    names = ("vllm_text_mismatches", "vllm_acceptance_gap")
    bundles = exportable()
    if run.vllm_python is None or not bundles:
        missing = (
            "no bundle that vLLM could serve"
            if run.vllm_python
            else "vLLM is not installed: no --vllm-python"
        )
        return {name: {"value": None, "skipped": missing} for name in names}
    folder = run.folder("vllm")
    prompts = run.prompts(quick=8, full=None)
    return figures(check(bundles, run.vllm_python, folder, prompts, NEW_TOKENS, DTYPES))


def transformers(run: Run) -> Measured:
    """Compare `generate` with the exported VDM or small LM as assistant with plain greedy decoding, in
    fp32."""
    bundles = exportable(["causal-lm"])
    if not bundles:
        return {"transformers_mismatches": {"value": None, "skipped": "no bundle of a VDM"}}
    folder = run.folder("transformers")
    export_to("causal-lm", bundles[0], folder / "assistant")
    target = load_target(read_config(bundles[0])["target"]["name"], dtype="float32", device="cpu")
    model = load_stock_model(target)
    assistant = AutoModelForCausalLM.from_pretrained(folder / "assistant", dtype=torch.float32)
    prompts = spread(read_prompts(MT_BENCH), run.prompts(quick=4, full=None))
    mismatches = 0
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids(target.tokenizer)])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        plain = model.generate(ids, **options)
        assisted = model.generate(ids, assistant_model=assistant, **options)
        mismatches += not torch.equal(plain, assisted)
    return {
        "transformers_mismatches": {
            "value": mismatches,
            "drafter": str(bundles[0]),
            "size": {"prompts": {"mt_bench": len(prompts)}},
        }
    }


GROUPS = [
    Group({"vllm_text_mismatches": "== 0", "vllm_acceptance_gap": "<= 0.02"}, vllm, size=Size(FIRST_TURNS)),
    Group({"transformers_mismatches": "== 0"}, transformers, size=Size(FIRST_TURNS)),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the bundles that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description="Exported drafters in vLLM against our engine.")
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE", help="VDM, EAGLE or MEDUSA")
    parser.add_argument("--vllm-python", required=True, metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("runs/check_vllm"), metavar="DIR")
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="of MT-bench (default: 24)")
    parser.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    args = parser.parse_args(argv)
    try:
        report = check(
            args.bundles, args.vllm_python, args.out, args.prompts, args.max_new_tokens, args.dtypes
        )
    except UserError as error:
        print(f"check_vllm: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1))
    parts = [one for part in report.values() for one in part.values()]
    return 1 if any(one["mismatches"] for one in parts) else 0


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    sys.exit(main())
