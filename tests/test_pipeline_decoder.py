"""`PipelineDecoder`: text in, text out, as torchrun's processes call it; here as the only rank."""

import gc
import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from drafttrain import PipelineConfig, PipelineDecoder, SamplingParams, SpeculativeDecoder
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.session import NOT_FINITE
from drafttrain.kernels.build import variant
from drafttrain.pipeline.config import LinkConfig, PaceConfig, StagesConfig
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Member
from drafttrain.pipeline_decoder import load_member
from drafttrain.run.pipeline import run_rank
from drafttrain.utils.errors import UserError

PROMPTS = ["Why is the sky blue?", "Count to ten."]


@pytest.fixture
def alone(monkeypatch):
    """The environment of a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def config(target, drafter=None, mode="pp", **keys) -> PipelineConfig:
    stages = StagesConfig(ranks=1, threads=1)
    own = {"dtype": "float32", "stages": stages, "max_new_tokens": 12, "timeout_s": 10.0}
    return PipelineConfig(target=str(target), drafter=drafter and str(drafter), mode=mode, **own | keys)


def test_texts_are_those_of_one_process(alone, tiny_target_folder, tiny_bundle):
    sampling = SamplingParams(temperature=0.8, seed=3)
    decoder = SpeculativeDecoder.from_pretrained(
        str(tiny_bundle), target=str(tiny_target_folder), dtype="float32"
    )
    with PipelineDecoder(config(tiny_target_folder, tiny_bundle, "pipedec")) as pipeline:
        many = pipeline.generate(PROMPTS)
        one = pipeline.generate(PROMPTS[1], max_new_tokens=5, sampling=sampling)
        assert pipeline.blocks == [4]
    for prompt, result in zip(PROMPTS, many, strict=True):
        plain = decoder.autoregressive(prompt, 12)
        assert (result.text, result.token_ids) == (plain.text, plain.token_ids)
        assert result.finish_reason == plain.finish_reason and result.seconds > 0
        assert result.timesteps == len(result.token_ids) - 1  # a single stage
    assert one.token_ids == decoder.autoregressive(PROMPTS[1], 5, sampling=sampling).token_ids


def test_mistakes_are_one_line(alone, tiny_target_folder, tiny_bundle, monkeypatch):
    with pytest.raises(UserError, match="drafter: must be set for mode pipedec, got null"):
        PipelineDecoder(config(tiny_target_folder, mode="pipedec"))
    threads = torch.get_num_threads()
    many = StagesConfig(ranks=1, threads=threads + 1)
    with pytest.raises(UserError, match="children: must be"):  # found once the threads are set
        PipelineDecoder(config(tiny_target_folder, tiny_bundle, "pipedec", children=100_000, stages=many))
    assert torch.get_num_threads() == threads
    with PipelineDecoder(config(tiny_target_folder)) as pipeline:
        with pytest.raises(
            UserError, match="prompt 0: prompt and new tokens must fit into the 512 positions"
        ):
            pipeline.generate("Why?", max_new_tokens=9999)
        with pytest.raises(UserError, match="prompt: must not be empty"):
            pipeline.generate("")
        monkeypatch.setattr(Member, "pick", lambda *args: NOT_FINITE)
        with pytest.raises(UserError, match="rank 0: .*: logits must be finite, got NaN"):
            pipeline.generate("Why?")


def test_positions_of_longrope_are_the_original_ones(alone, tiny_target_folder, tmp_path):
    """As of the whole target: beyond the original positions of longrope its text would depend on drafts."""
    folder = shutil.copytree(tiny_target_folder, tmp_path / "target")
    settings = json.loads((folder / "config.json").read_text())
    factors = [1.0] * (settings["hidden_size"] // settings["num_attention_heads"] // 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
    rope |= {"short_factor": factors, "long_factor": factors}
    (folder / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope}))
    with PipelineDecoder(config(folder)) as pipeline:
        with pytest.raises(UserError, match="must fit into the 128 positions"):
            pipeline.generate("Why?", max_new_tokens=128)


def test_more_children_than_the_drafter_has_tokens(alone, tiny_target_folder, tiny_bundle):
    with pytest.raises(UserError, match=r"children: must be <= \d+, the drafter's vocabulary, got 100000"):
        PipelineDecoder(config(tiny_target_folder, tiny_bundle, "pipedec", children=100_000))


def test_blocks_that_do_not_add_up(alone, tiny_target_folder):
    wrong = config(tiny_target_folder)
    wrong.stages.blocks = [3]
    with pytest.raises(UserError, match=r"stages.blocks: must add up to the 4 blocks of .*, got \[3\]"):
        PipelineDecoder(wrong)


def test_a_pace_that_a_stage_cannot_keep(alone, tiny_target_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "prompt": PROMPTS[0]}))
    paced = {"pace": PaceConfig(stage_ms=1e-6), "prompts": str(prompts), "out": str(tmp_path)}
    assert run_rank(config(tiny_target_folder, **paced)).startswith("mode pp, prompts 1")
    [line] = capsys.readouterr().err.splitlines()
    assert line == "drafttrain: pace: 100% of the work took longer; raise pace.stage_ms"
    assert json.loads((tmp_path / "summary.json").read_text())["late"] == 1.0


def test_a_small_lm_alone(alone, tiny_target_folder, tiny_bundle, monkeypatch):
    """Here the target drafts for itself, so its text is the target's."""
    with pytest.raises(UserError, match="drafter: must be a small LM for mode slm, got .*cannot write alone"):
        PipelineDecoder(config(tiny_target_folder, tiny_bundle, "slm"))
    with PipelineDecoder(config(tiny_target_folder)) as pipeline:
        plain = pipeline.generate(PROMPTS)
    with PipelineDecoder(config(tiny_target_folder, tiny_target_folder, "slm")) as pipeline:
        own = pipeline.generate(PROMPTS)
        expand = type(pipeline.me.drafter).expand
        monkeypatch.setattr(type(pipeline.me.drafter), "expand", lambda *args: expand(*args) * torch.nan)
        with pytest.raises(UserError, match="logits must be finite, got NaN"):
            pipeline.generate(PROMPTS[0])
    assert [(one.text, one.timesteps, one.hits) for one in own] == [
        (one.text, one.timesteps, 0) for one in plain
    ]


