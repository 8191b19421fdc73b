"""A rank that is lost, or that cannot begin, ends all others with one line each."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from tests.run.ranks import COMMAND, Rank, recipe_words, started, started_ranks, wait_for

LONG = ["--max_new_tokens", "4", "--timeout_s", "120", "--pace.stage_ms", "50", "--limit", "null"]
START = 600  # seconds in which ranks begin to decode even on a busy machine
LOST = "drafttrain: rank {}: lost a connection while it waited to "


@pytest.fixture
def words(tiny_target_folder, tmp_path):
    """A minute's work, of which each prompt has its line."""
    return [*recipe_words(tiny_target_folder, tmp_path, ["Why?"] * 200), *LONG]


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def decoding(ranks: list[Rank], folder: Path) -> list[Rank]:
    """Wait until the ranks of a pipeline decode; return them."""
    wait_for(lambda: "p0: " in (folder / "0.out").read_text() or any(rank.ended() for rank in ranks), START)
    assert not any(rank.ended() for rank in ranks)
    return ranks


def reasons_of(ranks: list[Rank], lost: int, folder: Path, seconds: float) -> set[str]:
    """Return why the others end that have lost a rank: they do so in time, with one line each."""
    began, reasons = time.monotonic(), set()
    for number in {0, 1, 2} - {lost}:
        assert ranks[number].wait(timeout=60) == 1
        assert time.monotonic() - began < seconds
        [line] = lines(folder / f"{number}.err")
        assert line.startswith(LOST.format(number))
        assert "; see what the other ranks say, and start again" in line
        assert line.endswith(", with a larger timeout_s if they were at work") == ("timed out" in line)
        reasons.add(line.partition("(")[2].partition(")")[0])
    return reasons


@pytest.mark.parametrize(
    ("mode", "lost", "sent"),
    [
        *(("pp", lost, signal.SIGKILL) for lost in range(3)),
        ("pp", 2, signal.SIGINT),
        ("pipedec", 0, signal.SIGKILL),
        ("stpp", 2, signal.SIGKILL),
    ],
)
def test_a_lost_rank_ends_the_others(words, tiny_bundle, tmp_path, mode, lost, sent):
    """One line on every other rank; a rank that is interrupted ends, though it waits for a message."""
    words += ["--stages.ranks", "3", "--mode", mode]
    words += [] if mode == "pp" else ["--drafter", str(tiny_bundle)]
    with started_ranks([words] * 3, tmp_path) as ranks:
        decoding(ranks, tmp_path)[lost].send(sent)
        # a connection that is closed is noticed at once
        assert reasons_of(ranks, lost, tmp_path, 9) == {"the connection was closed"}
        assert ranks[lost].wait(timeout=2) == -sent


def test_a_stopped_rank_ends_the_others(tiny_target_folder, tiny_bundle, tmp_path):
    """In pipelines that wait at the same time, as it is noticed by the limit of time alone."""
    stopped = [("pp", 0), ("pp", 1), ("pp", 2), ("pipedec", 1), ("stpp", 2)]
    with ExitStack() as stack:
        pipelines = []
        for mode, lost in stopped:
            folder = tmp_path / f"{mode}-{lost}"
            folder.mkdir()
            words = [*recipe_words(tiny_target_folder, folder, ["Why?"] * 200), *LONG]
            words += ["--stages.ranks", "3", "--mode", mode, "--timeout_s", "10"]
            words += [] if mode == "pp" else ["--drafter", str(tiny_bundle)]
            ranks = stack.enter_context(started_ranks([words] * 3, folder))
            pipelines.append((decoding(ranks, folder), lost, folder))
        for ranks, lost, _ in pipelines:
            ranks[lost].send(signal.SIGSTOP)
        for ranks, lost, folder in pipelines:
            # who hears from neither may lose the one that has ended for the other's sake
            reasons = reasons_of(ranks, lost, folder, 15)
            assert "timed out" in reasons <= {"timed out", "the connection was closed"}


