"""Measure what drafting and verifying cost on one and on all threads, alone and side by side: the table that
decides how SEED is scheduled on a CPU (`docs/results/seed_overlap.md`).

For each pair it prints, in ms and as medians: s_t(n), a forward of the target over n tokens; s_d(f), a step
of the drafter over a frontier of f nodes; and both at the same time in two Python threads, with one native
thread each. Everything is interleaved.
"""

import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from drafttrain.kernels.machine import describe_machine
from drafttrain.kernels.team import native_team
from drafttrain.target_lm.masks import causal
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.seed.pairs import DEFAULTS, Pair, load_pair

CONTEXT = 256  # tokens in the caches
NODES = (1, 3, 5, 8, 16, 29)  # tokens that the target verifies
FRONTIERS = (1, 2, 4, 8)  # nodes that the drafter expands in a step
ROUNDS, CALLS = 15, 5


def target_step(pair: Pair, n: int) -> Callable[[], None]:
    """Return a forward of the target over a chain of n tokens after the context, with its head."""
    target = pair.target
    cache = target.new_cache(1, CONTEXT + max(NODES))
    tokens = torch.arange(CONTEXT)[None] + 100  # [1, n]
    order = torch.arange(CONTEXT)  # [n]
    target.forward(cache, tokens, order, causal(CONTEXT, "cpu"))
    cache.commit(order[None], torch.tensor([CONTEXT]))

    def step() -> None:
        states = target.forward(cache, tokens[:, :n], order[:n], causal(n, "cpu"))
        target.head(states.final)

    return step


def drafter_step(pair: Pair, f: int) -> Callable[[], None]:
    """Return a step of the drafter over f children of the root after the context."""
    drafter, target = pair.drafter, pair.target
    state = drafter.new_state(1, CONTEXT + 64)
    tokens = torch.arange(CONTEXT)[None] + 100  # [1, n]
    width = len(target.tapped_blocks) * target.hidden_size
    drafter.update(state, tokens, torch.randn(1, CONTEXT, width), torch.tensor([CONTEXT]))
    tree = TokenTree.root_only(torch.tensor([200]))
    drafter.top(state, tree, torch.zeros(1, 1, dtype=torch.long), 8)
    parents, nodes = torch.zeros(1, f, dtype=torch.long), torch.arange(1, f + 1)[None]
    tree = tree.append(parents, 300 + nodes, torch.zeros(1, f))

    def step() -> None:
        drafter.top(state, tree, nodes, 8)

    return step


def seconds(work: Callable[[], None], threads: int) -> float:
    """Return the median seconds of calls one after the other with this many native threads, as in decoding:
    the first one wakes them."""
    with native_team(threads):
        times = []
        for _ in range(1 + CALLS):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def beside(works: Sequence[Callable[[], None]], least: float = 0.1) -> list[float]:
    """Return the seconds per call of each work, on one thread each, at the same time for `least` seconds."""
    found, end = [0.0] * len(works), time.perf_counter() + least

    def loop(i: int) -> None:
        times = []
        with torch.no_grad(), native_team(1):
            while not times or time.perf_counter() < end:
                started = time.perf_counter()
                works[i]()
                times.append(time.perf_counter() - started)
        found[i] = statistics.median(times)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@torch.no_grad()
def measure(pair: Pair, rounds: int = ROUNDS) -> dict:
    """Return medians in ms by work and threads."""
    works = {f"s_t({n})": target_step(pair, n) for n in NODES}
    works |= {f"s_d({f})": drafter_step(pair, f) for f in FRONTIERS}
    cores = torch.get_num_threads()
    raw: dict[str, dict[str, list[float]]] = {name: {} for name in works}
    partners = {name: works["s_d(1)"] if name.startswith("s_t") else works["s_t(5)"] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            for label, value in (
                (f"{cores} threads", seconds(work, cores)),
                ("1 thread", seconds(work, 1)),
                ("1 thread, beside the other", beside([work, partners[name]])[0]),
            ):
                raw[name].setdefault(label, []).append(1000 * value)
    return {
        name: {label: statistics.median(times) for label, times in found.items()}
        for name, found in raw.items()
    }


def study(args: Namespace) -> None:
    load = OtherLoad()
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    table = measure(pair)
    machine = {**describe_machine(torch.device("cpu")), "load": load.lap()}
    names = {"target": pair.target.name, "drafter": Path(args.bundle).name, "dtype": args.dtype}
    write_json(args.out / f"overlap_{pair.name}.json", {**names, "machine": machine, "ms": table})
    labels = list(next(iter(table.values())))
    print(f"| ms | {' | '.join(labels)} |\n|---|{'---|' * len(labels)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{row[label]:.2f}' for label in labels)} |")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