def test_a_busy_port_and_an_absent_rank(alone, tiny_target_folder, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        busy = r"MASTER_PORT: must be a free port, got \d+, which is in use; name another, or start again"
        with pytest.raises(UserError, match=busy):
            PipelineDecoder(config(tiny_target_folder, timeout_s=2.0))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = config(tiny_target_folder, timeout_s=2.0)
    two.stages.ranks = 2
    absent = r"rank 1: lost a .* join the others at 127.0.0.1:\d+ \((timed out|the connection was refused)\);"
    with pytest.raises(UserError, match=absent):
        PipelineDecoder(two)


def test_the_environment_has_to_name_the_rank(alone, tiny_target_folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE: must be 1, as the recipe's stages, got 2"):
        PipelineDecoder(config(tiny_target_folder))
    monkeypatch.delenv("RANK")
    with pytest.raises(
        UserError, match="RANK: must be a number beside the other, got nothing; start the program"
    ):
        PipelineDecoder(config(tiny_target_folder))


def test_hits_are_those_of_all_ranks(alone, tiny_target_folder, tiny_bundle, monkeypatch):
    """Of which the drafter's alone counts them: here another one has counted a hundred."""
    with PipelineDecoder(config(tiny_target_folder, tiny_bundle, "pipedec")) as pipeline:
        own = pipeline.generate(PROMPTS[0]).hits
        total = Ranks.total
        monkeypatch.setattr(Ranks, "total", lambda *args: [one + 100 for one in total(*args)])
        assert pipeline.generate(PROMPTS[0]).hits == own + 100


def test_after_a_mistake_the_next_one_can_be_made(alone, tiny_target_folder, tiny_bundle):
    with pytest.raises(UserError, match="children: must be <="):
        PipelineDecoder(config(tiny_target_folder, tiny_bundle, "pipedec", children=100_000))
    with PipelineDecoder(config(tiny_target_folder)) as pipeline:
        assert pipeline.generate(PROMPTS[0]).token_ids


@pytest.mark.skipif(variant() is None, reason="the native kernels need a C++ compiler and AVX2")
@pytest.mark.parametrize("is_lm", [False, True])
@pytest.mark.parametrize("rank", ["alone", "beside"])
def test_a_packed_drafter_maps_no_file(tiny_target_folder, tiny_bundle, tmp_path, is_lm, rank):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    target = shutil.copytree(tiny_target_folder, tmp_path / "target")  # which no other test has mapped
    drafter = shutil.copytree(tiny_target_folder if is_lm else tiny_bundle, tmp_path / "drafter")
    settings = config(target, drafter, "pipedec", drafter_rank=rank, children=4)
    member = load_member(settings, str(target), torch.float, 0, 64)
    gc.collect()
    assert member.drafter is not None and (member.stage is None) == (rank == "alone")
    assert str(tmp_path) not in maps.read_text()


def test_a_second_one_in_the_process_says_so(alone, tiny_target_folder):
    with PipelineDecoder(config(tiny_target_folder)):
        with pytest.raises(UserError, match="PipelineDecoder: must be the only one in its process"):
            PipelineDecoder(config(tiny_target_folder))


def test_a_slow_link_is_for_one_machine(alone, tiny_target_folder, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    two = config(tiny_target_folder, link=LinkConfig())
    two.stages.ranks = 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="link: must be null over several machines"):
        PipelineDecoder(two)


def test_plain_pipelines_load_no_drafter(alone, tiny_target_folder, tiny_target, tmp_path):
    """MEDUSA cannot keep a tree in flight."""
    medusa = new_drafter(tiny_target, DrafterConfig(kind="medusa", heads=2), torch.arange(200))
    medusa.save_pretrained(tmp_path / "medusa")
    with PipelineDecoder(config(tiny_target_folder, tmp_path / "medusa")) as pipeline:
        assert pipeline.me.drafter is None and pipeline.generate(PROMPTS[0]).token_ids
    with pytest.raises(UserError, match="drafter: must keep a tree in flight, got .*medusa"):
        PipelineDecoder(config(tiny_target_folder, tmp_path / "medusa", "pipedec"))
