"""Schedules by hand: LocalStrict, tables, and the files they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tstar.errors import UserError
from tstar.partition import Partition
from tstar.schedule import DecodedResponse, Schedules, analyze, local_strict, read_responses
from tstar.trajectory import ForwardCounts, Trajectory


def decoded(
    unmask_step: list[int],
    block_size: int = 4,
    stop_length: int | None = None,
    prompt: int = 3,
    origin: str = "response",
    confidences: list[float] | None = None,
) -> Trajectory:
    length = len(unmask_step)
    return Trajectory(
        prompt_ids=np.arange(prompt),
        response_ids=np.arange(length),
        unmask_step=np.array(unmask_step),
        log_probs=np.log(confidences or [0.5] * length).astype(np.float32),
        stop_length=stop_length or length,
        finish_reason="stop",
        partition=Partition(prompt, length, block_size, origin=origin),  # type: ignore[arg-type]
        forwards=ForwardCounts(denoise=max(unmask_step) + 1),
        weight_version=0,
        seed=0,
    )


@pytest.mark.parametrize(
    ("unmask_step", "expected"),
    [
        ([0], 1.0),
        ([0, 1, 2, 3], 1.0),
        ([0, 0, 0, 0], 1.0),  # at once is left to right: ties by position
        ([3, 2, 1, 0], 0.25),  # only the last event has nothing to its left
        ([1, 0, 2, 3], 0.75),
        ([0, 1, 0, 1], 0.75),  # order 0 2 1 3: position 2 comes while 1 is masked
        ([1, 0, 0, 1], 0.5),  # order 1 2 0 3
        ([0, 1, 0, 2, 4, 3, 3, 5], 0.625),
    ],
)
def test_local_strict_by_hand(unmask_step: list[int], expected: float) -> None:
    assert local_strict(np.array(unmask_step)) == expected
    assert analyze([DecodedResponse(decoded(unmask_step))]).local_strict == expected


def test_tokens_behind_the_stop_do_not_count_but_their_forwards_do() -> None:
    # Block 2: the stop is its second token, and the first came after what stands behind the stop.
    found = analyze([DecodedResponse(decoded([0, 1, 2, 3, 5, 5, 4, 6], stop_length=6))])
    assert found.local_strict == 1.0
    assert (found.num_tokens, found.num_forwards) == (6, 7)
    assert found.tokens_per_forward == 6 / 7
    assert found.steps_per_block.tolist() == [0, 0, 0, 1, 1]
    assert found.mean_steps_per_block == 3.5


def test_tables_by_hand() -> None:
    found = analyze([DecodedResponse(decoded([0, 1, 0, 2, 4, 3, 3, 5]))])
    assert found.first_unmask.tolist() == [[1, 1, 0], [1, 1, 0], [2, 0, 0], [0, 0, 2]]
    assert found.non_monotone.tolist() == [0, 1, 2, 0]
    assert found.non_monotone_share == (0, 0.5, 1, 0)
    assert found.steps_per_block.tolist() == [0, 0, 0, 2]


def test_a_prompts_tail_has_the_first_places_of_the_block() -> None:
    found = analyze([DecodedResponse(decoded([1, 0, 2], origin="sequence", prompt=2))])
    assert found.first_unmask.tolist() == [[1, 0], [0, 0], [0, 1], [1, 0]]
    assert found.non_monotone_share == (0, None, 0, 1)


def test_decoding_one_token_a_forward_is_strict_with_tpf_1() -> None:
    found = analyze([DecodedResponse(decoded(list(range(7)), block_size=1))])
    assert (found.local_strict, found.tokens_per_forward) == (1.0, 1.0)


def test_means_weigh_responses_equally_and_forwards_as_they_are() -> None:
    responses = [DecodedResponse(decoded([0])), DecodedResponse(decoded([3, 2, 1, 0]))]
    found = analyze(responses)
    assert found.local_strict == (1 + 0.25) / 2
    assert found.tokens_per_forward == 1.0
    truncated = replace(responses[0], trajectory=replace(responses[0].trajectory, finish_reason="length"))
    assert analyze([truncated, responses[1]]).truncated == 0.5


def test_distinct_schedules_are_counted_as_far_as_all_responses_go() -> None:
    one, same, longer, other = (
        decoded([0, 1, 0]),
        decoded([0, 1, 0]),
        decoded([0, 1, 0, 1, 2]),
        decoded([0, 0, 1, 0]),
    )
    alone = decoded([2, 1, 0], prompt=5)

    def share(*trajectories: Trajectory) -> float | None:
        return analyze([DecodedResponse(t) for t in trajectories]).distinct_schedules

    assert share(one, same, longer, other, alone) == 2 / 4
    assert share(one, other) == 1.0
    assert share(one, alone) is None
    by_id = [DecodedResponse(one, "a"), DecodedResponse(alone, "a"), DecodedResponse(same, "b")]
    assert analyze(by_id).distinct_schedules == 1.0
    assert analyze(by_id).num_prompts == 2


def test_confidence_of_right_and_wrong_responses() -> None:
    right = decoded([0, 1, 2], confidences=[1.0, 0.95, 0.25])
    wrong = decoded([0, 1, 2], confidences=[0.05, 0.25, 0.5], stop_length=2)
    found = analyze(
        [
            DecodedResponse(right, is_correct=True),
            DecodedResponse(wrong, is_correct=False),
            DecodedResponse(right),
        ]
    )
    assert found.accuracy == 0.5
    assert found.confidence.correct.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 2]
    assert found.confidence.wrong.tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert found.confidence.mean_correct == pytest.approx((1 + 0.95 + 0.25) / 3)
    assert found.confidence.mean_wrong == pytest.approx(0.15)
    unjudged = analyze([DecodedResponse(right)])
    assert (unjudged.accuracy, unjudged.confidence.mean_correct) == (None, None)


def test_no_response_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectories: empty"):
        Schedules.of([])


# -- files -------------------------------------------------------------------------------------


def test_what_is_known_of_a_response_comes_back(tmp_path: Path) -> None:
    trajectory = decoded([0, 1, 0])
    lines = [
        DecodedResponse(trajectory, "p-1", is_correct=False).to_json(),
        "",
        DecodedResponse(trajectory).to_json(),
        json.dumps({**json.loads(trajectory.to_json()), "correct": True, "reward": 1.5, "text": "\u2028"}),
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    found = read_responses(tmp_path / "t.jsonl")
    assert [(r.problem, r.is_correct) for r in found] == [("p-1", False), (None, None), (None, True)]
    assert all(r.trajectory.to_json() == trajectory.to_json() for r in found)
    assert DecodedResponse(trajectory).to_json() == trajectory.to_json()
    assert Trajectory.from_json(lines[0]).to_json() == trajectory.to_json()


GOOD = decoded([0, 1, 0]).to_json()


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(GOOD), **fields})


def without(field: str) -> str:
    return json.dumps({key: value for key, value in json.loads(GOOD).items() if key != field})


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD[:40], "is no JSON.*cut short"),
        ("[1, 2]", "a list, not an object"),
        (without("seed"), "seed: missing"),
        (changed(problem=7), "problem: 7 is no string"),
        (changed(correct="yes"), "correct: 'yes' is neither true nor false"),
        (changed(version=99), "version: 99 is not this program's 1"),
        (changed(stop_length=7), "stop_length: 7 is not within 1 to 3"),
        (changed(unmask_step=[0, 2, 0]), "unmask_step: no token has step 1"),
        (changed(unmask_step=["a", 1, 0]), "invalid literal"),
        (changed(response_ids=[10**30, 1, 2]), "too large"),
        (changed(partition={"size": 4}), "partition|size"),
        (changed(stop_length="3"), "."),
        ("\udcff", "utf-8"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"t\.jsonl:2: .*({message})") as caught:
        read_responses(path)
    assert "\n" not in str(caught.value)
