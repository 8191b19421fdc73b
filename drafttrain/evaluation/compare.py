"""Show where outputs with and without drafts differ, and whether rounding can explain it."""

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.evaluation.exactness import first_difference
from drafttrain.evaluation.report import describe_difference
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.kernels.machine import dtype_name


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
    """Decode prompts greedily with and without drafting and print where the outputs differ: the tokens, the
    text before them, and the logits and rounding that distinguish a near-tie from a bug.

    Args:
        prompts: file that `read_prompts` reads; `limit`: how many of it.
        dtype: as `load_target` takes it. In bf16 the shape of a forward decides near-ties; in fp32 outputs
            should not differ at all.
        tree: how drafts grow. None: the bundle's recommended tree.
        calibration: for `pct`, `timed` and `c2t`. None: the bundle's own.

    Returns:
        number of prompts whose outputs differ by more than a near-tie.

    Raises:
        UserError: prompts or bundle are unusable.
    """
    console = console or Console(highlight=False)
    chats = read_prompts(prompts, limit)
    loaded = load_bundle(bundle, target=target, dtype=dtype, calibration=calibration)
    if warning := loaded.warning(tree):
        console.print(warning, style="yellow", markup=False, soft_wrap=True)  # it may name paths
    tokenizer, differences = loaded.target.tokenizer, []
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
        differences.append(difference)
        shown = {
            name: repr(tokenizer.decode([token])) if token >= 0 else "the end"
            for name, token in (("expected", difference.expected), ("found", difference.found))
        }
        where = {"task": prompts, "prompt": chat.id, "method": "drafting"}
        before = tokenizer.decode(plain[: difference.position])[-40:]
        line = f"{describe_difference(asdict(difference) | shown | where)}; after {before!r}"
        console.print(escape(f"{line}: {'a near-tie' if difference.is_tie() else 'NO TIE'}"), soft_wrap=True)
    ties = sum(difference.is_tie() for difference in differences)
    console.print(
        f"{len(chats) - len(differences)} of {len(chats)} outputs are equal in "
        f"{dtype_name(loaded.target.dtype)}; {ties} differ from near-ties on, {len(differences) - ties} from "
        "elsewhere",
        soft_wrap=True,
    )
    return len(differences) - ties
