"""What a run is going to do, and about what it takes: for `--dry-run`, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tstar.config import RunConfig
from tstar.curriculum import Stage, WeightedPolicy
from tstar.evaluate import describe_policy
from tstar.model.checkpoint import DTYPES, load_config
from tstar.model.config import ModelConfig
from tstar.plan import DEVICES, Cluster, Memory, Timing, Workload, measure, plan_memory, plan_time
from tstar.plan.shapes import shape_named

ASSUMED_TPF = 2.0
"""Of policies that finalise as many tokens as the model is sure of."""


@dataclass(frozen=True)
class StageOutlook:
    """One stage."""

    stage: Stage
    policies: str
    """Of the rollouts, one a line."""
    memory: Memory | None
    timing: Timing | None
    """None: the model is not there to look at."""


@dataclass(frozen=True)
class Outlook:
    """All stages, and what the estimates assume."""

    stages: tuple[StageOutlook, ...]
    assumptions: str


def look_ahead(config: RunConfig) -> Outlook:
    """Stage by stage; estimates only if the model's config.json is there, or its name a published one's."""
    is_there = (config.model / "config.json").is_file()
    model = load_config(config.model) if is_there else shape_named(config.model.name)
    if model is None:
        assumptions = f"{config.model} is not there, so memory and time are not estimated"
        return Outlook(tuple(_stage(config, stage, None, None) for stage in config.stages), assumptions)
    # Who has not brought a published model here yet will not train it on this machine's CPU.
    cluster = _this_machine(config) if is_there else Cluster(DEVICES["h200"])
    stages = tuple(_stage(config, stage, model, cluster) for stage in config.stages)
    prompt, response = _lengths(config)
    shape = "" if is_there else f"{config.model} is not there, its published shape is known; "
    assumptions = (
        f"{shape}estimated for one {cluster.device.name}, with prompts of {prompt} and responses of "
        f"{response} tokens; tstar plan takes other lengths and devices"
    )
    return Outlook(stages, assumptions)


def workload_of(config: RunConfig, stage: Stage, model: ModelConfig) -> Workload:
    """A stage in the planner's terms."""
    prompt, response = _lengths(config)
    trainer, rollout, validation = config.trainer, config.rollout, config.validation
    num_evaluations = -(-stage.num_updates // validation.every) + 1
    num_evaluated = num_evaluations * (validation.num_problems or 500) * validation.num_samples
    return Workload(
        model=model,
        block_size=stage.block_size,
        tokens_per_forward=_tokens_per_forward(stage),
        num_problems=rollout.num_problems,
        num_samples=rollout.num_samples,
        num_updates=stage.num_updates,
        prompt_length=prompt,
        response_length=response,
        max_response_length=rollout.max_tokens,
        dtype="bfloat16" if config.precision == "bfloat16" else "float32",
        token_budget=trainer.token_budget,
        num_optimizer_steps=stage.num_passes * trainer.num_minibatches * trainer.num_passes,
        num_passes=trainer.num_passes,
        needs_old_forward=trainer.num_minibatches * trainer.num_passes > 1,
        merge_steps=trainer.merge_steps,
        has_base=trainer.objective.kl_reference == "base" and config.lora is None,
        has_value=trainer.value is not None,
        is_lora=config.lora is not None,
        recompute_activations=trainer.recompute_activations,
        max_requests=config.engine.max_requests,
        num_evaluated=num_evaluated * (1 + len(validation.extra_policies)) / stage.num_updates,
    )


# -- private -----------------------------------------------------------------------------------


def _stage(
    config: RunConfig, stage: Stage, model: ModelConfig | None, cluster: Cluster | None
) -> StageOutlook:
    memory = timing = None
    if model is not None and cluster is not None:
        workload = workload_of(config, stage, model)
        memory, timing = plan_memory(workload, cluster), plan_time(workload, cluster)
    return StageOutlook(stage, _describe(stage.policies), memory, timing)


def _describe(policies: Sequence[WeightedPolicy]) -> str:
    if len(policies) == 1:
        return describe_policy(policies[0])
    return "\n".join(f"{policy.weight:g} x {describe_policy(policy)}" for policy in policies)


def _lengths(config: RunConfig) -> tuple[int, int]:
    """Of prompts and responses: nobody knows before the first rollouts, so what math problems have."""
    if config.data.source.startswith("chain:"):
        return 12, max(1, config.rollout.max_tokens * 3 // 4)
    return 150, min(700, max(1, config.rollout.max_tokens // 2))


def _tokens_per_forward(stage: Stage) -> float:
    """The mean over the mixture."""
    found, weights = [], []
    for policy in stage.policies:
        if policy.steps_per_block is not None:
            tokens = stage.block_size / min(policy.steps_per_block, stage.block_size)
        elif policy.kind in ("dynamic", "entropy"):
            tokens = max(ASSUMED_TPF, float(policy.tokens_per_step or 1))
        else:
            tokens = float(policy.tokens_per_step or 1)
        found.append(min(tokens, float(stage.block_size)))
        weights.append(policy.weight)
    return sum(t * w for t, w in zip(found, weights, strict=True)) / sum(weights)


def _this_machine(config: RunConfig) -> Cluster:
    has_cuda = config.device != "cpu" and torch.cuda.is_available()
    if has_cuda:
        name = torch.cuda.get_device_name().lower()
        known = next((device for key, device in DEVICES.items() if key in name), None)
        if known is not None:
            return Cluster(known)
    device = torch.device("cuda" if has_cuda else "cpu")
    return Cluster(measure(device, DTYPES[config.precision or "float32"]))
