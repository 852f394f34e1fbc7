"""AdamW and its company: the formula, the schedule, masters, clipping, exact resume."""

import math

import pytest
import torch
from torch import Tensor, nn

from tstar.errors import UserError
from tstar.optimizer import NonFiniteGradientError, Optimizer, OptimizerConfig, learning_rate_at


def make_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def backward(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator).to(next(net.parameters()).dtype)
    net(x).float().pow(2).mean().backward()


def run(net: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        backward(net, seed)
        optimizer.step()


def slow_adamw(net: nn.Module, config: OptimizerConfig, seeds: range) -> dict[str, Tensor]:
    """Loshchilov & Hutter's algorithm 2 in float64, one parameter at a time, and the clipping before it."""
    net = net.double()
    parameters = dict(net.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step, seed in enumerate(seeds, start=1):
        backward(net, seed)
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values() if p.grad is not None))
        scale = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        lr = learning_rate_at(config, step - 1)
        for name, p in parameters.items():
            assert p.grad is not None
            g = p.grad * scale
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * g**2
            m = first[name] / (1 - config.beta1**step)
            v = second[name] / (1 - config.beta2**step)
            decay = config.weight_decay if p.dim() > 1 else 0.0
            p.data = p.data - lr * (m / (v.sqrt() + config.eps) + decay * p.data)
            p.grad = None
    return {name: p.detach() for name, p in parameters.items()}


def test_equals_the_algorithm_step_by_step() -> None:
    config = OptimizerConfig(1e-2, "cosine", 3, 20, weight_decay=0.1, max_grad_norm=0.05)
    net = make_net()
    run(net, Optimizer(net.named_parameters(), config), range(12))
    for name, expected in slow_adamw(make_net(), config, range(12)).items():
        torch.testing.assert_close(net.get_parameter(name).double(), expected, rtol=1e-4, atol=1e-5)


def test_learning_rate_over_time() -> None:
    linear = OptimizerConfig(1.0, "linear", warmup_steps=4, num_steps=14, final_lr_ratio=0.1)
    rates = [learning_rate_at(linear, step) for step in (0, 3, 4, 9, 14, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])
    cosine = OptimizerConfig(1.0, "cosine", warmup_steps=0, num_steps=10)
    rates = [learning_rate_at(cosine, step) for step in (0, 5, 10)]
    assert rates == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate_at(OptimizerConfig(0.5, warmup_steps=2), 99) == 0.5


def test_the_norm_before_clipping_is_reported() -> None:
    net = make_net()
    optimizer = Optimizer(net.named_parameters(), OptimizerConfig(1e-3, max_grad_norm=1e-3))
    backward(net, 0)
    expected = math.sqrt(sum(float((p.grad**2).sum()) for p in net.parameters() if p.grad is not None))
    assert optimizer.step().grad_norm == pytest.approx(expected)
    assert all(p.grad is None for p in net.parameters())


def test_small_updates_reach_bf16_weights() -> None:
    """1e-5 is far below bf16's resolution at 1: without masters the weights would stand still."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimizerConfig(1e-5))
    for _ in range(1000):
        weight.float().sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach().float(), torch.full((4, 4), 0.99), rtol=0, atol=4e-3)


def test_bf16_gradients_add_up_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimizerConfig(max_grad_norm=None))
    for _ in range(1024):  # in bf16 the sum stops growing at 256
        weight.sum().backward()
    assert optimizer.step().grad_norm == pytest.approx(2 * 1024)


@pytest.mark.parametrize("order", [(0, 0, 1), (1, 0, 1)])
def test_a_large_bf16_gradient_adds_up_everywhere(order: tuple[int, ...]) -> None:
    """Larger than a portion, no multiple of one, laid out by rows or by columns."""
    weight = nn.Parameter(torch.zeros(600, 701, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimizerConfig(max_grad_norm=None))
    upstream = torch.randn(600, 701, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number in order:
        (weight * (upstream, upstream.T.contiguous().T)[number]).sum().backward()
    (trained,) = optimizer.trained
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, 3 * upstream.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact(dtype: torch.dtype) -> None:
    config = OptimizerConfig(1e-2, "linear", 2, 20, weight_decay=0.1)
    whole = make_net(dtype)
    run(whole, Optimizer(whole.named_parameters(), config), range(10))

    before = make_net(dtype)
    optimizer = Optimizer(before.named_parameters(), config)
    run(before, optimizer, range(6))
    weights = {name: p.detach().clone() for name, p in before.named_parameters()}
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}

    after = make_net(dtype)
    after.load_state_dict(weights)
    resumed = Optimizer(after.named_parameters(), config)
    resumed.load_state_dict(state)
    run(after, resumed, range(6, 10))
    for name, p in whole.named_parameters():
        assert torch.equal(p, after.get_parameter(name)), name


def test_a_state_of_another_model_is_refused() -> None:
    net = make_net()
    optimizer = Optimizer(net.named_parameters(), OptimizerConfig())
    run(net, optimizer, range(1))
    with pytest.raises(ValueError, match=r"'exp_avg\.0\.bias' has no parameter here"):
        Optimizer([("other", nn.Parameter(torch.ones(1)))], OptimizerConfig()).load_state_dict(
            optimizer.state_dict()
        )
    low = make_net(torch.bfloat16)
    with pytest.raises(ValueError, match=r"'master\.0\.bias' is missing"):
        Optimizer(low.named_parameters(), OptimizerConfig()).load_state_dict(optimizer.state_dict())


def test_a_gradient_that_is_not_finite_is_named() -> None:
    net = make_net()
    optimizer = Optimizer(net.named_parameters(), OptimizerConfig())
    backward(net, 0)
    assert net[2].weight.grad is not None
    net[2].weight.grad[1, 1] = float("nan")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(NonFiniteGradientError, match=r"2\.weight: 1 of 24 gradient values .* step 0"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    for p in net.parameters():
        p.grad = torch.full_like(p, 1e25)
    with pytest.raises(NonFiniteGradientError, match="norm overflows"):
        optimizer.step()


def test_frozen_parameters_stay() -> None:
    net = make_net()
    net[0].requires_grad_(False)
    frozen = net[0].weight.detach().clone()
    run(net, Optimizer(net.named_parameters(), OptimizerConfig(1e-2, weight_decay=1.0)), range(2))
    assert torch.equal(net[0].weight, frozen)
    with pytest.raises(ValueError, match="nothing to train"):
        Optimizer(net[0].named_parameters(), OptimizerConfig())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("learning_rate", {"learning_rate": 0.0}),
        ("num_steps", {"lr_schedule": "cosine"}),
        ("num_steps", {"lr_schedule": "linear", "num_steps": 5, "warmup_steps": 5}),
        ("max_grad_norm", {"max_grad_norm": -1.0}),
        ("beta2", {"beta2": 1.0}),
    ],
)
def test_impossible_settings_are_named(field: str, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"^{field}: "):
        OptimizerConfig(**change)  # type: ignore[arg-type]


def test_one_optimizer_after_another_trains_the_same_bf16_weights() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    first = Optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.1))
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    first.release()
    second = Optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.1))
    before = model.weight.detach().clone()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert second.step().grad_norm == pytest.approx(8**0.5)
    assert (model.weight < before).all()
