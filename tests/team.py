"""Starts the processes of jobs as torchrun would, on this machine.

    python team.py WORLD_SIZE OUT JOB... [-- ARGUMENTS...]

A JOB is a function below, whose result rank 0 writes to OUT/JOB, or `run`, which is `tstar ARGUMENTS`, or
`dieN`, which is the same, but rank 1 is killed in its Nth optimizer step. `JOB:2` plays nodes of two
processes; otherwise all are on one. Processes are forked from one, so that torch is imported once; they do
one job after the other. Exit codes go to stdout, by rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).resolve().parent))

from safetensors.torch import save_file  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from tiny_models import make_model  # noqa: E402
from trajectories import MASK, random_trajectory  # noqa: E402
from tstar.cli import main as tstar  # noqa: E402
from tstar.loss import TraceLossConfig  # noqa: E402
from tstar.optimizer import Optimizer, OptimizerConfig  # noqa: E402
from tstar.parallel import ALONE, Parallel, WorkQueue, joined  # noqa: E402
from tstar.parallel.checkpoint import load_sharded, save_sharded  # noqa: E402
from tstar.parallel.sharding import copy_into, shard, whole  # noqa: E402
from tstar.partition import PartitionRule  # noqa: E402
from tstar.trainer import NonFiniteLossError, Rollout, Trainer, TrainerConfig, ValueConfig  # noqa: E402

RULE = PartitionRule(4)


def rollouts(seed: int = 0) -> list[Rollout]:
    """Of very different lengths, so that shares are uneven; five prompts."""
    rng = np.random.default_rng(seed)
    out = []
    for group in range(5):
        prompt = rng.integers(0, MASK, size=6)
        for length in rng.integers(3, 60, size=4):
            partition = RULE.cut(6, int(length))
            response = random_trajectory(rng, partition, int(length), prompt_ids=prompt)
            out.append(Rollout(response, float(rng.random()), group, is_correct=False))
    return out


def is_spread(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def train(parallel: Parallel, **changes: object) -> dict[str, torch.Tensor]:
    """Two updates; all weights, the optimizer's state, losses and gradient norms."""
    model = make_model("sdar")
    config = TrainerConfig(optimizer=OptimizerConfig(1e-3), token_budget=160, **changes)  # type: ignore[arg-type]
    trainer = Trainer(model, config, base=make_model("sdar"), parallel=parallel)
    found = [trainer.update(rollouts(seed), RULE).summary() for seed in (0, 1)]
    numbers = [each[name] for each in found for name in ("loss", "grad_norm", "kl_base", "ratio_max")]
    state = {name: p.detach() for name, p in model.named_parameters()}
    return {**state, **trainer.state_dict(), "numbers": torch.tensor(numbers, dtype=torch.float64)}


def ordered(parallel: Parallel) -> dict[str, torch.Tensor]:
    return train(parallel)


def with_value(parallel: Parallel) -> dict[str, torch.Tensor]:
    """A value model, and several optimizer steps over fixed old log-probs."""
    return train(parallel, value=ValueConfig(OptimizerConfig(1e-3)), num_minibatches=2, num_passes=2)


def summed(parallel: Parallel) -> dict[str, torch.Tensor]:
    return train(parallel)


def sharded(parallel: Parallel) -> dict[str, torch.Tensor]:
    """The updates of `train`, and one that is refused between them; as shards where there are several."""
    model, base = make_model("sdar"), make_model("sdar")
    if not parallel.is_alone:
        parallel = replace(parallel, is_sharded=True)
        for each in (model, base):
            shard(each, parallel, "cpu", torch.float32)
    config = TrainerConfig(
        optimizer=OptimizerConfig(1e-3),
        objective=TraceLossConfig(importance_cap=np.inf),
        token_budget=160,
        recompute_activations=True,  # as the recipes of large models have it
    )
    trainer = Trainer(model, config, base=base.requires_grad_(False), parallel=parallel)
    found = [trainer.update(rollouts(), RULE).summary()]
    broken = rollouts()
    broken[7].trajectory.log_probs[:] = -np.inf
    with pytest.raises(NonFiniteLossError, match=r"rollouts\[7\]"):
        trainer.update(broken, RULE)
    assert all(is_spread(p) != parallel.is_alone for p in model.parameters())
    found.append(trainer.update(rollouts(1), RULE).summary())
    numbers = [each[name] for each in found for name in ("loss", "grad_norm", "kl_base", "ratio_max")]
    weights = {f"weights.{name}": p.detach() for name, p in model.named_parameters()}
    if not parallel.is_alone:
        copy = make_model("sdar")
        copy_into(copy, model)
        for name, parameter in copy.named_parameters():
            assert torch.equal(parameter.detach(), whole(weights[f"weights.{name}"]))
        OUT[0].joinpath(f"shards-{parallel.world_size}").mkdir() if parallel.is_main else None
        parallel.wait()
        save_sharded({**weights, **trainer.state_dict()}, OUT[0] / f"shards-{parallel.world_size}", parallel)
    state = {name: whole(value) for name, value in {**weights, **trainer.state_dict()}.items()}
    return {**state, "numbers": torch.tensor(numbers, dtype=torch.float64)}


