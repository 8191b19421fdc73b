"""Show examples of a corpus on the terminal, with trained text in color."""

import random
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafttrain.data.corpus import load_corpus
from drafttrain.data.encode import trained_runs

_TRAINED, _CONTEXT = "bold green", "dim"


def view_corpus(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    n: int = 3,
    seed: int = 0,
    split: str = "train",
    console: Console | None = None,
) -> None:
    """Print `n` examples of a split, drawn with `seed`.

    Raises:
        UserError: there is no corpus at `path`, or it was made with another tokenizer.
    """
    console = console or Console()
    examples = load_corpus(path, tokenizer)[0][split]
    console.print(Text.assemble(("trained", _TRAINED), " · ", ("context only", _CONTEXT)))
    for index in sorted(random.Random(seed).sample(range(len(examples)), min(n, len(examples)))):
        example = examples[index]
        ids, mask = example["input_ids"], example["loss_mask"]
        share = f"{len(ids)} tokens, {sum(mask)} trained ({100 * sum(mask) / len(ids):.0f} %)"
        console.rule(Text(f"{split}[{index}] {example['id']}: {share}"), align="left")
        text = Text()
        for run, trained in trained_runs(tokenizer, ids, mask):
            text.append(run, style=_TRAINED if trained else _CONTEXT)
        console.print(text, soft_wrap=True)
