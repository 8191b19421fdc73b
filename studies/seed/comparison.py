"""Compare methods by the trees of thoughts that they have grown: speed, its interval, what it depends on."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from drafttrain.trees.parse import parse_policy
from studies.seed.methods import EVALUATOR, Grown, Part

RESAMPLES = 2000
HALVINGS = 40  # of the range in which the acceptance is that reaches a goal


def of(found: Sequence[Grown], method: str, task: str | None = None) -> list[Grown]:
    """Return a method's trees, of a task or of all."""
    return [one for one in found if one.method == method and task in (None, one.task)]


def tasks_of(found: Sequence[Grown]) -> list[str]:
    """Return the tasks of trees."""
    return list(dict.fromkeys(one.task for one in found))


def total(grown: Sequence[Grown], component: str | None = None) -> Part:
    """Return sums over trees, of one component's calls or of all."""
    parts = (part for one in grown for name, part in one.parts.items() if component in (None, name))
    return sum(parts, Part())


def seconds_per_token(
    grown: Sequence[Grown], component: str | None = None, without_prompts: bool = False
) -> float:
    """Return the median over repeats of seconds per token over all problems.

    Args:
        component: whose calls count; None: whole trees.
        without_prompts: leave out the time in which prompts are encoded.
    """
    rates = []
    for repeat in sorted({one.repeat for one in grown}):
        own = [one for one in grown if one.repeat == repeat]
        seconds, tokens = 0.0, 0
        for one in own:
            parts = [one.parts[component]] if component else one.parts.values()
            whole = one.parts[component] if component else one
            seconds, tokens = seconds + whole.seconds, tokens + whole.tokens
            if without_prompts:
                seconds -= sum(part.prompt_seconds for part in parts)
        rates.append(seconds / tokens)
    return statistics.median(rates)


def interval(found: Sequence[Grown], value: Callable[[Sequence[Grown]], float]) -> list[float]:
    """Return 95 % of a value over samples of the problems of each task, drawn with replacement."""
    draws, by_task = random.Random(0), {}
    for one in found:
        by_task.setdefault(one.task, {}).setdefault(one.problem, []).append(one)

    def sample() -> list[Grown]:
        chosen = [draws.choices(list(problems.values()), k=len(problems)) for problems in by_task.values()]
        return [one for problems in chosen for problem in problems for one in problem]

    values = sorted(value(sample()) for _ in range(RESAMPLES))
    return [values[int(RESAMPLES * 0.025)], values[int(RESAMPLES * 0.975)]]


def ratio(found: Sequence[Grown], base: str, method: str) -> dict:
    """Return the speed of a method to another's as a mean over tasks, with its interval over problems, and
    the tasks' own ratios; the same for decoding alone, prompts left out; and the tokens per second of both,
    harmonic means over tasks."""
    own = [one for one in found if one.method in (base, method)]

    def by_task(sample: Sequence[Grown], without_prompts: bool = False) -> dict[str, float]:
        def seconds(name: str, task: str) -> float:
            return seconds_per_token(of(sample, name, task), without_prompts=without_prompts)

        return {task: seconds(base, task) / seconds(method, task) for task in tasks_of(sample)}

    def mean(sample: Sequence[Grown]) -> float:
        return statistics.fmean(by_task(sample).values())

    def decoding(sample: Sequence[Grown]) -> float:
        return statistics.fmean(by_task(sample, without_prompts=True).values())

    def rate(sample: Sequence[Grown], name: str) -> float:
        return 1 / statistics.fmean(seconds_per_token(of(sample, name, task)) for task in tasks_of(sample))

    return {
        "value": mean(own),
        "interval": interval(own, mean),
        "tasks": by_task(own),
        "decoding": {
            "value": decoding(own),
            "interval": interval(own, decoding),
            "tasks": by_task(own, without_prompts=True),
        },
        "tokens_per_second": {
            name: {"value": rate(own, name), "interval": interval(own, partial(rate, name=name))}
            for name in (base, method)
        },
    }


@dataclass(frozen=True)
class Costs:
    """The parts of a drafted method's time on a task.

    Attributes:
        base: seconds per token of what it is compared with.
        fixed, step: seconds that acceptance does not change (prompts, the search), and of a verification with
            its share of drafting.
        first, tokens: tokens that come from prompts, one for each call, and all.
        accept_len, alpha: tokens per verification; judged positions that had a draft accepted.
        depth: of the trees of drafts.
        evaluator_share, prompt_share: of its time, in the evaluator's calls and in encoding prompts.
    """

    base: float
    fixed: float
    step: float
    first: int
    tokens: int
    accept_len: float
    alpha: float
    depth: int
    evaluator_share: float
    prompt_share: float

    def speedup(self, alpha: float) -> float:
        """Predict the speed to the base's at another acceptance."""
        scale = (self.accept_len - 1) / max(drafts(self.alpha, self.depth), 1e-9)
        accept_len = 1 + scale * drafts(alpha, self.depth)
        steps = (self.tokens - self.first) / accept_len
        return self.base * self.tokens / (self.fixed + self.step * steps)


def drafts(alpha: float, depth: int) -> float:
    """Return the drafts that are accepted per verification if each position accepts with probability α."""
    return sum(alpha**n for n in range(1, depth + 1))


def traits(grown: Sequence[Grown]) -> dict[str, float]:
    """Return accept_len and α of trees, and the shares of their time in the evaluator's calls and in encoding
    prompts."""
    part, seconds = total(grown), sum(one.seconds for one in grown)
    return {
        "accept_len": (part.tokens - part.calls) / part.steps,
        "alpha": part.granted / max(part.offered, 1),
        "evaluator_share": total(grown, EVALUATOR).seconds / seconds,
        "prompt_share": part.prompt_seconds / seconds,
    }


def costs(found: Sequence[Grown], base: str, method: str, tree: str, task: str) -> Costs:
    """Return what the speed of a method on a task is made of.

    Args:
        tree: name of its trees of drafts.
    """
    own, plain = of(found, method, task), of(found, base, task)
    part, seconds = total(own), sum(one.seconds for one in own)
    stepping = part.seconds - part.prompt_seconds
    return Costs(
        base=sum(one.seconds for one in plain) / sum(one.tokens for one in plain),
        fixed=seconds - stepping,
        step=stepping / part.steps,
        first=part.calls,
        tokens=part.tokens,
        depth=parse_policy(tree).max_depth,
        **traits(own),
    )


def explain(found: Sequence[Grown], base: str, method: str, trees: Mapping[str, str], goal: float) -> dict:
    """Return by task accept_len, α and the shares of time of the evaluator and of prompts; and the α that
    would bring the mean speed of the tasks to the goal, None if even all drafts accepted would not.

    Args:
        trees: name of the trees of drafts by task.
    """
    parts = {task: costs(found, base, method, trees[task], task) for task in tasks_of(found)}

    def reaches(alpha: float) -> bool:
        return statistics.fmean(part.speedup(alpha) for part in parts.values()) >= goal

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    names = ("accept_len", "alpha", "evaluator_share", "prompt_share")
    by_task = {task: {name: getattr(part, name) for name in names} for task, part in parts.items()}
    return {"costs": by_task, "alpha_needed": high if reaches(1.0) else None}
