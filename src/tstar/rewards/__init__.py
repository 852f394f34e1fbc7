"""Rewards: callables ``(problem, response) -> float``, their weighted sums, and processes to run them in."""

from tstar.rewards.response import Response
from tstar.rewards.scoring import FailedCall, Rewards, RewardSpec, Scores

__all__ = ["FailedCall", "Response", "RewardSpec", "Rewards", "Scores"]
