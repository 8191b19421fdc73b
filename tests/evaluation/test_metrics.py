"""Reported numbers against slow references that start from the raw tokens and seconds."""

import json
import random
import statistics

import numpy
import pytest

from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Measurement,
    MethodRun,
    accept_len_interval,
    cpu_contention,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.inference.stats import DecodeStats
from drafttrain.utils.quantiles import quartiles


def decoded(token_ids: list[int], sizes: list[int], drafts: int, seconds: float = 1.0) -> MethodRun:
    """A run of our loop with chains of `drafts` whose steps emitted `sizes` tokens."""
    stats = DecodeStats(prompts=1, new_tokens=1, seconds=seconds, prefill_seconds=seconds / 4)
    stats.draft_seconds, stats.verify_seconds = seconds / 8, seconds / 2
    for size in sizes:
        stats.count_step(size, size - 1, size <= drafts, drafts, drafts)
    stats.count_repetition(token_ids, sizes)
    return MethodRun(seconds, token_ids, stats)


def plain(token_ids: list[int], seconds: float) -> MethodRun:
    return decoded(token_ids, [1] * (len(token_ids) - 1), 0, seconds)


def measured(prompt, runs, repeat=0, contention=None) -> Measurement:
    return Measurement("task", prompt, 0, repeat, 7, runs, contention)


# slow references


def is_in_repeated_gram(tokens: list[int], i: int) -> bool:
    grams = [tokens[s : s + 4] for s in range(len(tokens) - 3)]
    return any(grams[s] in grams[:s] for s in range(max(0, i - 3), min(i, len(grams) - 1) + 1))


def reference(outputs: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    tokens = repeated = fresh = steps = 0
    fresh_steps = 0.0
    for ids, sizes in outputs:
        position = 1
        for size in sizes:
            again = [is_in_repeated_gram(ids, i) for i in range(position, position + size)]
            tokens, steps, repeated = tokens + size, steps + 1, repeated + sum(again)
            fresh += size - sum(again)
            fresh_steps += (size - sum(again)) / size
            position += size
    return {
        "accept_len": tokens / steps,
        "repetition": repeated / tokens,
        "accept_len_nonrepeated": fresh / fresh_steps if fresh_steps else None,
    }


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_the_slow_reference(seed):
    rng = random.Random(seed)
    outputs = []
    for _ in range(rng.randint(1, 4)):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 15))]
        alphabet = rng.choice([2, 3, 50])  # a small one repeats itself
        outputs.append(([rng.randrange(alphabet) for _ in range(1 + sum(sizes))], sizes))
    row = tabulate(
        [measured(str(i), {"chain": decoded(ids, sizes, 4)}) for i, (ids, sizes) in enumerate(outputs)]
    )["chain"]
    for name, value in reference(outputs).items():
        assert getattr(row, name) == pytest.approx(value), name
    every = [size for _, sizes in outputs for size in sizes]
    assert row.steps == len(every) and row.verify_tokens == 4 * len(every) and row.verify_per_step == 4
    assert row.new_tokens == sum(every) + len(outputs)
    assert row.accept_rate == pytest.approx(row.accept_len / 4)
    for depth, share in enumerate(row.acceptance_by_depth, 1):
        judged = [size for size in every if size >= depth]
        assert share == sum(size > depth for size in judged) / len(judged)


def test_autoregressive_decoding_has_accept_len_1():
    row = tabulate([measured("a", {AUTOREGRESSIVE: plain([5, 6, 7, 8, 9], 2.0)})])[AUTOREGRESSIVE]
    assert (row.accept_len, row.speedup, row.identical, row.tokens_per_second) == (1.0, 1.0, 1.0, 2.5)


def test_speedups_are_ratios_of_totals_of_medians():
    ids = list(range(1, 9))
    seconds = {  # prompt: (autoregressive, transformers, chain), three repeats each
        "a": ([3.0, 2.0, 40.0], [4.0, 4.0, 4.0], [1.0, 1.5, 1.25]),
        "b": ([6.0, 6.0, 6.0], [9.0, 8.0, 10.0], [5.0, 2.0, 4.0]),
    }
    measurements = [
        measured(
            prompt,
            {
                AUTOREGRESSIVE: plain(ids, base[repeat]),
                TRANSFORMERS: MethodRun(other[repeat], ids),
                "chain": decoded(ids, [4, 3], 4, own[repeat]),
            },
            repeat,
        )
        for repeat in range(3)
        for prompt, (base, other, own) in seconds.items()
    ]
    row = tabulate(measurements)["chain"]
    assert (row.prompts, row.repeats, row.new_tokens) == (2, 3, 16)
    assert row.seconds == 1.25 + 4.0 and row.tokens_per_second == 16 / 5.25
    assert row.speedup == pytest.approx((3 + 6) / 5.25)
    assert row.speedup_transformers == pytest.approx((4 + 9) / 5.25)
    by_repeat = [9 / 6, 8 / 3.5, 46 / 5.25]
    assert row.speedup_repeats == pytest.approx(list(numpy.percentile(by_repeat, [25, 50, 75])))
    assert row.speedup_turns == pytest.approx(list(numpy.percentile([3 / 1.25, 6 / 4], [25, 50, 75])))
    assert row.time_split == pytest.approx(
        {"prefill": 1 / 4, "draft": 1 / 8, "verify": 1 / 2, "other": 1 / 8}
    )
    assert tabulate(measurements)[TRANSFORMERS].accept_len is None


