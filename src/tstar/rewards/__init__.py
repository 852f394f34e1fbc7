"""Rewards: callables ``(problem, response) -> float``, their weighted sums, and processes to run them in."""

from tstar.rewards.response import Response
from tstar.rewards.scoring import FailedCall, Rewards, RewardSpec, Scores, default_reward

__all__ = ["FailedCall", "Response", "RewardSpec", "Rewards", "Scores", "default_reward"]
