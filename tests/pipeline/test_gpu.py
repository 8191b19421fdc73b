"""Pipelines on GPUs, on a GPU that is not there (`tests/fake_gpu.py`): what ranks send and their trees are on
the CPU, all else is not, and the texts are those of the whole target."""

import pytest
import torch

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.pipeline.baselines import pp, slm, stpp
from drafttrain.pipeline.measure import draft_work, stage_work
from drafttrain.pipeline.member import own_device
from drafttrain.pipeline.part import load_shell
from drafttrain.pipeline.probe import probe, probe_ids
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.transport import Receive, Send, run_locally
from drafttrain.trees.eagle2 import Eagle2Policy
from tests.fake_gpu import GPU, fake_gpu, on_gpu
from tests.pipeline.local import GREEDY, SAMPLED, decode


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


def over_the_host(program):
    """A rank's program whose messages go through the host's memory, as those of processes."""
    answer = None
    while True:
        try:
            command = program.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(command, Send) and command.what is not None:
            assert not on_gpu(command.what.tokens) and not on_gpu(command.what.parents)
            if command.what.x is not None:
                command.what.x = command.what.x.cpu()
        answer = yield command
        assert not isinstance(command, Receive) or answer is None or not on_gpu(answer.x)


KINDS = {"edd": (pp, stpp, pipedec), "eagle": (stpp, pipedec), "causal_lm": (stpp, slm, pipedec)}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in KINDS.items() for mode in modes])
def test_texts(gpu, members, whole, folders, tiny_bundle, texts, prompts, kind, mode, alone):
    if kind == "edd":  # with what a rank loads of the target beside its blocks
        drafter = load_drafter(
            tiny_bundle, load_shell(str(folders["llama"]), torch.float, device=GPU), torch.float
        )
    else:
        model = str(folders["llama"]) if kind == "causal_lm" else None
        config = DrafterConfig(kind=kind, model=model, draft_vocab_size=None)
        drafter = new_drafter(whole("llama"), config, torch.arange(512)).eval().to(GPU)
    taps = [block % 4 for block in drafter.config.tapped_blocks]
    pipeline = members(
        "llama", (1, 2, 1), drafter, taps, alone=alone, policy=Eagle2Policy(3, 3, 8), device=GPU
    )
    assert all(member.device == GPU for member in pipeline)
    for best_first in (False, True) if mode is pipedec else (False,):
        for number, sampling in ((0, GREEDY), (2, SAMPLED)):

            def through(member, request):
                return over_the_host(mode(member, request))

            how = {"depth": 3, "layers": 2 if mode is pipedec else 1, "best_first": best_first}
            found = decode(through, pipeline, prompts[number], sampling, **how)
            assert found.tokens == texts("llama", number, sampling)


def test_the_probe(gpu, members, folders):
    ids = probe_ids(str(folders["llama"]))
    both = []
    for device in ("cpu", GPU):
        pipeline = members("llama", (2, 2), device=device)
        both.append(run_locally([over_the_host(probe(member, ids)) for member in pipeline])[-1].cpu())
    torch.testing.assert_close(*both)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    assert own_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert own_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, number in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert own_device("auto") == own_device("cuda") == torch.device("cuda", number)


def test_work_that_is_timed(gpu, members, folders):
    """Of a stage and of drafting: what the device has been given has ended by then."""
    shell = load_shell(str(folders["llama"]), torch.float, device=GPU)
    config = DrafterConfig(kind="causal_lm", model=str(folders["llama"]), draft_vocab_size=None)
    drafter = new_drafter(shell, config, torch.arange(512)).eval()
    for member in members("llama", (2, 2), drafter, device=GPU):
        for work in (stage_work(member, 64), stage_work(member, 64, judges=True), draft_work(member, 64)):
            if work is not None:
                work.begin()
                for size in (1, 4):
                    work.prepare(size)
                    work.run(size)
                    assert (
                        "pipeline/member.py" in gpu.waits[-1] or member.is_last
                    )  # which picks a token after it
