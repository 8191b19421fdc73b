"""Blocks for each rank by measured times, against every other way to share them out."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys

import pytest

from drafttrain import SpeculativeDecoder
from drafttrain.pipeline import balance
from drafttrain.pipeline.balance import Speed, share_out
from drafttrain.pipeline.member import Layout

RANK = """
import sys
from drafttrain import PipelineConfig, PipelineDecoder
from drafttrain.pipeline import balance
from drafttrain.pipeline.config import StagesConfig

speeds, share_out = [], balance.share_out
def four_times_as_slow(before, layout, found):
    speeds.append(found)
    assert sum(share_out(before, layout, found)) == sum(before) == 4
    return share_out(before, layout, {0: balance.Speed(2.0, 0.1), 1: balance.Speed(0.5)})
balance.share_out = four_times_as_slow
config = PipelineConfig(target=sys.argv[1], drafter=sys.argv[2], dtype="float32", max_new_tokens=12,
                        stages=StagesConfig(ranks=2, threads=1, blocks="measured"))
with PipelineDecoder(config) as decoder:
    result = decoder.generate("Count to ten.")
    assert speeds[0].keys() == {0, 1} and all(one.block > 0 and one.beside > 0 for one in speeds[0].values())
    assert len(decoder.me.stage.part.blocks) == decoder.blocks[decoder.rank]
    if decoder.rank == 0:
        import json
        stage, drafter = decoder.me.stage.part.base.embed_tokens, decoder.me.drafter.embed_tokens
        assert stage.weight.data_ptr() == drafter.weight.data_ptr()  # one matrix, before as after
        print(json.dumps([decoder.blocks, result.token_ids]))
"""


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_is_faster(seed, monkeypatch):
    monkeypatch.setattr(balance, "WORTH", 1.0)
    draws = random.Random(seed)
    ranks = draws.randint(1, 4)
    layout = Layout(tuple((rank,) for rank in range(1, ranks + 1)))
    speeds = {rank: Speed(draws.uniform(1, 4), draws.choice([0, 3, 20])) for rank in layout.stages}
    n = draws.randint(ranks, 9)
    found = share_out([n - ranks + 1, *[1] * (ranks - 1)], layout, speeds)
    assert sum(found) == n and min(found) >= 1
    times = {
        cut: max(blocks * speeds[rank].block + speeds[rank].beside for rank, blocks in enumerate(cut, 1))
        for cut in itertools.product(range(1, n + 1), repeat=ranks)
        if sum(cut) == n
    }
    assert times[tuple(found)] == pytest.approx(min(times.values()))


def test_ranks_of_a_group_get_equally_many():
    layout = Layout(((0, 1), (2,)))
    equal = dict.fromkeys(range(3), Speed(1.0))
    assert share_out([1, 1, 7], layout, equal) == [3, 2, 4]
    assert share_out([1, 1, 7], layout, equal | {2: Speed(1.0, beside=5.0)}) == [4, 3, 2]


def test_nothing_is_loaded_again_for_little():
    layout, noisy = Layout(((0,), (1,))), {0: Speed(1.0), 1: Speed(1.03)}
    assert share_out([100, 100], layout, noisy) == [100, 100]
    assert share_out([150, 50], layout, noisy) == [101, 99]


def test_ranks_take_the_blocks_that_were_measured(tiny_target_folder, tiny_bundle):
    """Each computes what it has been given: the text is the whole target's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", RANK, str(tiny_target_folder), str(tiny_bundle)]
    ranks = [
        subprocess.Popen(words, env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    blocks, tokens = json.loads(outputs[0])
    decoder = SpeculativeDecoder.from_pretrained(
        str(tiny_bundle), target=str(tiny_target_folder), dtype="float32"
    )
    assert blocks == [1, 3] and tokens == decoder.autoregressive("Count to ten.", 12).token_ids