def read_shards(parallel: Parallel) -> dict[str, torch.Tensor]:
    """What two processes wrote in `sharded`, as this many read it: each its part, or one all of it."""
    model = make_model("sdar")
    if not parallel.is_alone:
        parallel = replace(parallel, is_sharded=True)
        shard(model, parallel, "cpu", torch.float32)
    targets = {f"weights.{n}": torch.zeros_like(p.detach()) for n, p in model.named_parameters()}
    load_sharded(targets, OUT[0] / "shards-2", parallel)
    return {name: whole(value) for name, value in targets.items()}


def few(parallel: Parallel) -> dict[str, torch.Tensor]:
    """One pack: all processes but one have nothing to do."""
    model = make_model("sdar")
    trainer = Trainer(model, TrainerConfig(objective=TraceLossConfig()), parallel=parallel)
    trainer.update(rollouts()[:2], RULE)
    return {name: p.detach() for name, p in model.named_parameters()}


def failing(parallel: Parallel) -> dict[str, torch.Tensor]:
    """A loss that is no number, in the pack of one process: refused in all, nothing is trained."""
    model = make_model("sdar")
    given = rollouts()
    # Its log-prob at the sampler, which the trainer weighs by: infinitely less likely than at the trainer.
    broken = given[7].trajectory
    broken.log_probs[:] = -np.inf
    config = TrainerConfig(objective=TraceLossConfig(importance_cap=np.inf), token_budget=160)
    trainer = Trainer(model, config, parallel=parallel)
    with pytest.raises(NonFiniteLossError, match=r"rollouts\[7\]"):
        trainer.update(given, RULE)
    return {name: p.detach() for name, p in model.named_parameters()}


def queue(parallel: Parallel) -> dict[str, torch.Tensor]:
    """Every number once; the slow process gets fewer; a closed queue gives nothing."""
    mine, work = [], WorkQueue(parallel, "numbers", 20)
    parallel.wait()
    while (number := work.take()) is not None:
        mine.append(number)
        time.sleep(0.2 if parallel.rank == 0 else 0.01)
    everyone = parallel.gather(mine)
    assert sorted(number for each in everyone for number in each) == list(range(20))
    assert len(everyone[0]) < len(everyone[1])
    other = WorkQueue(parallel, "more", 20)
    if parallel.is_main:
        other.close()
    parallel.wait()
    assert other.take() is None
    assert other.is_closed
    return {"counts": torch.tensor([len(each) for each in everyone])}


OUT: list[Path] = []
"""Where jobs write what is not their result."""

JOBS: Mapping[str, Callable[[Parallel], dict[str, torch.Tensor]]] = {
    job.__name__: job for job in (ordered, with_value, summed, sharded, read_shards, few, failing, queue)
}


def work(rank: int, out: Path, job: str, arguments: list[str]) -> int:
    OUT[:] = [out]
    if job.startswith("die") and rank == 1:
        _die_in_step(int(job[3:]))
    if job.startswith(("run", "die")):
        return tstar(arguments)
    with joined("cpu", "sum" if job == "summed" else "ordered") as parallel:
        result = JOBS[job](parallel)
        if parallel.is_main:
            save_file({key: value.contiguous() for key, value in result.items()}, out / job)
    return 0


def alone(name: str) -> dict[str, torch.Tensor]:
    """What one process finds."""
    return JOBS[name](ALONE)


def _die_in_step(number: int) -> None:
    step, seen = Optimizer.step, 0

    def dying(self: Optimizer) -> object:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    Optimizer.step = dying  # type: ignore[method-assign,assignment]


def live(rank: int, world_size: int, ports: list[int], out: Path, jobs: list[str], rest: list[str]) -> int:
    """The life of one process."""
    for each, port in zip(jobs, ports, strict=True):
        job, _, size = each.partition(":")
        on_node = int(size or world_size)
        where = {"RANK": rank, "LOCAL_RANK": rank % on_node, "WORLD_SIZE": world_size}
        where |= {"LOCAL_WORLD_SIZE": on_node, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
        code = work(rank, out, job, rest)
        if code:
            return code
    return 0


def main(world_size: int, out: Path, jobs: list[str], rest: list[str]) -> None:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in jobs]
        ports = [probe.getsockname()[1] for probe in probes]
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = live(rank, world_size, ports, out, jobs, rest)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.write(f"exit codes {codes}\n")


if __name__ == "__main__":
    given = sys.argv[3:]
    end = given.index("--") if "--" in given else len(given)
    main(int(sys.argv[1]), Path(sys.argv[2]), given[:end], given[end + 1 :])
