"""From the name of a data source to token ids: what SFT learns and what it is validated on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tstar.data import Problem, PromptTemplate, prompt_template
from tstar.data.rows import SUFFIXES, Row, read_files
from tstar.errors import UserError
from tstar.model.tokenizer import render_chat
from tstar.sft.gradient import generator_for
from tstar.sft.objective import Example, Objective
from tstar.sft.options import SftOptions
from tstar.tasks import open_problem_set

if TYPE_CHECKING:
    import transformers  # slow to import

NUM_GENERATED = 20_000
"""Examples of a generated task, where their number is not given."""
_MAX_HELD_OUT = 10
"""At most one in ten examples is held out for the validation loss."""


@dataclass(frozen=True)
class SftData:
    """What a run learns and is validated on."""

    examples: tuple[Example, ...]
    validation: tuple[Example, ...]
    """Empty where the data is too small to hold any out."""
    num_left_out: int
    """Examples whose forward could exceed the token budget."""

    @property
    def fingerprint(self) -> str:
        """Tells whether a resumed run sees the same data."""
        digest = hashlib.blake2b(digest_size=16)
        for example in (*self.examples, *self.validation):
            for ids in (example.prompt_ids, example.response_ids):
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()


def load_sft_data(
    options: SftOptions, tokenizer: transformers.PreTrainedTokenizerBase, objective: Objective
) -> SftData:
    """Read, tokenise, hold out, and leave out what the token budget cannot hold."""
    prompt = None if options.prompt is None else prompt_template(options.prompt)
    loaded = load_examples(options.data, tokenizer, options.num_examples, prompt, options.levels)
    validation_source = options.validation_data or _validation_split(options.data)
    if validation_source is not None:
        levels = options.levels if options.validation_data is None else None
        validation = load_examples(validation_source, tokenizer, options.num_validation, prompt, levels)
    else:
        loaded, validation = _hold_out(loaded, options.num_validation, options.seed)
    kept, kept_validation = (
        tuple(ex for ex in part if objective.max_tokens(ex) <= options.token_budget)
        for part in (loaded, validation)
    )
    if not kept:
        shortest = min(objective.max_tokens(example) for example in loaded)
        raise UserError(
            f"token_budget: {options.token_budget} holds none of {len(loaded)} examples of {options.data}; "
            f"the shortest needs {shortest}"
        )
    num_left_out = len(loaded) + len(validation) - len(kept) - len(kept_validation)
    return SftData(kept, kept_validation, num_left_out)


def load_examples(
    source: str,
    tokenizer: transformers.PreTrainedTokenizerBase,
    limit: int | None = None,
    prompt: PromptTemplate | None = None,
    levels: tuple[int, int] | None = None,
) -> list[Example]:
    """The examples of a source: problems with their solutions, conversations, or plain texts.

    prompt: None for the one that suits the source; a conversation is its own, a plain text has none.
    levels: of problems, the lowest and the highest.
    """
    opened = _open_rows(source)
    if levels is not None and (opened is not None or source.startswith("chain:")):
        fix = "leave the filter out" if opened else f"write chain:{levels[0]}-{levels[1]}"
        raise UserError(f"levels: {source} has no rows with a level; {fix}")
    if opened is not None:
        rows, example_of_row = opened
        return [example_of_row(row, tokenizer) for row in itertools.islice(rows, limit)]
    is_generated = source.startswith("chain:")
    count = limit or (NUM_GENERATED if is_generated else None)
    problems = open_problem_set(source, None if levels else count, needs_answer=False)
    if levels is not None:
        problems = problems.of_levels(*levels)
        problems = problems if count is None else problems.first(count)
    template = prompt or problems.prompt
    return [example_of_problem(problem, template, tokenizer) for problem in problems.problems]


def example_of_problem(
    problem: Problem, prompt: PromptTemplate, tokenizer: transformers.PreTrainedTokenizerBase
) -> Example:
    """The question through its template; the solution, or else the answer, as the whole response."""
    response = problem.solution if problem.solution is not None else problem.answer
    return _finished(prompt.render(tokenizer, problem.question), response, tokenizer)


def _example_of_messages(row: Row, tokenizer: transformers.PreTrainedTokenizerBase) -> Example:
    """A conversation: all before its last message is the prompt, that message the response."""
    messages: Any = row.values.get("messages")
    if not _is_conversation(messages):
        raise UserError(
            f"data: {row.place}: messages: not a conversation that ends with the assistant; write "
            '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]'
        )
    prompt_ids = render_chat(tokenizer, messages[:-1])
    return _finished(prompt_ids, messages[-1]["content"], tokenizer)


def _example_of_text(row: Row, tokenizer: transformers.PreTrainedTokenizerBase) -> Example:
    """A plain text: all of it is learnt, behind nothing but the beginning-of-text token, if there is one."""
    text = row.values.get("text")
    if not isinstance(text, str) or not text:
        raise UserError(f"data: {row.place}: text: is missing, empty or no text; correct the row")
    begin = tokenizer("").input_ids[:1]
    return _finished(begin if begin == [tokenizer.bos_token_id] else [], text, tokenizer)


def _finished(
    prompt_ids: list[int], response: str, tokenizer: transformers.PreTrainedTokenizerBase
) -> Example:
    response_ids: list[int] = tokenizer(response, add_special_tokens=False).input_ids
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer: {tokenizer.name_or_path} names no eos_token, so no response can end; set it in "
            "tokenizer_config.json"
        )
    return Example(
        np.asarray(prompt_ids, dtype=np.int64),
        np.asarray([*response_ids, tokenizer.eos_token_id], dtype=np.int64),
    )


def _open_rows(source: str) -> tuple[Iterator[Row], Callable[..., Example]] | None:
    """The rows of a file that holds no problems, as its first row shows, and what makes an example of one."""
    path = Path(source)
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    first = next(read_files([path]), None)
    names = set() if first is None else first.values.keys()
    if "messages" in names:
        return read_files([path]), _example_of_messages
    is_plain_text = "text" in names and not names & {"question", "problem"}
    return (read_files([path]), _example_of_text) if is_plain_text else None


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, Sequence)
        and len(messages) > 1
        and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) for m in messages)
        and messages[-1].get("role") == "assistant"
    )


def _validation_split(source: str) -> str | None:
    """Generated tasks have a validation split by construction."""
    return f"{source}@validation" if source.startswith("chain:") and "@" not in source else None


def _hold_out(examples: list[Example], num_validation: int, seed: int) -> tuple[list[Example], list[Example]]:
    num_held_out = min(num_validation, len(examples) // _MAX_HELD_OUT)
    order = generator_for("held out", seed).permutation(len(examples))
    held_out = set(order[:num_held_out].tolist())
    kept = [example for i, example in enumerate(examples) if i not in held_out]
    return kept, [examples[i] for i in sorted(held_out)]
