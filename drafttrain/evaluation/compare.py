"""`drafttrain benchmark --table texts`: where outputs with and without drafts differ, and by how little."""

from rich.console import Console
from rich.markup import escape

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.evaluation.exactness import first_difference
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.utils.machine import dtype_name


def compare(
    bundle: str,
    prompts: str,
    limit: int | None = None,
    target: str | None = None,
    dtype: str = "auto",
    tree: str | None = None,
    max_new_tokens: int = 96,
    calibration: str | None = None,
    console: Console | None = None,
) -> int:
    """Decode prompts greedily with and without drafting and print where the outputs part: the tokens, the
    text before them, and the gap of the target's two best logits, by which a near-tie can be told from a bug.

    Args:
        prompts: file that `read_prompts` reads; `limit`: how many of it.
        dtype: as `load_target` takes it. bf16 decides near-ties by the shape of the forward; fp32 should not
            differ at all.
        tree: how drafts grow. None: what the bundle recommends.
        calibration: for `pct`, `timed` and `c2t`. None: the bundle's own.

    Returns:
        number of prompts whose outputs part where the target was sure.

    Raises:
        UserError: prompts or bundle are unusable.
    """
    console = console or Console(highlight=False)
    chats = read_prompts(prompts, limit)
    loaded = load_bundle(bundle, target=target, dtype=dtype, calibration=calibration)
    if warning := loaded.warning(tree):
        console.print(warning, style="yellow", markup=False, soft_wrap=True)  # it may name paths
    tokenizer, differing, ties = loaded.target.tokenizer, 0, 0
    for chat in chats:
        ids = chat.token_ids(tokenizer)
        loaded.target.check_length(ids, max_new_tokens, f"{prompts}: prompt {chat.id}")
        plain, drafted = (
            decode_all(loaded.target, proposer, [ids], max_new_tokens)[0][0]
            for proposer in (NoProposer(), loaded.proposer(tree))
        )
        difference = first_difference(loaded.target, ids, plain, drafted)
        if difference is None:
            continue
        tie = difference.is_tie()
        ties += tie
        differing += 1
        before = tokenizer.decode(plain[: difference.position])[-40:]
        expected, found = (
            repr(tokenizer.decode([token])) if token >= 0 else "the end"
            for token in (difference.expected, difference.found)
        )
        line = (
            f"prompt {chat.id}, token {difference.position + 1}, after {before!r}: {expected} without drafts "
            f"and {found} with them; top-2 logit gap {difference.gap:.3g}"
        )
        if difference.behind is not None:
            share = difference.behind / difference.logit_std
            line += (
                f", the worse one {difference.behind:.3g} ({share:.2g} standard deviations) behind the best, "
                f"rounding up to {difference.noise:.3g}"
            )
        console.print(escape(f"{line}: {'a near-tie' if tie else 'NO TIE'}"), soft_wrap=True)
    used = dtype_name(loaded.target.dtype)
    console.print(
        f"{len(chats) - differing} of {len(chats)} outputs are equal in {used}; {ties} part at near-ties, "
        f"{differing - ties} elsewhere",
        soft_wrap=True,
    )
    return differing - ties
