"""What an evaluation that is not finished has decoded so far: a killed one goes on from here.

The journal lies in the directory that the evaluation will fill, and goes when it does::

    unfinished.jsonl   its conditions, then a line for each finished response, as they finish
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tstar.data import ProblemSet
from tstar.engine import Engine
from tstar.errors import UserError
from tstar.evaluate.directory import write_evaluation
from tstar.evaluate.evaluation import Kept, Progress, Scorer, conditions_of, evaluate
from tstar.evaluate.summary import Conditions, EvalSettings, Evaluation, Provenance
from tstar.schedule import DecodedResponse
from tstar.trajectory import Trajectory

if TYPE_CHECKING:
    import transformers

JOURNAL_FILE = "unfinished.jsonl"


def evaluate_into(
    directory: Path,
    engine: Engine,
    problems: ProblemSet,
    tokenizer: transformers.PreTrainedTokenizerBase,
    settings: EvalSettings,
    scorer: Scorer,
    *,
    provenance: Provenance | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> Evaluation:
    """`evaluate`, and write the evaluation directory; killed, the same call goes on where it was.

    Responses that had finished are taken as they are. The others are decoded again from their beginning, by
    their own seeds, so that the numbers are those of a call that was never killed.
    """
    conditions = conditions_of(engine, problems, settings, scorer, provenance)
    with _journal(directory, conditions) as (kept, file):

        def note(progress: Progress) -> None:
            record = f'{progress.response.to_json()[:-1]},"seconds":{progress.seconds:.3f}}}\n'
            file.write(record.encode())
            file.flush()
            if on_progress is not None:
                on_progress(progress)

        evaluation = evaluate(
            engine, problems, tokenizer, settings, scorer, provenance=provenance, kept=kept, on_progress=note
        )
        write_evaluation(directory, evaluation)
    return evaluation


def refuse_other_conditions(where: Path, found: Conditions, wanted: Conditions) -> None:
    """Stop before numbers of another kind are taken for these. The model's path may differ: its weights
    have a fingerprint."""
    old, new = asdict(found), asdict(wanted)
    for name in old.keys() - {"model", "label"}:
        if old[name] != new[name]:
            raise UserError(
                f"{where}: {name}: was evaluated with {_short(old[name])}, asked for is {_short(new[name])}; "
                "choose another --out, or remove it"
            )


@contextmanager
def _journal(directory: Path, conditions: Conditions) -> Iterator[tuple[Kept, IO[bytes]]]:
    """What a journal holds, and the file to go on writing in; one process at a time."""
    path = directory / JOURNAL_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path}: another process writes it; wait, or choose another --out") from error
        yield _resume(path, file, conditions), file


def _resume(path: Path, file: IO[bytes], conditions: Conditions) -> Kept:
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]  # a kill in mid-line leaves a torn one
    file.truncate(len(whole))
    header, *lines = whole.splitlines() or [b""]
    if not header:
        file.write(json.dumps({"conditions": asdict(conditions)}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return Kept()
    try:
        found = Conditions(**json.loads(header)["conditions"])
        trajectories: dict[int, Trajectory] = {}
        record: Mapping[str, Any] = {"seconds": 0.0}
        for line in lines:
            record = json.loads(line)
            trajectory = DecodedResponse.from_json(line.decode()).trajectory
            trajectories[trajectory.seed] = trajectory
        seconds = float(record["seconds"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it to begin anew") from error
    refuse_other_conditions(path, found, conditions)
    return Kept(trajectories, seconds)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
