"""Values that no option of the command line should crash at, for every option of every command."""

from collections.abc import Iterator

from drafttrain.run import cli
from tests.hostile.environments import SAME
from tests.hostile.runner import Case

VALUES = ("", "-1", "0", "nan", "1e400", "9" * 30, "x", "a\nb", "../x", "/dev/null", "é日")
WRITTEN = ("--out", "--trace", "--png", "--trees")  # whose values are places to write to, or many things
ENDLESS = ("--repeats", "--max-new-tokens", "--minutes", "--self-prompts")  # as large as one waits


def options(commands: dict[str, tuple[str, ...]]) -> Iterator[Case]:
    """Yield the cases.

    Args:
        commands: words of command lines that are right, to which an option is added.
    """
    seen = set()
    for words in commands.values():
        actions = cli._parser(words[0], cli.COMMANDS[words[0]])._option_string_actions
        for option in (option for option, action in actions.items() if action.nargs != 0):
            if option in WRITTEN or (words[0], option) in seen:
                continue
            seen.add((words[0], option))
            for value in VALUES:
                if value != VALUES[5] or option not in ENDLESS:
                    yield Case(words[0], f"{option} {value!r:.12}", SAME, (*words, f"{option}={value}"))
