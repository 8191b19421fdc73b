"""Decode prompts with a bundle, report why drafts are rejected, and name the changes most likely to help."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafttrain.bundle import load_bundle
from drafttrain.bundle_files import LOG
from drafttrain.data.prompts import read_prompts
from drafttrain.drafters.model import DraftModel
from drafttrain.drafters.model_config import identity
from drafttrain.evaluation.diagnosis import Change, Diagnosis, diagnose_drafts, ranked
from drafttrain.evaluation.drafts import tried_drafts
from drafttrain.evaluation.proposers import find_drafter
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.progress import counted
from drafttrain.utils.writing import write_json

LENGTH = 5  # drafts of a chain
NAMED = 3  # changes that are printed at most
TAP_PROMPTS, TAP_TOKENS = 4, 24  # of the decode with each tapped block
# acceptance of first drafts, and share of the accept_len on validation prompts, below which other tapped
# blocks are tried
SUSPICIOUS, SHORT = 0.5, 0.85
BETTER = 0.3  # gain of accept_len from which another tapped block is named
COSTS = 0.05  # loss of accept_len against validation prompts; a smaller one may be due to the other prompts
RISING = 0.02  # relative gain of accept_len over the last half of a training, from which it was still rising
REMEDIES = {
    "weights": "train it further on this target's answers: drafttrain regenerate, training.init_from",
    "template": "use the chat template of its training, or train it further with this one",
    "tokenizer": "load the tokenizer of its training",
}


def diagnose(
    bundle: str,
    prompts: str,
    out: str | os.PathLike | None = None,
    limit: int | None = None,
    target: str | None = None,
    dtype: str = "auto",
    max_new_tokens: int = 96,
    console: Console | None = None,
) -> Diagnosis:
    """Decode prompts greedily with chains of the bundle's drafter; print where and why drafts are rejected.

    Args:
        prompts: file that `read_prompts` reads; `limit`: how many of it.
        out: JSON file to write. None: none.
        target, dtype: as `load_bundle`.

    Raises:
        UserError: prompts or bundle are unusable, or no draft was tried.
    """
    console = console or Console(highlight=False)
    if max_new_tokens < 3:
        raise UserError(
            f"max_new_tokens: must be >= 3, got {max_new_tokens}; a draft is a token between two others"
        )
    if out is not None and os.path.isdir(out):  # before anything is decoded
        raise UserError(f"out: must be a file, got the folder {out}; name a file in it")
    chats, folder = read_prompts(prompts, limit), find_drafter(bundle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about another target, which the diagnosis reports
        loaded = load_bundle(bundle, target=target, dtype=dtype, own_calibration=False)
    drafter, target_lm = loaded.drafter, loaded.target
    ids = []
    for chat in chats:
        ids.append(chat.token_ids(target_lm.tokenizer))
        target_lm.check_length(ids[-1], max_new_tokens, f"{prompts}: prompt {chat.id}")
    length = min(LENGTH, drafter.max_depth or LENGTH)
    drafts, stats = [], DecodeStats()
    with counted("decoding", len(ids), console=console) as advance:
        for number, prompt in enumerate(ids):
            found = tried_drafts(target_lm, drafter, [prompt], length, max_new_tokens, stats)
            for one in found:
                one.prompt = number
            drafts += found
            advance(1)
    if not drafts:
        raise UserError(f"{prompts}: must give answers of two tokens or more, got none; give other prompts")
    training = drafter.config.training or {}
    expected = training.get("final", {}).get("eval_accept_len")
    trained = training.get("eval_draft_length", length)
    if min(trained, drafter.max_depth or trained) != length:  # accept_len depends on the chains' length
        expected = None
    diagnosis = diagnose_drafts(drafts, training.get("max_length"), stats.accept_len)
    if drafter.max_depth:
        diagnosis.chains = {n: one for n, one in diagnosis.chains.items() if n <= drafter.max_depth}
    gain = expected - diagnosis.accept_len if expected else 0.0
    logs = (place / LOG for place in (folder, folder.parent))  # of a bundle, of a training
    others = [*_identity(drafter, target_lm, gain), *_trend(next(filter(Path.exists, logs), None))]
    first = next(group for group in diagnosis.tables["depth"] if group.name == "1")
    if first.accepted < SUSPICIOUS or diagnosis.accept_len < SHORT * (expected or 0.0):
        tokens = min(TAP_TOKENS, max_new_tokens)  # for which the prompts have room
        others += _tapped(drafter, target_lm, ids[:TAP_PROMPTS], length, tokens, console)
    diagnosis.changes = ranked([*diagnosis.changes, *others])
    show(diagnosis, length, console)
    if out is not None:
        write_json(out, {"bundle": bundle, "prompts": prompts, **asdict(diagnosis)})
    return diagnosis


def _identity(drafter: DraftModel, target: FrozenTarget, gain: float) -> list[Change]:
    """Compare the target that the drafter was trained for with the one that it drafts for. Every difference
    is reported, even without a loss: prompts easier than the validation's may hide it. All differences are
    one change, because only their joint gain is known.

    Args:
        gain: accept_len on validation prompts minus that of this decode.
    """
    made_for, found = drafter.config.target, identity(target)
    different = [key for key in REMEDIES if made_for.get(key) != found[key]]
    if not different:
        return []
    why = "this target differs in that from the one that the drafter was trained for"
    remedy = "; ".join(REMEDIES[key] for key in different)
    return [Change(" and ".join(different), why, remedy, gain if gain > COSTS else None, True)]


def _trend(log: Path | None) -> list[Change]:
    """Judge from the training log whether accept_len was still rising."""
    if log is None:
        return []
    found = [one for one in read_json(log) if isinstance(one, dict) and one.get("eval_accept_len")]
    if len(found) < 4:
        return []
    half = found[len(found) // 2 - 1]
    gain = found[-1]["eval_accept_len"] - half["eval_accept_len"]
    if gain < RISING * found[-1]["eval_accept_len"]:
        return []
    why = f"accept_len rose by {gain:.2f} over the last half of its {found[-1]['step']} steps"
    return [Change("training", why, "train twice as long: training.init_from, more text", gain)]


def _tapped(
    drafter: DraftModel,
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    length: int,
    new_tokens: int,
    console: Console,
) -> list[Change]:
    """Decode with each block tapped in turn, and report one with which clearly more drafts are accepted."""
    own = list(target.tapped_blocks)
    if len(own) != 1:
        return []
    found = {}
    try:
        with counted("trying other tapped blocks", target.n_blocks + 1, console=console) as advance:
            for block in range(target.n_blocks + 1):
                target.tap([block])
                tried_drafts(target, drafter, prompts, length, new_tokens, stats := DecodeStats())
                found[block] = stats.accept_len
                advance(1)
    finally:
        target.tap(own)
    best = max(found, key=found.get)
    if found[best] < found[own[0]] + BETTER:
        return []
    why = f"with block {best} in place of {own[0]} accept_len is {found[best]:.2f}, not {found[own[0]]:.2f}"
    remedy = f"tapped_blocks: [{best}] in config.json, if that is what it was trained on"
    return [Change("tapped blocks", why, remedy, found[best] - found[own[0]], True)]


def show(diagnosis: Diagnosis, length: int, console: Console) -> None:
    """Print the tables and the most helpful changes; `length` is that of the decoded chains."""
    for name, groups in diagnosis.tables.items():
        table = Table(name, box=None, pad_edge=False)
        for column in ("drafts", "accepted", "probability"):
            table.add_column(column, justify="right")
        for one in groups:
            table.add_row(one.name, f"{one.drafts:,}", f"{one.accepted:.1%}", f"{one.probability:.2f}")
        console.print(table, "")
    lines = [
        f"accept_len {diagnosis.accept_len:.3f} on {diagnosis.prompts} prompts, chains of {length}; "
        f"KL {diagnosis.kl:.2f} nats; {diagnosis.outside:.1%} of the target's probability is outside the "
        "draft vocabulary",
        "with a tree instead, about "
        + ", ".join(f"{length:.2f} with {n} children" for n, length in diagnosis.trees.items()),
        *_longer(diagnosis),
        f"with all tokens in the draft vocabulary, about +{diagnosis.vocabulary_gain:.2f}",
        "",
        "most likely to help:" if diagnosis.changes else "no cause stands out: more text and longer training",
    ]
    most = length + 1 - diagnosis.accept_len  # if every draft was accepted
    for number, one in enumerate(diagnosis.changes[:NAMED], 1):
        gain = f"gain unknown, at most +{most:.2f}" if one.gain is None else f"about +{one.gain:.2f}"
        lines.append(f"{number}. {one.cause} ({gain}): {one.why}; {one.remedy}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _longer(diagnosis: Diagnosis) -> list[str]:
    """Return the line about longer chains; none if the drafter cannot draft longer ones."""
    found = ", ".join(f"{length:.2f} with {n} drafts" for n, length in diagnosis.chains.items())
    return [f"with longer chains, about {found}"] if found else []
