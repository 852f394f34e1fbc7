"""Rollouts of an update step: asked for by key, scored by problem, kept as JSON lines.

Every random choice follows from (seed, update step, problem, sample) alone, so neither batches nor the
number of processes can change a response.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tstar import atomic
from tstar.curriculum import WeightedPolicy
from tstar.data import Problem, PromptTemplate
from tstar.engine import Request, SamplingParams
from tstar.evaluate import Scorer, to_response
from tstar.partition import PartitionRule
from tstar.schedule import DecodedResponse, local_strict
from tstar.trainer import Rollout
from tstar.trajectory import Trajectory
from tstar.unmask import UnmaskPolicy

if TYPE_CHECKING:
    import transformers


@dataclass(frozen=True)
class Drawn:
    """A problem of an update step."""

    place: int
    """Among the problems of the step."""
    problem: Problem


@dataclass(frozen=True, eq=False)
class Group:
    """A problem with its responses."""

    drawn: Drawn
    rollouts: tuple[Rollout, ...]
    terms: Mapping[str, tuple[float, ...]]
    """Each reward of the weighted sum, of each response."""
    failures: tuple[Mapping[str, str], ...]
    """Of each response, the rewards whose call was killed, died or raised, and why; they count 0."""


def key(*parts: object) -> int:
    """A seed of 63 bits that follows from these parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw_policy(policies: Sequence[WeightedPolicy], seed: int) -> UnmaskPolicy:
    """One of a mixture, by weight."""
    weights = np.array([policy.weight for policy in policies])
    return policies[np.random.default_rng(seed).choice(len(policies), p=weights / weights.sum())]


@dataclass(frozen=True)
class Asking:
    """How problems become requests."""

    tokenizer: transformers.PreTrainedTokenizerBase
    prompt: PromptTemplate
    num_samples: int
    max_tokens: int
    temperature: float

    def requests(
        self,
        drawn: Sequence[Drawn],
        policies: Sequence[WeightedPolicy],
        rule: PartitionRule,
        *keys: object,
    ) -> list[Request]:
        """The requests of each problem, one after the other; all of a problem under one policy."""
        out = []
        for each in drawn:
            ids = np.array(self.prompt.render(self.tokenizer, each.problem.question), dtype=np.int64)
            policy = draw_policy(policies, key(*keys, "policy", each.problem.id))
            sampling = SamplingParams(self.max_tokens, self.temperature, unmask=policy)
            out += [
                Request(ids, rule, sampling, key(*keys, each.problem.id, sample))
                for sample in range(self.num_samples)
            ]
        return out

    def groups(
        self, drawn: Sequence[Drawn], trajectories: Sequence[Trajectory], scorer: Scorer
    ) -> tuple[Group, ...]:
        """Score what the requests came to."""
        asked = [each.problem for each in drawn for _ in range(self.num_samples)]
        scores = scorer.score(asked, [to_response(self.tokenizer, t) for t in trajectories])
        failures: list[dict[str, str]] = [{} for _ in asked]
        for failed in scores.failures:
            failures[failed.index][failed.reward] = failed.cause
        groups = []
        for number, each in enumerate(drawn):
            own = range(number * self.num_samples, (number + 1) * self.num_samples)
            rollouts = tuple(
                Rollout(trajectories[i], float(scores.rewards[i]), each.place, bool(scores.is_correct[i]))
                for i in own
            )
            terms = {name: tuple(float(values[i]) for i in own) for name, values in scores.terms.items()}
            groups.append(Group(each, rollouts, terms, tuple(failures[i] for i in own)))
        return tuple(groups)


# -- numbers -----------------------------------------------------------------------------------


def describe(groups: Sequence[Group]) -> dict[str, object]:
    """What the responses were like, for the metrics."""
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    lengths = [t.stop_length for t in trajectories]
    found: dict[str, object] = {
        "tokens_per_forward": sum(lengths) / sum(t.forwards.denoise for t in trajectories),
        "local_strict": float(np.mean([local_strict(t.unmask_step[: t.stop_length]) for t in trajectories])),
        "response_length": float(np.mean(lengths)),
        "num_failed_rewards": sum(len(failed) for group in groups for failed in group.failures),
    }
    if len(groups[0].terms) > 1:
        for name in groups[0].terms:
            found[f"reward_{name}"] = float(np.mean([v for group in groups for v in group.terms[name]]))
    return found


# -- files -------------------------------------------------------------------------------------


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """One response a line, as `tstar.schedule.read_responses` reads it, with what it earned."""
    text = "".join(f"{line}\n" for group in groups for line in _lines(group))
    atomic.write_bytes(path, gzip.compress(text.encode(), compresslevel=3, mtime=0))


def read_groups(path: Path, drawn: Sequence[Drawn]) -> tuple[Group, ...]:
    """What `write_groups` wrote, of those of these problems that it wrote: rollouts of the second half are
    not there before they are sampled."""
    by_place: dict[int, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            record["trajectory"] = Trajectory.from_json(line)
            by_place.setdefault(record["place"], []).append(record)
    return tuple(_group(each, by_place[each.place]) for each in drawn if each.place in by_place)


def prune(directory: Path, max_bytes: float) -> None:
    """Remove the oldest files until the rest is small enough; the latest stays."""
    files = sorted(directory.glob("*.jsonl.gz"))
    sizes = [path.stat().st_size for path in files]
    for number, path in enumerate(files[:-1]):
        if sum(sizes[number:]) <= max_bytes:
            return
        path.unlink()


def _lines(group: Group) -> Iterator[str]:
    for number, rollout in enumerate(group.rollouts):
        extra = {
            "reward": rollout.reward,
            "place": group.drawn.place,
            "terms": {name: values[number] for name, values in group.terms.items()},
            "failures": group.failures[number],
        }
        response = DecodedResponse(rollout.trajectory, group.drawn.problem.id, rollout.is_correct)
        yield f"{response.to_json()[:-1]},{json.dumps(extra)[1:]}"


def _group(drawn: Drawn, records: Sequence[Mapping[str, Any]]) -> Group:
    rollouts = tuple(Rollout(r["trajectory"], r["reward"], drawn.place, r["correct"]) for r in records)
    terms = {name: tuple(r["terms"][name] for r in records) for name in records[0]["terms"]}
    return Group(drawn, rollouts, terms, tuple(r["failures"] for r in records))
