"""Muon and AdamW as one optimizer: who gets which weight, how long a step is, and states that come back."""

import copy

import pytest
import torch

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.training.optimizer import STEPS, A, B, C, MuonWithAdamW, orthogonalize


@pytest.fixture
def drafter(target) -> EddModel:
    config = DrafterConfig(tapped_blocks=[-2], draft_vocab_size=200)
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, config, 200))
    drafter.initialize_from(target, config, torch.arange(200))
    return drafter


def train_step(drafter: EddModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in drafter.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def optimizer_of(request):
    def optimizer(drafter: EddModel, lr: float = 0.01, weight_decay: float = 0.0) -> MuonWithAdamW:
        return MuonWithAdamW(drafter, lr, (0.9, 0.95), weight_decay, request.param)

    return optimizer


def test_each_weight_has_one_optimizer(drafter, optimizer_of):
    muon, adamw = optimizer_of(drafter).parts
    names = {id(p): name for name, p in drafter.named_parameters()}
    ours = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    others = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert ours == {f"layers.0.{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} <= others
    assert ours | others == {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert not ours & others


def test_a_matrix_step_is_orthogonal_and_as_long_as_adams(drafter, optimizer_of):
    """All singular values of the step are about equal, and its root mean square is 0.2 of the rate."""
    before = copy.deepcopy(drafter)
    train_step(drafter, optimizer_of(drafter), 0)
    step = (drafter.layers[0].gate_proj.weight - before.layers[0].gate_proj.weight).detach()  # [m, n]
    values = torch.linalg.svdvals(step)
    assert values.max() / values.min() < 2  # of the raw gradient: more than 5
    assert step.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=0.25)
    head = (drafter.lm_head.weight - before.lm_head.weight).detach()
    assert head.abs().max().item() == pytest.approx(0.01, rel=1e-3)  # Adam's first step


def test_schedulers_reach_both(drafter, optimizer_of):
    optimizer = optimizer_of(drafter)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train_step(drafter, optimizer, 0)
    scheduler.step()
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {0.005}


def test_states_come_back(drafter, optimizer_of):
    optimizer = optimizer_of(drafter)
    train_step(drafter, optimizer, 0)
    twin = copy.deepcopy(drafter)
    restored = optimizer_of(twin, lr=1.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(restored, lambda step: 1.0)  # groups are the restored ones
    assert scheduler.get_last_lr()[0] == 0.01
    for one, optimizer_ in ((drafter, optimizer), (twin, restored)):
        train_step(one, optimizer_, 1)
    for name, p in drafter.named_parameters():
        assert torch.equal(p, dict(twin.named_parameters())[name]), name


@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (24, 40), (200, 24), (24, 200), (24, 1), (1, 1)])
@pytest.mark.parametrize("smallest", [1.0, 1e-4, 0.0])
def test_orthogonalization_is_that_of_the_plain_steps(shape, smallest):
    """In float64, also for matrices with singular values near 0."""
    torch.manual_seed(0)
    u, values, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = values * torch.linspace(1, smallest, len(values))
    matrix = (u * values) @ v
    values = values / values.norm()
    for _ in range(STEPS):
        values = A * values + B * values**3 + C * values**5
    expected = (u * values) @ v
    torch.testing.assert_close(orthogonalize(matrix), expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(orthogonalize(matrix.float()), expected.float(), atol=2e-3, rtol=0)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_steps_in_fp32_are_those_of_torch(drafter):
    """Whose products are in bf16, so up to a percent of a step; with its momentum and weight decay."""
    twin = copy.deepcopy(drafter)
    start = copy.deepcopy(drafter)
    for one, bf16 in ((drafter, False), (twin, True)):
        optimizer = MuonWithAdamW(one, 0.01, (0.9, 0.95), 0.1, bf16)
        for seed in range(4):
            train_step(one, optimizer, seed)
    for (name, p), other, before in zip(drafter.named_parameters(), twin.parameters(), start.parameters()):
        moved = (other - before).norm()
        assert (p - other).norm() <= 0.02 * moved, name
    names = [name for name, p in drafter.named_parameters() if p.requires_grad]
    assert len(names) > 10
