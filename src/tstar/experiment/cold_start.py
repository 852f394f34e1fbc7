"""The cold start of a stage: SFT (Eq. 2) at the new block size, on the policy's own correct rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tstar.curriculum import ColdStart
from tstar.experiment.policy import Policy
from tstar.optimizer import Optimizer, OptimizerConfig
from tstar.partition import PartitionRule
from tstar.sft.gradient import batch_loss, draw_sequences, examples_of_step
from tstar.sft.objective import BlockDiffusion, Example
from tstar.trainer import Rollout


@dataclass(frozen=True)
class ColdStartReport:
    """What a cold start learnt from, and how well."""

    num_responses: int
    num_correct: int
    first_loss: float
    last_loss: float


def learn_from(
    policy: Policy,
    cold_start: ColdStart,
    rollouts: Sequence[Rollout],
    rule: PartitionRule,
    seed: int,
    check_interrupt: Callable[[], None],
) -> ColdStartReport:
    """Train the policy on the correct ones; if interrupted, its weights are what they were.

    Finished and correct: a response that ran out of tokens has no end to learn.
    """
    kept = [r.trajectory for r in rollouts if r.is_correct and r.trajectory.finish_reason == "stop"]
    if not kept:
        return ColdStartReport(len(rollouts), 0, float("nan"), float("nan"))
    examples = [Example(t.prompt_ids, t.response_ids[: t.stop_length]) for t in kept]
    before = policy.trained_weights()
    policy.trainer.optimizer.release()
    try:
        with policy.doing_alike():
            losses = list(_train(policy, cold_start, examples, rule, seed, check_interrupt))
    except BaseException:
        policy.put_weights(before)
        policy.restart_optimizer("everything")
        raise
    return ColdStartReport(len(rollouts), len(kept), losses[0], losses[-1])


def _train(
    policy: Policy,
    cold_start: ColdStart,
    examples: Sequence[Example],
    rule: PartitionRule,
    seed: int,
    check_interrupt: Callable[[], None],
) -> list[float]:
    model, losses = policy.model, []
    assert model.config.mask_token_id is not None
    objective = BlockDiffusion(
        mask_token_id=model.config.mask_token_id,
        eos_token_id=int(policy.tokenizer.eos_token_id),
        rules=(rule,),
        weighting="constant",
    )
    config = OptimizerConfig(
        learning_rate=cold_start.learning_rate,
        lr_schedule="cosine",
        warmup_steps=cold_start.warmup_steps,
        num_steps=cold_start.num_steps,
    )
    optimizer = Optimizer(model.named_parameters(), config)
    try:
        for step in range(cold_start.num_steps):
            check_interrupt()
            members = examples_of_step(len(examples), cold_start.batch_size, seed, step)
            sequences = draw_sequences(objective, [examples[i] for i in members], (seed, step))
            losses.append(batch_loss(model, objective, sequences, policy.trainer.config.token_budget).loss)
            optimizer.step()
    finally:
        optimizer.release()
    return losses
