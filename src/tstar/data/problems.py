"""Problems, sets of them, and how a question becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from tstar.errors import UserError

if TYPE_CHECKING:
    import transformers  # slow to import: at run time only the functions that need it do


@dataclass(frozen=True)
class Problem:
    """One question with its verifiable answer."""

    question: str
    answer: str
    """The gold answer alone, without the way to it."""
    level: int | None = None
    """How hard, in the source's own numbers."""
    id: str = ""
    """Unique within its source."""
    solution: str | None = None
    """A whole correct response, where the source has one: what SFT learns from."""
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    """What else the source says of it (subject, ...)."""


# -- prompts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptTemplate:
    """How a question becomes a prompt."""

    text: str
    """The user's message, or the whole prompt of a raw template; {question} is the question's place."""
    is_chat: bool = True
    """Through the tokenizer's chat template; False: the text as it stands."""
    system: str | None = None
    """The system message before it."""

    def __post_init__(self) -> None:
        if "{question}" not in self.text:
            raise UserError(
                f"prompt template: {self.text[:60]!r} has no {{question}}; write it where it goes"
            )
        if self.system is not None and not self.is_chat:
            raise UserError("prompt template: a raw template has no system message; write it into the text")

    def render(self, tokenizer: transformers.PreTrainedTokenizerBase, question: str) -> list[int]:
        """The prompt's token ids."""
        from tstar.model.tokenizer import render_chat

        text = self.text.replace("{question}", question)
        if not self.is_chat:
            ids: list[int] = tokenizer(text).input_ids
            return ids
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return render_chat(tokenizer, [*system, {"role": "user", "content": text}])


MATH_PROMPT = PromptTemplate(
    "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
)
"""The paper's instruction."""
CHAT_PROMPT = PromptTemplate("{question}")
"""The question as the user's message."""
RAW_PROMPT = PromptTemplate("{question}", is_chat=False)
"""The question and nothing else."""
PROMPTS: Mapping[str, PromptTemplate] = MappingProxyType(
    {"math": MATH_PROMPT, "chat": CHAT_PROMPT, "raw": RAW_PROMPT}
)


def prompt_template(text: str) -> PromptTemplate:
    """A template of `PROMPTS` by its name, or a user's message of one's own with {question} in it."""
    if text in PROMPTS:
        return PROMPTS[text]
    if "{question}" not in text:
        raise UserError(
            f"prompt: {text[:60]!r} is unknown; use {', '.join(PROMPTS)}, or a text with {{question}} in it"
        )
    return PromptTemplate(text)


# -- sets of problems --------------------------------------------------------------------------


@runtime_checkable
class ProblemSource(Protocol):
    """Where a training run gets its problems from."""

    @property
    def prompt(self) -> PromptTemplate:
        """The template that suits these problems."""

    def draw(self, seed: int, update_step: int, count: int) -> list[Problem]:
        """The problems of one update: a pure function, so a resumed run needs no cursor."""


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one finite source."""

    name: str
    problems: tuple[Problem, ...]
    num_without_answer: int = 0
    """Rows of the source that were left out because their gold answer is empty."""
    prompt: PromptTemplate = MATH_PROMPT

    def __len__(self) -> int:
        return len(self.problems)

    def draw(self, seed: int, update_step: int, count: int) -> list[Problem]:
        """`count` different problems, as the data's order under (seed, pass) has them.

        A pass has as many updates as the data fills; the remainder sits out, other problems each pass. So no
        problem comes twice in a pass, and none twice in an update.
        """
        updates_per_pass = len(self) // count
        if updates_per_pass == 0:
            raise UserError(
                f"data: {self.name} has {len(self)} problems, an update draws {count}; "
                f"draw at most {len(self)}"
            )
        pass_index, position = divmod(update_step, updates_per_pass)
        order = np.random.default_rng((seed, pass_index)).permutation(len(self))
        return [self.problems[i] for i in order[position * count : (position + 1) * count]]

    def of_levels(self, lowest: int, highest: int) -> ProblemSet:
        """The problems from one level to another, both included."""
        if all(problem.level is None for problem in self.problems):
            raise UserError(f"levels: {self.name} gives its problems no level; leave the filter out")
        kept = tuple(p for p in self.problems if p.level is not None and lowest <= p.level <= highest)
        if not kept:
            known = sorted({p.level for p in self.problems if p.level is not None})
            raise UserError(
                f"levels: {self.name} has no problem of level {lowest} to {highest}; it has {known}"
            )
        return replace(self, problems=kept)

    def first(self, count: int) -> ProblemSet:
        """The first `count` problems, or all there are."""
        if count < 1:
            raise UserError(f"limit: {count} problems are too few; use 1 or more")
        return replace(self, problems=self.problems[:count])