def children(pid: int) -> dict[int, int]:
    """The processes that a process has started as ranks and that have not ended, by rank."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            own, _, rest = file.read_text().partition(" (")
        except OSError:  # ended meanwhile
            continue
        state, parent, *_ = rest.rpartition(") ")[2].split()
        if int(parent) == pid and state != "Z":
            with suppress(OSError):
                environment = file.with_name("environ").read_bytes().split(b"\0")
                ranks = [int(one[5:]) for one in environment if one.startswith(b"RANK=")]
                found |= dict.fromkeys(ranks, int(own))
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
@pytest.mark.parametrize("lost", [0, 1, None])
def test_the_command_ends_with_all_its_ranks(words, tmp_path, lost):
    """A rank that is killed, and Ctrl-C in the process that has started the ranks."""
    with started([*COMMAND, *words], tmp_path) as command:
        wait_for(lambda: "p0: " in (tmp_path / "0.out").read_text() or command.poll() is not None, START)
        assert len(ranks := children(command.pid)) == 2
        if lost is None:
            os.kill(command.pid, signal.SIGINT)
        else:
            os.kill(ranks[lost], signal.SIGKILL)
        status, said = command.wait(timeout=20), lines(tmp_path / "0.err")
        if lost is None:
            assert status == 130 and said == ["drafttrain: interrupted; nothing is kept"]
        else:
            assert status == 1 and len(said) == 2 and any(map(is_from(1 - lost), said))
            killed = f"drafttrain: rank {lost}: was ended by signal 9, perhaps for lack of memory; "
            assert any(line.startswith(killed) for line in said)
        wait_for(lambda: not any(map(is_alive, ranks.values())), 5)


def is_from(rank: int) -> Callable[[str], bool]:
    """Return a test for the line of a rank that has lost another one."""
    return lambda line: line.startswith(LOST.format(rank))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_a_rank_that_is_killed_while_it_loads_is_named_at_once(words, tmp_path):
    """The first rank waits for it, for as long as `timeout_s`."""
    with started([*COMMAND, *words], tmp_path) as command:
        wait_for(lambda: len(children(command.pid)) == 2 or command.poll() is not None, START)
        os.kill(children(command.pid)[1], signal.SIGKILL)
        assert command.wait(timeout=60) == 1
        assert any("rank 1: was ended by signal 9, " in line for line in lines(tmp_path / "0.err"))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def ends_in_a_line(words, tmp_path, mistaken: int, problem: str) -> None:
    """Two ranks end with a line each: one for its mistake, the other one as it is left alone."""
    with started_ranks([words] * 2, tmp_path) as ranks:
        assert ranks[mistaken].wait(timeout=START) == 2 and ranks[1 - mistaken].wait(timeout=30) == 1
    [line], [other] = (lines(tmp_path / f"{rank}.err") for rank in (mistaken, 1 - mistaken))
    assert problem in line and other.startswith(LOST.format(1 - mistaken) + "meet the others")


def test_a_drafter_that_keeps_no_tree_in_flight(words, tiny_target, tmp_path):
    medusa = new_drafter(tiny_target, DrafterConfig(kind="medusa", heads=2), torch.arange(200))
    medusa.save_pretrained(tmp_path / "medusa")
    words += ["--drafter", str(tmp_path / "medusa"), "--mode", "stpp"]
    ends_in_a_line(words, tmp_path, 0, "drafttrain: drafter: must keep a tree in flight, got")


def test_a_shard_that_one_rank_misses(words, tiny_target, tmp_path):
    """The first rank needs none of its tensors."""
    folder = tmp_path / "target"
    tiny_target.model.save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    own = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    files = {name: "a.safetensors" if name.startswith(own) else "b.safetensors" for name in weights}
    first = {name: weights[name] for name in weights if files[name] == "a.safetensors"}
    save_file(first, folder / "a.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    words += ["--target", str(folder), "--stages.blocks", "[2, 2]"]
    ends_in_a_line(words, tmp_path, 1, f"{folder / 'b.safetensors'}")
