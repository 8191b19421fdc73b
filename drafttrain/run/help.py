"""The overview of all commands, and messages for unknown and former ones."""

from collections.abc import Collection, Mapping

from drafttrain.utils.errors import did_you_mean

REMOVED = {  # former commands, and what replaces them
    "build-corpus": "corpus RECIPE",
    "view-corpus": "corpus DIR --view N",
    "self-prompts": "regenerate --self-prompts N --target MODEL --out FILE",
    "dump-trees": "c2t BUNDLE --prompts FILE --trees DIR",
    "train-classifier": "c2t --trees DIR --out DIR",
    "tune-self-draft": "calibrate --target MODEL --ngrams DIR --prompts FILE",
    "compare": "benchmark --table texts --method BUNDLE --task FILE",
    "sweep": "benchmark --table sweep --method BUNDLE --trees TREE ... --task FILE --out DIR",
    "evaluate": "benchmark RECIPE",
    "diagnose": "benchmark --table diagnosis --method BUNDLE --task FILE",
    "trace": "report --bundle BUNDLE --prompt TEXT --trace FILE",
    "card": "export BUNDLE --to card",
    "export-to": "export BUNDLE --to FORMAT --out DIR",
    "validate": "export DIR --check FORMAT",
    "import-from": "export DIR --from FORMAT --out DIR",
}


def overview(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return all commands in the order of work, on one screen, from their docstrings by group and name."""
    lines = ["usage: drafttrain COMMAND [options]", ""]
    lines += ["Trains drafters for speculative decoding and measures them."]
    for group, members in groups.items():
        texts = {name: text.rstrip(".") for name, text in members.items()}
        lines += ["", f"{group}:"]
        lines += [f"  {name:<14} {text[0].lower()}{text[1:]}" for name, text in texts.items()]
    return "\n".join([*lines, "", "drafttrain COMMAND --help lists its options."])


def unknown(name: str | None, commands: Collection[str]) -> str:
    """Return the error message for a word that is no command, or no longer one."""
    if name in REMOVED:
        return f"{name}: is now drafttrain {REMOVED[name]}"
    hint = did_you_mean(name or "", commands, "see drafttrain --help")
    return f"COMMAND: must be one of {len(commands)}, got {name or 'none'}; {hint}"
