"""Responses to look at, and figures over the order in which they were decoded.

Files of responses are large and a page is small: both are samples, drawn the same way from every file, so
that evaluations of the same problems are shown with the same problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tstar.report.lines import Sample, read_sample
from tstar.report.seeds import split_seed
from tstar.report.sources import Notice, read_pieces, read_questions
from tstar.schedule import DecodedResponse, ScheduleAnalysis, analyze, local_strict
from tstar.trajectory import Trajectory

MAX_RESPONSES = 400
"""Read of one file."""
MAX_READ = 20_000
"""Read of all files together."""
MAX_READ_BYTES = 40_000_000
"""Read of all files together."""
MAX_FILES = 400
"""Files that schedules are shown of."""
MAX_PROBLEMS = 20
"""Of one data set, in case study and player."""
MAX_TOKENS = 4096
"""Of one response; the rest is left out."""
MAX_SHOWN_TOKENS = 300_000
"""Of all responses together: about 12 bytes each."""
MAX_PIECE = 400
"""Characters of one token's text."""
MAX_QUESTION = 4000


@dataclass(frozen=True)
class ResponseSource:
    """A file of responses."""

    path: Path
    name: str
    method: int | None
    """None: a file that stands alone and says of no method."""
    setting: str
    data: str
    """Problems with the same id and data are the same problem."""
    group_size: int = 1
    """Samples of a prompt, which stand together."""
    evaluation: Path | None = None
    """Directory with pieces and questions."""
    offset: int = 0
    """Of an evaluation."""


@dataclass(frozen=True)
class Place:
    """One position in the block."""

    steps: tuple[float, ...]
    """Share of this place's tokens by the step that they were decoded at."""
    non_monotone: float | None
    """Share of them that came while one to their left was masked."""


@dataclass(frozen=True)
class ScheduleFigure:
    """The schedules of responses under one partition: of a file, or of all seeds of a method."""

    name: str
    num_files: int
    method: int | None
    setting: str
    block_size: int
    num_responses: int
    num_stored: int
    num_tokens: int
    accuracy: float | None
    local_strict: float
    tokens_per_forward: float
    distinct_schedules: float | None
    places: tuple[Place, ...]
    steps_per_block: tuple[float, ...]
    """Share of the blocks by number of steps, from 0."""
    confidence_correct: tuple[float, ...] | None
    """Share of the tokens of correct responses by confidence, in bins from 0 to 1."""
    confidence_wrong: tuple[float, ...] | None
    mean_confidence_correct: float | None
    mean_confidence_wrong: float | None


@dataclass(frozen=True)
class Problem:
    """What was asked."""

    id: str
    data: str
    question: str | None
    answer: str | None


@dataclass(frozen=True)
class Response:
    """One response, for the player and the heat maps. Tokens up to the stop."""

    figure: int
    """Index of its ScheduleFigure."""
    problem: int
    file: str
    """Of several seeds, the seed."""
    number: int
    """Line in its file."""
    is_correct: bool | None
    pieces: tuple[int, ...]
    """Texts of the tokens, as indices into Samples.pieces."""
    steps: tuple[int, ...]
    """Through the whole response."""
    blocks: tuple[int, ...]
    """Tokens of each block; the first may be short because the prompt's tail or an offset is in it."""
    first_place: int
    """Place in its block of the first token."""
    confidences: tuple[int, ...]
    """Percent."""
    num_tokens: int
    """Up to the stop; more than are here if the response is longer than a page wants."""
    num_forwards: int
    local_strict: float
    is_truncated: bool


@dataclass(frozen=True)
class Samples:
    """Responses to look at."""

    pieces: tuple[str, ...]
    problems: tuple[Problem, ...]
    responses: tuple[Response, ...]


def read_schedules(
    sources: Sequence[ResponseSource], notices: list[Notice]
) -> tuple[tuple[ScheduleFigure, ...], Samples]:
    """The figures of each method under each partition, and the samples that are shown."""
    if len(sources) > MAX_FILES:
        notices.append(
            Notice("report", f"schedules are shown of the first {MAX_FILES} of {len(sources)} files")
        )
    files = sources[:MAX_FILES]
    pools: dict[tuple[object, ...], _Pool] = {}
    for source in files:
        sample = _read(source, len(files), notices)
        for block_size, responses in _by_block_size(source, sample):
            # Evaluations of one method in one setting are its seeds; other files stand for themselves.
            key = (source.method, source.setting, source.offset) if source.evaluation else (source.name,)
            pool = pools.setdefault((*key, block_size), _Pool(source, block_size))
            pool.responses += responses
            pool.num_stored += sample.num_stored
            pool.num_files += 1
    shown = list(pools.values())
    return tuple(_figure(pool) for pool in shown), _show(shown, notices)


