"""Evaluation: problems in, numbers with intervals out (docs/evaluation.md)."""

from tstar.evaluate.directory import is_evaluation, read_evaluation, read_summary, write_evaluation
from tstar.evaluate.estimates import Estimate, pass_at_k, ratio_estimates
from tstar.evaluate.evaluation import Kept, Progress, Scorer, evaluate, request_seed, requests_of
from tstar.evaluate.journal import evaluate_into
from tstar.evaluate.summary import Conditions, EvalSettings, Evaluation, Provenance, Summary, describe_policy
from tstar.evaluate.text import text_pieces, to_response

__all__ = [
    "Conditions",
    "Estimate",
    "EvalSettings",
    "Evaluation",
    "Kept",
    "Progress",
    "Provenance",
    "Scorer",
    "Summary",
    "describe_policy",
    "evaluate",
    "evaluate_into",
    "is_evaluation",
    "pass_at_k",
    "ratio_estimates",
    "read_evaluation",
    "read_summary",
    "request_seed",
    "requests_of",
    "text_pieces",
    "to_response",
    "write_evaluation",
]
