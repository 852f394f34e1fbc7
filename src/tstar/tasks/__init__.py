"""Built-in tasks: generated, verifiable, graded by levels, nothing to download.

Their sources are named beside those of `tstar.data`:

    chain:3   chain:2-4   chain:2,5@validation        levels, and a split (train unless named)
"""

import re
from typing import cast, get_args

from tstar.data import ProblemSet, ProblemSource, load_problems
from tstar.errors import UserError
from tstar.tasks.chain import ChainTask, Split

NUM_GENERATED = 500
"""Problems in the finite set of a generated source, unless a limit says otherwise."""

_CHAIN = re.compile(r"(\d+)(?:-(\d+)|((?:,\d+)+))?(?:@(\w+))?")


def open_problems(source: str) -> ProblemSource:
    """What a training run draws from: an endless supply of a generated task, else all problems there are."""
    return _open_chain(source) if source.startswith("chain:") else load_problems(source)


def open_problem_set(source: str, limit: int | None = None, needs_answer: bool = True) -> ProblemSet:
    """A finite set of problems, the same at every call: what an evaluation goes through."""
    if source.startswith("chain:"):
        return _open_chain(source).first(NUM_GENERATED if limit is None else limit)
    problems = load_problems(source, needs_answer)
    return problems if limit is None else problems.first(limit)


def _open_chain(source: str) -> ChainTask:
    matched = _CHAIN.fullmatch(source.removeprefix("chain:"))
    if matched is None:
        raise UserError(
            f"data: {source!r} names no levels of chain; write chain:3, chain:2-4 or chain:2,5@test"
        )
    first, last, others, split = matched.groups()
    listed = [first, *(others or "").split(",")[1:]]
    if split is not None and split not in get_args(Split):
        raise UserError(f"data: {source}: split {split!r} is unknown; use {', '.join(get_args(Split))}")
    levels = range(int(first), int(last) + 1) if last else [int(level) for level in listed]
    return ChainTask(tuple(levels), cast(Split, split or "train"))