def _read(source: ResponseSource, num_files: int, notices: list[Notice]) -> Sample:
    max_responses = min(MAX_RESPONSES, max(MAX_READ // num_files, source.group_size))
    try:
        sample = read_sample(source.path, source.group_size, max_responses, MAX_READ_BYTES // num_files)
    except (OSError, EOFError) as error:
        notices.append(Notice(source.name, f"{source.path.name} cannot be read ({error})"))
        return Sample((), (), 0)
    file = source.path.name
    if sample.is_torn:
        notices.append(Notice(source.name, f"{file} ends in half a line, which is left out"))
    if sample.refusal is not None:
        read = len(sample.responses) + sample.num_refused
        notices.append(
            Notice(source.name, f"{sample.num_refused} of {read} lines are left out; {sample.refusal}")
        )
    if sample.num_stored == 0:
        notices.append(Notice(source.name, f"{file} holds no responses"))
    elif len(sample.responses) + sample.num_refused < sample.num_stored:
        read = len(sample.responses)
        notices.append(
            Notice(source.name, f"schedules are from {read:,} of {sample.num_stored:,} stored responses")
        )
    return sample


@dataclass(frozen=True)
class _Stored:
    """A response, and where it stands."""

    source: ResponseSource
    number: int
    response: DecodedResponse


@dataclass
class _Pool:
    """Responses that are shown as one."""

    source: ResponseSource
    """The first of its files."""
    block_size: int
    responses: list[_Stored] = field(default_factory=list)
    num_stored: int = 0
    num_files: int = 0

    def by_problem(self) -> Mapping[str, list[_Stored]]:
        groups: dict[str, list[_Stored]] = {}
        for stored in self.responses:
            key = stored.response.prompt_key
            name = key if isinstance(key, str) else f"prompt of line {stored.number}"
            groups.setdefault(name, []).append(stored)
        return groups


def _by_block_size(source: ResponseSource, sample: Sample) -> Iterator[tuple[int, list[_Stored]]]:
    groups: dict[int, list[_Stored]] = {}
    for number, response in zip(sample.numbers, sample.responses, strict=True):
        stored = _Stored(source, number, response)
        groups.setdefault(response.trajectory.partition.block_size, []).append(stored)
    return iter(sorted(groups.items()))


# -- figures -----------------------------------------------------------------------------------


def _figure(pool: _Pool) -> ScheduleFigure:
    source, found = pool.source, analyze(_problems_apart(pool))
    return ScheduleFigure(
        name=source.name,
        num_files=pool.num_files,
        method=source.method,
        setting=source.setting,
        block_size=pool.block_size,
        num_responses=found.num_responses,
        num_stored=pool.num_stored,
        num_tokens=found.num_tokens,
        accuracy=found.accuracy,
        local_strict=round(found.local_strict, 4),
        tokens_per_forward=round(found.tokens_per_forward, 4),
        distinct_schedules=found.distinct_schedules,
        places=tuple(_places(found)),
        steps_per_block=_shares(found.steps_per_block),
        confidence_correct=_shares(found.confidence.correct) or None,
        confidence_wrong=_shares(found.confidence.wrong) or None,
        mean_confidence_correct=found.confidence.mean_correct,
        mean_confidence_wrong=found.confidence.mean_wrong,
    )


def _problems_apart(pool: _Pool) -> Sequence[DecodedResponse]:
    """Samples of a prompt are those of one model: a problem in another file is another prompt."""
    if pool.num_files == 1:
        return [stored.response for stored in pool.responses]
    return [
        DecodedResponse(
            stored.response.trajectory,
            f"{stored.source.name}\0{stored.response.prompt_key!r}",
            stored.response.is_correct,
        )
        for stored in pool.responses
    ]


def _places(found: ScheduleAnalysis) -> Iterator[Place]:
    for counts, non_monotone in zip(found.first_unmask, found.non_monotone_share, strict=True):
        yield Place(_shares(counts), None if non_monotone is None else round(non_monotone, 4))


def _shares(counts: np.ndarray) -> tuple[float, ...]:
    """Of their sum; empty if that is 0."""
    total = int(counts.sum())
    return tuple(np.round(counts / total, 4).tolist()) if total else ()


# -- samples -----------------------------------------------------------------------------------


class _Pieces:
    """Every text once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.num_cut = 0

    def number(self, text: str) -> int:
        if len(text) > MAX_PIECE:
            self.num_cut += 1
            text = text[:MAX_PIECE] + "…"
        return self.texts.setdefault(text, len(self.texts))


def _show(shown: Sequence[_Pool], notices: list[Notice]) -> Samples:
    pieces, texts = _Pieces(), _read_texts(shown, notices)
    problems: list[Problem] = []
    responses: list[Response] = []
    num_tokens = num_cut = 0
    for data, name in _rank(shown):
        if num_tokens > MAX_SHOWN_TOKENS:
            notices.append(Notice("report", f"only {len(problems)} problems are shown: more do not fit"))
            break
        question, answer = texts.questions.get((data, name), (None, None))
        problems.append(Problem(name, data, question, answer))
        for figure, each in enumerate(shown):
            group = each.by_problem().get(name, []) if each.source.data == data else []
            for stored in _right_and_wrong(group):
                known = texts.pieces.get(stored.source.evaluation or texts.default, {})
                made = _response(figure, len(problems) - 1, stored, known, pieces)
                responses.append(made)
                num_tokens += len(made.steps)
                num_cut += made.num_tokens > len(made.steps)
    if num_cut:
        text = f"of {num_cut} long responses, the first {MAX_TOKENS:,} tokens are shown"
        notices.append(Notice("report", text))
    if pieces.num_cut:
        text = f"{pieces.num_cut} token texts are longer than {MAX_PIECE} characters and cut"
        notices.append(Notice("report", text))
    return Samples(tuple(pieces.texts), tuple(problems), tuple(responses))


@dataclass(frozen=True)
class _Texts:
    """What evaluations say of tokens and problems."""

    pieces: Mapping[Path | None, Mapping[int, str]]
    default: Path | None
    """Whose pieces serve files without any: those of the only evaluation there is."""
    questions: Mapping[tuple[str, str], tuple[str, str]]


def _read_texts(shown: Sequence[_Pool], notices: list[Notice]) -> _Texts:
    pieces: dict[Path | None, Mapping[int, str]] = {}
    questions: dict[tuple[str, str], tuple[str, str]] = {}
    for source in dict.fromkeys(stored.source for each in shown for stored in each.responses):
        path = source.evaluation
        if path is None or path in pieces:
            continue
        pieces[path] = read_pieces(path, source.name, notices)
        for name, text in read_questions(path, source.name, notices).items():
            questions[source.data, name] = (_cut(text[0]), _cut(text[1]))
    default = next(iter(pieces)) if len(pieces) == 1 else None
    return _Texts(pieces, default, questions)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUESTION else text[:MAX_QUESTION] + "…"


def _rank(shown: Sequence[_Pool]) -> Iterator[tuple[str, str]]:
    """The problems to show, (data, id): of each data set those that most files answer; among these by turns
    one where they disagree, one that all solve, one that none solves."""
    for data in dict.fromkeys(each.source.data for each in shown):
        coverage: Counter[str] = Counter()
        verdicts: dict[str, set[bool | None]] = {}
        for each in shown:
            if each.source.data == data:
                for name, group in each.by_problem().items():
                    coverage[name] += 1
                    verdicts.setdefault(name, set()).update(s.response.is_correct for s in group)
        widest = max(coverage.values(), default=0)
        names = [name for name, count in coverage.items() if count == widest]
        mixed = [n for n in names if {True, False} <= verdicts[n]]
        solved = [n for n in names if n not in mixed and True in verdicts[n]]
        rest = [n for n in names if n not in mixed and n not in solved]
        yield from ((data, name) for name in _by_turns(mixed, solved, rest)[:MAX_PROBLEMS])


def _by_turns(*groups: Sequence[str]) -> list[str]:
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def _right_and_wrong(group: Sequence[_Stored]) -> Iterable[_Stored]:
    """The first of each verdict."""
    first: dict[bool | None, _Stored] = {}
    for stored in group:
        first.setdefault(stored.response.is_correct, stored)
    return first.values()


def _response(
    figure: int, problem: int, stored: _Stored, known: Mapping[int, str], pieces: _Pieces
) -> Response:
    response, seed = stored.response, split_seed(stored.source.name)[1]
    trajectory = response.trajectory
    shown = slice(0, min(trajectory.stop_length, MAX_TOKENS))
    ids = trajectory.response_ids[shown].tolist()
    confidences = np.exp(trajectory.log_probs[shown].astype(np.float64))
    return Response(
        figure=figure,
        problem=problem,
        file=stored.source.name if seed is None else f"seed {seed}",
        number=stored.number,
        is_correct=response.is_correct,
        pieces=tuple(pieces.number(known.get(token, f"⟨{token}⟩")) for token in ids),
        steps=tuple(trajectory.unmask_step[shown].tolist()),
        blocks=tuple(_block_lengths(trajectory, len(ids))),
        first_place=_first_place(trajectory),
        confidences=tuple(np.round(100 * np.minimum(confidences, 1)).astype(int).tolist()),
        num_tokens=trajectory.stop_length,
        num_forwards=trajectory.forwards.denoise,
        local_strict=round(local_strict(trajectory.unmask_step[: trajectory.stop_length]), 4),
        is_truncated=trajectory.finish_reason == "length",
    )


def _block_lengths(trajectory: Trajectory, length: int) -> Iterator[int]:
    for block in trajectory.partition.response_slices:
        if block.start < length:
            yield min(block.stop, length) - block.start


def _first_place(trajectory: Trajectory) -> int:
    """Where in its block the first token stands: behind the prompt's tail, and a short first block ends
    where whole ones do."""
    partition = trajectory.partition
    first = partition.blocks[0]
    is_first_of_all = partition.origin == "response" or first.start == 0
    lead = -partition.offset % partition.block_size if is_first_of_all else 0
    return lead + partition.prompt_length - first.start
