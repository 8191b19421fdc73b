"""Variants of EDD and its rivals that are not in the papers, and drafters that other engines can serve.

python -m studies.edd.variants joined     EDD that reads the last hidden state, too
python -m studies.edd.variants wide       EDD with as many heads of keys and values as of queries
python -m studies.edd.variants started    EDD whose layer starts from one of the target's
python -m studies.edd.variants anchored   EDD that joins each token with the newest verified state
python -m studies.edd.variants deeper     anchored EDD of one, two and three layers
python -m studies.edd.variants long       EDD and EAGLE, five times as long on three times the text
python -m studies.edd.variants emphasis   EDD with more weight on what greedy drafts are judged by
python -m studies.edd.variants mtp        an MTP-style EAGLE (C2T paper, Appendix F), and anchored EDD
python -m studies.edd.variants exports    drafters that other engines can serve: frozen heads, all tokens
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafttrain.utils.files import read_json
from drafttrain.utils.folders import new_folder
from drafttrain.utils.writing import write_json
from studies.arguments import start
from studies.edd.bench import (
    DRAFTER,
    LONG_STEPS,
    RATES,
    TRAINING,
    Bench,
    answers,
    best_rate,
    many_answers,
    run_study,
    several_seeds,
    summarize,
)

LONG_KINDS = ("edd", "eagle")
EMPHASES: dict[str, dict[str, float]] = {
    "edd-plain": {},
    "edd-unreached-0.3": {"unreached_weight": 0.3},
    "edd-argmax-0.3": {"argmax_share": 0.3},
    "edd-both": {"unreached_weight": 0.3, "argmax_share": 0.3},
    "edd-failed-3": {"failed_weight": 3.0},
}


def wide(bench: Bench) -> dict[str, Any]:
    """Train EDD whose keys and values hold as many numbers as a state has, as with the EDD paper's
    targets."""
    made_from = answers(bench)
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    drafter = replace(DRAFTER, kv_heads=bench.target.config.num_attention_heads)
    found = several_seeds(bench, "edd-wide", drafter, training, made_from)
    return {"rows": summarize({f"EDD, {drafter.kv_heads} heads": found})}


def started(bench: Bench) -> dict[str, Any]:
    """Train EDD whose layer starts from the target's first block, which reads embeddings, as its queries do;
    from the one after the tapped block, which reads its states; and from the last, which the head reads."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0], seed=0)
    n = bench.target.n_blocks
    for block in (0, n - 3, n - 1):
        found = bench.trained(f"edd-from{block}-seed0", replace(DRAFTER, init=block), training, made_from)
        rows[f"EDD from block {block}"] = [found]
    return {"rows": summarize(rows)}


def anchored(bench: Bench) -> dict[str, Any]:
    """Train EDD with `anchor`, from the fourth-to-last block alone and with the last hidden state beside
    it."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    for name, taps in (("edd-anchored", [-4]), ("edd-anchored-joined", [-4, bench.target.n_blocks])):
        drafter = replace(DRAFTER, anchor=True, tapped_blocks=taps)
        rows[name] = several_seeds(bench, name, drafter, training, made_from)
    return {"rows": summarize(rows)}


def deeper(bench: Bench) -> dict[str, Any]:
    """Train anchored EDD of one, two and three layers, at EDD's rate, from one seed."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=RATES[2], seed=0)
    for layers in (1, 2, 3):
        drafter = replace(DRAFTER, anchor=True, layers=layers)
        name = f"edd-anchored-{layers}-layers"
        rows[name] = [bench.trained(f"{name}-seed0", drafter, training, made_from)]
    return {"rows": summarize(rows)}


def long(bench: Bench, kinds: Sequence[str] = LONG_KINDS) -> dict[str, Any]:
    """Train EDD and EAGLE with more steps on more text, at the learning rates of the short trainings."""
    short, rows = answers(bench), {}
    made_from = many_answers(bench)
    for kind in kinds:
        rate = best_rate(bench, kind, short)[0]
        training = replace(TRAINING, lr=rate, max_steps=LONG_STEPS, eval_steps=LONG_STEPS // 4)
        rows[kind] = several_seeds(bench, f"{kind}-long", replace(DRAFTER, kind=kind), training, made_from)
    return {"rows": summarize(rows)}


def mtp(bench: Bench) -> dict[str, Any]:
    """Train EAGLE with the norms of an MTP layer, and anchored EDD, which norms the same inputs; both at the
    highest rate, without trials of their own."""
    made_from, rows = answers(bench), {}
    training = replace(TRAINING, lr=RATES[-1], seed=0)
    for name, drafter in (
        ("mtp", replace(DRAFTER, kind="eagle", input_norms=True)),
        ("edd-anchored-fast", replace(DRAFTER, anchor=True)),
    ):
        rows[name] = [bench.trained(f"{name}-seed0", drafter, training, made_from)]
    return {"rows": summarize(rows)}


def emphasis(bench: Bench, kinds: Sequence[str] = tuple(EMPHASES)) -> dict[str, Any]:
    """Train EDD whose loss has a share of cross-entropy with the target's most probable token, less weight
    where greedy drafts do not come, or more where they fail; at EDD's rate, from one seed."""
    made_from, rows = answers(bench), {}
    for name in kinds:
        training = replace(TRAINING, lr=RATES[2], seed=0, **EMPHASES[name])
        rows[name] = [bench.trained(f"{name}-seed0", DRAFTER, training, made_from)]
    return {"rows": summarize(rows)}


def joined(bench: Bench) -> dict[str, Any]:
    """Train EDD that reads the last hidden state beside the fourth-to-last block, which is ours."""
    made_from = answers(bench)
    training = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0], seed=0)
    drafter = replace(DRAFTER, tapped_blocks=[-4, bench.target.n_blocks])
    found = bench.trained("edd-joined-seed0", drafter, training, made_from)
    return {"rows": summarize({"EDD, two taps": [found]})}


def exports(bench: Bench) -> dict[str, Any]:
    """Train EAGLE and VDM with the target's own head, which then draft all of its tokens."""
    made_from, rows = answers(bench), {}
    for kind in ("eagle", "vdm"):
        training = replace(TRAINING, lr=best_rate(bench, kind, made_from)[0], seed=0)
        drafter = replace(DRAFTER, kind=kind, train_head=False)
        rows[f"{kind}, the target's head"] = [
            bench.trained(f"{kind}-frozen-seed0", drafter, training, made_from)
        ]
        draft_all_tokens(bench.out / f"{kind}-frozen-seed0/drafter", bench.out / f"{kind}-served")
    return {"rows": summarize(rows)}


def draft_all_tokens(drafter: Path, out: Path) -> None:
    """Write a copy of a drafter that reads the target's head, over all of the target's tokens."""
    settings, tensors = read_json(drafter / "config.json"), load_file(drafter / "model.safetensors")
    settings["draft_vocab_size"] = settings["target_vocab_size"]
    tensors["draft_to_target"] = torch.arange(settings["target_vocab_size"])
    with new_folder(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", settings)


VARIANTS = {
    study.__name__: study for study in (joined, wide, started, anchored, deeper, emphasis, long, mtp, exports)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the variant that the first word names; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if not words or words[0] not in VARIANTS:
        print(f"variants: name one of {', '.join(VARIANTS)} first; see --help after it", file=sys.stderr)
        return 2
    study = VARIANTS[words[0]]
    kinds = {long: LONG_KINDS, emphasis: tuple(EMPHASES)}.get(study, ())
    return run_study(study, __doc__, words[1:], kinds)


if __name__ == "__main__":
    start(main)
