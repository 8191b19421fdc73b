"""Compare what the head rows of new draft tokens can start from, before any training (`training.init_from`).

    drafttrain run recipes/smollm2-edd-anchored.yaml --until collect
    python -m studies.edd.grown_vocabulary

The drafter that the recipe starts from gets its 16,384 draft tokens. Rows of new ones are the target's; the
target's moved by the linear map that fits how training has moved the others
(`drafttrain/training/continued.py`); or the mean of the others. Printed is the KL on held-out text, over each
drafter's own tokens, with blocks of 5.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.vocabulary import count_trained_tokens
from drafttrain.run.recipe import load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.run.workflow import Workflow
from drafttrain.target_lm.loading import load_target
from drafttrain.training.continued import resized_vocabulary, set_vocabulary
from drafttrain.training.packing import PackedRows
from drafttrain.training.train import load_corpus, open_store
from drafttrain.training.validation import Validation
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

RECIPE = "recipes/smollm2-edd-anchored.yaml"


def study(args: Namespace) -> None:
    recipe = load_recipe(RECIPE)
    config, workflow = replace(recipe.training, bf16=True), Workflow(recipe, STAGES)
    target = load_target(recipe.target.model, dtype="bfloat16", device="cpu")
    load_drafter(config.init_from, target)  # taps the target as the store has it
    splits, _ = load_corpus(workflow.folder("corpus"), target.tokenizer)
    store = open_store(workflow.folder("collect"), "validation", target, splits["validation"])
    validation = Validation(config, target, PackedRows(splits["validation"], config.row_length, 0, store))
    counts, rows = count_trained_tokens(splits["train"], target.vocab_size), {}
    for name in ("not grown", "target's rows", "moved rows", "mean row"):
        drafter = load_drafter(config.init_from, target, dtype=torch.float32)
        known, trained = drafter.draft_to_target.clone(), drafter.lm_head.weight.detach().clone()
        if name != "not grown":
            size = config.init_draft_vocab_size
            ids = resized_vocabulary(counts, size, known.tolist(), target.eos_token_ids)
            set_vocabulary(drafter, target, ids)
            is_new = ~torch.isin(ids, known)  # [D]
            with torch.no_grad():
                if name == "target's rows":
                    drafter.lm_head.weight[is_new] = target.lm_head.weight[ids[is_new]].float()
                elif name == "mean row":
                    drafter.lm_head.weight[is_new] = trained.mean(0)
        validation._lost_mass = None  # of another vocabulary
        rows[name] = validation.held_out(drafter)
        loss, agreement = rows[name]["loss"], rows[name]["top1_agreement"]
        print(f"{name}: KL {loss:.3f}, agreement {agreement:.3f}", flush=True)
    write_json(args.out / "grown_vocabulary.json", {"rows": rows, "commit": git_commit()})


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, (), "docs/results/raw/anchored")


if __name__ == "__main__":
    arguments.start(main)
