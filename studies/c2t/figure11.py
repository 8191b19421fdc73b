"""Figure 11 of the C2T paper (Appendix E.1): where drafting spends its time.

python -m studies.c2t.figure11 --limit 6
"""

import time
from argparse import Namespace
from collections.abc import Sequence

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.kernels.machine import describe_machine
from drafttrain.trees import c2t as c2t_module
from drafttrain.trees.c2t import C2tPolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import write_json
from studies.arguments import run, start


def study(args: Namespace) -> None:
    """Time drafter, entropy, classifier and the rest, in ms per step, for C2T and EAGLE-2."""
    loaded = load_bundle(args.bundle, target=args.target, dtype="bfloat16", classifier=args.classifier)
    if loaded.classifier is None:
        raise UserError(f"{args.bundle}: has no classifier; train one, or name a folder with --classifier")
    ids = [p.token_ids(loaded.target.tokenizer) for p in spread(read_prompts(args.prompts), args.limit)]
    spent = {"entropy": 0.0, "classifier": 0.0}

    def clocked(name: str, function):
        def call(*args):
            started = time.perf_counter()
            found = function(*args)
            spent[name] += time.perf_counter() - started
            return found

        return call

    class Clocked:
        features = loaded.classifier.features
        predict = staticmethod(clocked("classifier", loaded.classifier.predict))

    rows, plain = {}, c2t_module.top_entropy
    c2t_module.top_entropy = clocked("entropy", plain)
    try:
        for name, proposer in (
            ("c2t:beta=0.1", TreeProposer(loaded.drafter, C2tPolicy(Clocked(), 0.1))),
            ("eagle2:top_k=4,max_depth=5,total=12", loaded.proposer("eagle2:top_k=4,max_depth=5,total=12")),
        ):
            decode_all(loaded.target, proposer, [ids[0]], 16)
            spent.update(entropy=0.0, classifier=0.0)
            runs = [decode_all(loaded.target, proposer, [prompt], args.new_tokens)[1] for prompt in ids]
            stats = sum(runs[1:], runs[0])
            parts = {"drafter": stats.draft_model_seconds, **spent}
            parts["rest"] = stats.draft_seconds - sum(parts.values())
            parts["verify"] = stats.verify_seconds
            rows[name] = {part: 1000 * seconds / stats.steps for part, seconds in parts.items()}
            rows[name]["verified"] = stats.verify_tokens / stats.steps
            rows[name]["accept_len"] = stats.accept_len
            print(name, {key: round(value, 3) for key, value in rows[name].items()})
    finally:
        c2t_module.top_entropy = plain
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    write_json(args.out / "drafting.json", rows)
    write_json(args.out / "drafting_machine.json", machine)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Figure 11; return the exit status."""
    return run(
        study,
        __doc__,
        argv,
        ("bundle", "target", "classifier", "prompts", "limit", "new_tokens"),
        out="runs/c2t",
    )


if __name__ == "__main__":
    start(main)