@pytest.mark.parametrize("n", range(1, 9))
def test_quartiles(n):
    values = [random.Random(n).random() for _ in range(n)]
    assert quartiles(values) == pytest.approx(list(numpy.percentile(values, [25, 50, 75])))
    assert quartiles(values)[1] == pytest.approx(statistics.median(values))


def flags(base: float, own: float, sizes=(4, 3), ids=range(1, 9), **more) -> list[str]:
    runs = {
        AUTOREGRESSIVE: plain(list(range(1, 9)), base),
        "chain": decoded(list(ids), list(sizes), 4, own),
    }
    return tabulate([measured("a", runs, **more)])["chain"].flags


def test_nothing_is_flagged_without_reason():
    assert flags(3.0, 1.0) == []  # accept_len 3.5


def test_impossible_speedups_are_flagged():
    assert "speedup above accept_len" in flags(3.6, 1.0)[0]


def test_outputs_of_one_token_bound_no_speedup():
    runs = {AUTOREGRESSIVE: plain([1], 1.1), "chain": decoded([1], [], 4, 1.0)}
    assert tabulate([measured("a", runs)])["chain"].flags == []


def test_slow_rows_are_flagged():
    assert "slower than autoregressive" in flags(0.9, 1.0)[0]


def test_busy_machines_are_flagged():
    assert "other processes took 0.6 cores" in flags(3.0, 1.0, contention=0.6)[0]


def test_noise_is_flagged():
    ids = list(range(1, 9))
    measurements = [
        measured("a", {AUTOREGRESSIVE: plain(ids, 3.0), "chain": decoded(ids, [4, 3], 4, own)}, repeat)
        for repeat, own in enumerate([1.0, 1.2, 1.4])
    ]
    assert "noisy" in tabulate(measurements)["chain"].flags[0]


@pytest.mark.parametrize("factor, flagged", [(0.98, False), (1.02, True)])
def test_noise_begins_at_15_percent(factor, flagged):
    ids = list(range(1, 9))
    width = 0.15 * factor  # of the speedups 3, 3 (1 - w), 3 (1 + w): quartiles at half of that
    measurements = [
        measured(
            "a", {AUTOREGRESSIVE: plain(ids, 3.0), "chain": decoded(ids, [4, 3], 4, 1 / (1 + shift))}, repeat
        )
        for repeat, shift in enumerate([0.0, -width, width])
    ]
    row = tabulate(measurements)["chain"]
    assert row.spread == pytest.approx(width) and bool(row.flags) is flagged


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speed_is_tokens_per_second_where_texts_differ_in_length(temperature):
    lengths = {AUTOREGRESSIVE: (10, 30), TRANSFORMERS: (20, 20), "chain": (8, 16)}
    seconds = {AUTOREGRESSIVE: (1.0, 3.0), TRANSFORMERS: (4.0, 4.0), "chain": (0.4, 2.0)}

    def run(method, turn):
        ids = list(range(lengths[method][turn]))
        if method == TRANSFORMERS:
            return MethodRun(seconds[method][turn], ids)
        return plain(ids, seconds[method][turn])

    measurements = []
    for turn in (0, 1):
        measurements.append(measured(str(turn), {method: run(method, turn) for method in lengths}))
        measurements[-1].temperature = temperature
    rows = tabulate(measurements)
    row = rows["chain"]
    assert row.speedup == pytest.approx((24 / 2.4) / (40 / 4.0))
    assert row.speedup == pytest.approx(row.tokens_per_second / rows[AUTOREGRESSIVE].tokens_per_second)
    assert row.speedup_transformers == pytest.approx((24 / 2.4) / (40 / 8.0))
    each = [(1.0 / 10) / (0.4 / 8), (3.0 / 30) / (2.0 / 16)]
    assert row.speedup_turns == pytest.approx(list(numpy.percentile(each, [25, 50, 75])))
    assert rows[TRANSFORMERS].identical == (None if temperature else 0) and row.identical == 0


