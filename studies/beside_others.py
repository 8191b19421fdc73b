"""Decode beside processes that take cores: with all threads, with as many as get a core, and with one.

    python -m studies.beside_others

Prints milliseconds per token, medians over prompts and repeats, of plain and drafted decoding beside 0, 1
and 2 processes that never wait. The three ways take turns.
"""

import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.kernels import team
from drafttrain.kernels.cores import Cores
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

TREE = "chain:length=3"
BUSY = (0, 1, 2)  # processes
FOREVER = (sys.executable, "-c", "print(flush=True)\nwhile True: pass")
WAYS: dict[str, Callable[[], Callable[[int], int]]] = {
    "all threads": lambda: lambda threads: threads,
    "as many as get a core": lambda: Cores().fit,
    "one thread": lambda: lambda threads: 1,
}


@contextmanager
def beside(processes: int) -> Iterator[None]:
    """Run other processes meanwhile, which have begun."""
    with ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(subprocess.Popen(FOREVER, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            process.stdout.readline()
        yield


def study(args: Namespace) -> None:
    bundle = load_bundle(args.bundle, args.target, args.dtype)
    target, proposers = bundle.target, {"plain": NoProposer(), TREE: bundle.proposer(TREE)}
    prompts = spread(read_prompts(args.prompts), args.limit)
    tokens = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    decode_all(target, NoProposer(), tokens[:1], 16)
    fit, ms = team.cores.fit, {}
    try:
        for processes in BUSY:
            with beside(processes):
                for _ in range(args.repeats):
                    for way, sizes in WAYS.items():
                        for name, proposer in proposers.items():
                            team.cores.fit = sizes()
                            found = [
                                decode_all(target, proposer, [one], args.new_tokens)[1] for one in tokens
                            ]
                            ms.setdefault((processes, name, way), []).extend(
                                1e3 / one.tokens_per_second for one in found
                            )
            for name in proposers:
                medians = {way: statistics.median(ms[processes, name, way]) for way in WAYS}
                print(
                    f"{processes} busy, {name}:",
                    ", ".join(f"{way} {one:.1f}" for way, one in medians.items()),
                    flush=True,
                )
    finally:
        team.cores.fit = fit
    rows = [
        {"busy": busy, "decoding": name, "way": way, "ms_per_token": each}
        for (busy, name, way), each in ms.items()
    ]
    write_json(
        args.out / "beside_others.json",
        {
            "rows": rows,
            "machine": describe_machine(bundle.target.device, bundle.target.dtype),
            "commit": git_commit(),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "prompts", "limit", "new_tokens", "dtype", "repeats")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/machine", limit=3)


if __name__ == "__main__":
    arguments.start(main)
