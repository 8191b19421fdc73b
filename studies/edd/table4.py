"""Table 4 of the EDD paper (Appendix C.2): an answer with its iterations marked by slashes.

python -m studies.edd.table4 --new-tokens 48
"""

from argparse import Namespace
from collections.abc import Sequence

from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import NoProposer
from studies.arguments import run, start
from studies.edd.trees import TREES, load, write


def study(args: Namespace) -> None:
    """Decode one answer without drafts, with chains of 5 and with PCT; a slash follows each iteration."""
    loaded = load(args)
    prompt = read_prompts(args.prompts, 1)[0]
    ids = prompt.token_ids(loaded.target.tokenizer)
    proposers = {
        "without drafts": NoProposer(),
        "EDD, chains of 5": loaded.proposer("chain:length=5"),
        "EDD + PCT": loaded.proposer(TREES["PCT"]),
    }
    lines = [f"Prompt: {prompt.turns[0]}\n"]
    for name, proposer in proposers.items():
        steps = list(decode(loaded.target, proposer, [ids], args.new_tokens))
        pieces = [loaded.target.tokenizer.decode(step.tokens[0], skip_special_tokens=True) for step in steps]
        tokens = sum(len(step.tokens[0]) for step in steps)
        lines.append(
            f"{name} ({tokens} tokens in {len(steps)} iterations):\n\n    "
            + "/".join(pieces).replace("\n", "⏎")
            + "\n"
        )
    write(args.out / "sample.md", "\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Write Table 4; return the exit status."""
    return run(
        study, __doc__, argv, ("bundle", "target", "calibration", "prompts", "new_tokens"), out="runs/trees"
    )


if __name__ == "__main__":
    start(main)