def test_the_interval_draws_prompts_with_all_their_turns():
    rng = random.Random(0)
    measurements = []
    for prompt in range(12):
        for turn in range(1 + prompt % 2):
            runs = {}
            for method, rate in ((AUTOREGRESSIVE, 10), ("even", 20), ("uneven", rng.uniform(15, 25))):
                length = rng.randint(10, 100)
                runs[method] = MethodRun(length / rate, list(range(length)))
            measurements += [Measurement("task", str(prompt), turn, repeat, 7, runs) for repeat in range(2)]
    # as fast in every turn, however long the texts are
    assert ratio(measurements, AUTOREGRESSIVE, "even") == pytest.approx(2)
    assert ratio_spread(measurements, AUTOREGRESSIVE, "even") == pytest.approx([2, 2, 2])
    assert ratio_interval(measurements, AUTOREGRESSIVE, "even") == pytest.approx([2, 2])
    # and not so, drawn one by one
    turns = {str(prompt): [] for prompt in range(12)}
    for one in measurements:
        if one.repeat == 0:
            turns[one.prompt].append(one.runs)
    found = []
    for draws in numpy.random.default_rng(0).integers(12, size=(1000, 12)):
        seconds, tokens = ({m: 0.0 for m in (AUTOREGRESSIVE, "uneven")} for _ in range(2))
        for runs in (runs for i in draws for runs in turns[str(i)]):
            for method in seconds:
                seconds[method] += runs[method].seconds
                tokens[method] += len(runs[method].token_ids)
        speed = {method: tokens[method] / seconds[method] for method in seconds}
        found.append(speed["uneven"] / speed[AUTOREGRESSIVE])
    row = tabulate(measurements)["uneven"]
    assert row.speedup_interval == pytest.approx(numpy.quantile(found, [0.025, 0.975]).tolist())
    assert ratio_interval(measurements, AUTOREGRESSIVE, "uneven") == row.speedup_interval
    low, high = row.speedup_interval
    assert low < row.speedup < high
    assert ratio(measurements, AUTOREGRESSIVE, "uneven") == pytest.approx(row.speedup)


def test_the_interval_of_accept_len_draws_prompts_and_divides_sums():
    rng = random.Random(0)
    measurements = []
    for prompt in range(9):
        for turn in range(1 + prompt % 2):
            sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 20))]
            run = decoded(list(range(1 + sum(sizes))), sizes, 4)
            other = decoded([1, 2], [1], 4)  # of a second repeat, which counts nowhere
            measurements += [
                Measurement("task", str(prompt), turn, repeat, 7, {"chain": own})
                for repeat, own in enumerate((run, other))
            ]
    # and not so, drawn one by one
    found = []
    for draws in numpy.random.default_rng(0).integers(9, size=(1000, 9)):
        stats = [m.runs["chain"].stats for i in draws for m in measurements if m.prompt == str(i)][::2]
        found.append(sum(one.new_tokens - 1 for one in stats) / sum(one.steps for one in stats))
    row = tabulate(measurements)["chain"]
    assert row.accept_len_interval == pytest.approx(numpy.quantile(found, [0.025, 0.975]).tolist())
    low, high = row.accept_len_interval
    assert low < row.accept_len < high


def test_the_interval_of_accept_len_is_always_a_number():
    alone, none = decoded([1, 2, 3], [2], 4), decoded([1], [], 4)
    runs = {AUTOREGRESSIVE: plain([1, 2, 3], 1.0), TRANSFORMERS: MethodRun(1.0, [1, 2, 3]), "chain": alone}
    rows = tabulate([measured("a", runs), measured("b", runs)])
    assert rows[TRANSFORMERS].accept_len_interval is None
    assert rows[AUTOREGRESSIVE].accept_len_interval == [1, 1] and rows["chain"].accept_len_interval == [2, 2]
    assert accept_len_interval([measured("a", runs)], "chain") is None
    steps = [measured("a", {"chain": alone}), measured("b", {"chain": none})]  # some resamples have no step
    assert tabulate(steps)["chain"].accept_len_interval == [0, 2]


def test_peak_memory_is_that_of_the_largest_run():
    runs = [decoded([1, 2], [1], 1) for _ in range(3)]
    runs[0].peak_bytes, runs[2].peak_bytes = 5, 7
    assert tabulate([measured(str(i), {"x": run}) for i, run in enumerate(runs)])["x"].peak_bytes == 7
    assert tabulate([measured("a", {"x": runs[1]})])["x"].peak_bytes is None


def test_outputs_that_differ_are_counted():
    ids = list(range(1, 9))
    other = [*ids[:-1], 99]
    measurements = [
        measured(p, {AUTOREGRESSIVE: plain(ids, 1.0), "chain": decoded(out, [4, 3], 4)})
        for p, out in (("a", ids), ("b", other), ("c", ids), ("d", ids))
    ]
    assert tabulate(measurements)["chain"].identical == 0.75


def test_cpu_contention_is_a_mean_of_what_is_known():
    run = {"chain": decoded([1, 2], [1], 1)}
    assert (
        cpu_contention(
            [measured("a", run), measured("b", run, contention=0.5), measured("c", run, contention=0.1)]
        )
        == 0.3
    )
    assert cpu_contention([measured("a", run)]) is None


def test_measurements_survive_json():
    runs = {"chain": decoded([1, 2, 3, 4], [2, 1], 2), TRANSFORMERS: MethodRun(1.5, [1, 2])}
    before = measured("a", runs, 2, 0.25)
    assert Measurement.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_a_single_prompt_has_no_interval():
    runs = {AUTOREGRESSIVE: MethodRun(2.0, [1, 2]), "chain": MethodRun(1.0, [1, 2])}
    measurements = [Measurement("task", "0", turn, 0, 7, runs) for turn in range(2)]
    assert tabulate(measurements)["chain"].speedup == 2
    assert ratio_interval(measurements, AUTOREGRESSIVE, "chain") is None
