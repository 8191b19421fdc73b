"""The numbers that decoding is judged by, on outputs small enough to count by hand."""

import threading
import time

import pytest
import torch

from drafttrain.inference.stats import DecodeStats, ModuleClock, in_repeated_grams


@pytest.mark.parametrize(
    "tokens, repeated",
    [
        ([], ""),
        ([1, 2, 3], "..."),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], ".....xxxx"),
        ([1, 2, 3, 4, 5, 1, 2, 3, 6], "........."),
        ([7, 7, 7, 7, 7, 7], ".xxxxx"),  # a loop: the second 4-gram is the first again
        ([1, 2, 1, 2, 1, 2, 1], "..xxxxx"),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 9], ".....xxxxx"),
    ],
)
def test_repeated_grams(tokens, repeated):
    assert "".join("x" if again else "." for again in in_repeated_grams(tokens)) == repeated


def test_repetition_and_the_rest():
    """Tokens 1..9 of the output come from steps of 4, 1, 3 and 1 tokens; the last four repeat."""
    stats = DecodeStats(prompts=1, new_tokens=10, steps=4)
    stats.count_repetition([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [4, 1, 3, 1])
    assert (stats.repeated_tokens, stats.fresh_tokens) == (4, 5)
    assert stats.fresh_steps == 2  # the steps of 4 and of 1; all of the other two is repetition
    assert stats.repetition == 4 / 9
    assert stats.accept_len == 9 / 4 and stats.accept_len_nonrepeated == 5 / 2


def test_a_step_is_shared_between_fresh_and_repeated_tokens():
    stats = DecodeStats()
    stats.count_repetition([0, 1, 2, 3, 4, 1, 2, 3, 4], [2, 6])  # fresh: both of the first, 2 of the second
    assert stats.fresh_steps == pytest.approx(1 + 2 / 6)
    assert stats.accept_len_nonrepeated == pytest.approx(4 / (1 + 2 / 6))


def test_steps_and_depths():
    stats = DecodeStats(prompts=1, new_tokens=1)
    stats.count_step(emitted=1, drafted=0, rejected=True, verified=5, depth=5)
    stats.count_step(emitted=3, drafted=2, rejected=True, verified=5, depth=5)
    stats.count_step(emitted=3, drafted=2, rejected=False, verified=2, depth=2)
    stats.count_step(emitted=1, drafted=1, rejected=False, verified=5, depth=5)  # a stop token was drafted
    stats.count_step(emitted=1, drafted=0, rejected=False, verified=0, depth=0)
    assert stats.offered == [4, 2, 1] and stats.granted == [3, 2, 0]
    assert stats.acceptance_by_depth == [0.75, 1.0, 0.0]
    assert stats.accept_len == 9 / 5 and stats.accept_rate == 9 / 17 and stats.verify_tokens == 17


def test_sum_is_the_statistics_of_both():
    parts = [DecodeStats(), DecodeStats(), DecodeStats()]
    for stats, drafted in ((parts[0], 1), (parts[1], 3), (parts[2], 1), (parts[2], 3)):
        stats.prompts += 1
        stats.count_step(emitted=drafted + 1, drafted=drafted, rejected=True, verified=4, depth=4)
        stats.count_repetition([5] * (drafted + 2), [drafted + 1])
        stats.seconds += 0.5 * drafted
    assert parts[0] + parts[1] == parts[1] + parts[0] == parts[2]
    assert parts[2] + DecodeStats() == parts[2]


@pytest.mark.parametrize("name", ["accept_len", "repetition", "accept_rate", "tokens_per_second"])
def test_empty_statistics_are_zero(name):
    assert getattr(DecodeStats(), name) == 0


def test_nothing_but_repetition_has_no_accept_len_outside_it():
    stats = DecodeStats()
    assert stats.accept_len_nonrepeated is None
    stats.count_repetition([1] * 9, [5, 3])
    assert stats.repetition == 1 and stats.accept_len_nonrepeated is None


def test_module_clock_counts_module_calls_alone():
    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    one, two = Slow(), Slow()
    clock = ModuleClock(torch.device("cpu"))
    started = time.perf_counter()
    with clock.on(one):
        one(1), two(1)
        other = threading.Thread(target=one, args=(1,))  # another decoder's, which has its own clock
        other.start(), other.join()
        time.sleep(0.02)
        one(1)
    one(1)
    elapsed = time.perf_counter() - started
    assert 0.04 <= clock.seconds <= elapsed - 0.08
    assert not one._forward_hooks and not one._forward_pre_hooks
