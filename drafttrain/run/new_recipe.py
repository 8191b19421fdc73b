"""`drafttrain new-recipe`: a short recipe with comments for one's own target and chats, which runs as it is.

It names no licence that its user did not name. Some of the chats' prompts are held out, to measure the
drafter on what it was not trained on.
"""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

from drafttrain.data.prompts import spread
from drafttrain.data.readers import read_conversations
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

KINDS = ("edd", "eagle", "medusa", "vdm")  # that need nothing but a target
MOST_HELD_OUT = 32  # prompts to measure on
SPACING = 10  # chats to one that may be held out
LENGTH = 1024  # tokens of a row, and of prompt and answer together
FEW = 5000  # conversations, below which a few passes are too little training
TEMPLATE = """\
# {{ kind | upper }} for {{ target }}, trained on {{ "given" if keep_answers else "its own" }} answers:
#   drafttrain run {{ file }}
# With --dry-run it prints what would run and what that takes. drafttrain run --keys explains all keys.
target:
  model: {{ target | value }}
{% if not keep_answers -%}
regenerate:                        # the target answers the chats' prompts itself: worth far more per
  sources:                         # token than the given answers, for which there is corpus.sources
{%- for path in chats %}
    - path: {{ path | value }}
{%- endfor %}
  max_new_tokens: {{ length // 2 }}
  max_prompt_tokens: {{ length // 2 }}
corpus:
  validation_fraction: 0.02        # held out, to see the loss on other text
{%- else -%}
corpus:
  sources:
{%- for path in chats %}
    - path: {{ path | value }}
{%- endfor %}
  validation_fraction: 0.02        # held out, to see the loss on other text
{%- endif %}
{%- if prompts %}
  exclude:                         # never train on what is measured
    - {{ prompts | value }}
{%- endif %}
training:
  optimizer: muon                  # adamw under DeepSpeed
  lr: 1.0e-3                       # 2e-3 was best for a target of 135M, with both
  epochs: {{ epochs }}
  # max_minutes: 120               # stops there with what was learned; the learning rate falls in time
  rows_per_batch: 4                # x row_length = tokens of a step; more need more memory
  row_length: {{ length }}
  schedule: cosine
  final_lr_ratio: 0.05
  adam_betas: [0.9, 0.95]
{%- if kind == "edd" %}
  block_length: [1, 6]             # tokens drafted behind one state in training
{%- endif %}
  # report_to: wandb               # with wandb_mode: online to upload
drafter:
  kind: {{ kind }}
  draft_vocab_size: 8192           # most frequent tokens of the corpus; what is missing is never drafted
# hidden_states:                   # stored once instead of computed in each epoch: faster, but takes disk
#   mode: offline
{%- if kind != "medusa" %}
calibrate:
  quick: true                      # what drafting costs on this machine, measured in seconds
{%- endif %}
{%- if prompts %}
evaluate:
  prompts:
    - {name: held out, path: {{ prompts | value }}}
  trees: [{{ tree }}]
{%- else %}
# evaluate:                        # name prompts that are not among the chats, to measure the drafter
#   prompts:
#     - {name: own, path: prompts.jsonl}
#   trees: [{{ tree }}]
{%- endif %}
{%- if base_model or license %}
export:
{%- else %}
# export:                          # for the model card; needed to publish with drafttrain push
{%- endif %}
{%- if base_model %}
  base_model: {{ base_model | value }}
{%- else %}
#   base_model: org/name           # Hub id of the target
{%- endif %}
{%- if license %}
  license: {{ license | value }}
{%- else %}
#   license: name                  # of the drafter's weights, as the Hub spells it: yours to choose
{%- endif %}
"""


def new_recipe(
    target: str,
    chats: Sequence[str],
    out: str | None = None,
    kind: str = "edd",
    keep_answers: bool = False,
    base_model: str | None = None,
    license: str | None = None,
) -> None:
    """Write a recipe, and the held-out prompts beside it, and print what to run next.

    Args:
        target: what `load_target` takes.
        chats: files, folders or archives of conversations.
        out: the file to write. None: named after the target.
        kind: one of `KINDS`.
        keep_answers: train on the answers in the chats instead of the target's own.
        base_model: Hub id of the target, for the model card.
        license: of the drafter's weights, for the model card.

    Raises:
        UserError: chats cannot be read, or a file to write exists.
    """
    file = Path(out or f"{Path(target).name.removesuffix('.gguf').lower()}.yaml")
    held_out = file.with_suffix(".prompts.jsonl")
    _refuse_existing(file, held_out)
    prompts, n = _read(chats)
    taken = spread(prompts, min(MOST_HELD_OUT, len(prompts) // SPACING))
    text = _render(
        target=target,
        chats=chats,
        file=shlex.quote(str(file)),
        kind=kind,
        length=min(LENGTH, _positions(target)),
        keep_answers=keep_answers or not prompts,  # documents have nothing to answer
        prompts=str(held_out) if taken else None,
        epochs=3 if n >= FEW else 10,
        tree="chain:length=3" if kind == "medusa" else "timed",
        base_model=base_model,
        license=license,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    print(f"{file}: for {n} conversations")
    if taken:
        rows = (
            json.dumps({"id": str(i), "prompt": prompt}, ensure_ascii=False) for i, prompt in enumerate(taken)
        )
        held_out.write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{held_out}: {len(taken)} of their prompts, to measure on")
    file.write_text(text, encoding="utf-8")
    print(f"next:\n  drafttrain run {shlex.quote(str(file))} --dry-run")


def _refuse_existing(file: Path, held_out: Path) -> None:
    for path in (file, held_out):
        if path.exists():
            raise UserError(f"--out: must name a new file, got {file}; {path} exists")


def _read(paths: Sequence[str]) -> tuple[list[str], int]:
    """First user turns, each once, and the number of conversations."""
    prompts, n = {}, 0
    for path in paths:
        for conversation in read_conversations(path):
            n += 1
            users = [message.content for message in conversation.messages if message.role == "user"]
            if users and users[0].strip():
                prompts[users[0]] = None
    return list(prompts), n


def _positions(target: str) -> float:
    """Positions of a target whose folder is here; infinity for others."""
    config = Path(target) / "config.json"
    known = read_json(config) if config.is_file() else {}
    return known.get("max_position_embeddings") or math.inf


def _render(**values: Any) -> str:
    environment = Environment(keep_trailing_newline=True)
    environment.filters["value"] = lambda value: yaml.safe_dump([value], width=math.inf).strip()[2:]
    return environment.from_string(TEMPLATE).render(values)
