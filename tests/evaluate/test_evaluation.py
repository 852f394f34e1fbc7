"""Evaluations of tiny random models: numbers by hand, seeds, directories, resumption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tiny_models import make_config, randomise
from trajectories import make_trajectory
from tstar.data import Problem, ProblemSet
from tstar.engine import Engine, EngineConfig, GenerationError, RefusedError, SamplingParams
from tstar.errors import UserError
from tstar.evaluate import (
    EvalSettings,
    Evaluation,
    Kept,
    Progress,
    Provenance,
    Summary,
    describe_policy,
    evaluate,
    evaluate_into,
    is_evaluation,
    read_evaluation,
    request_seed,
    text_pieces,
    to_response,
    write_evaluation,
)
from tstar.evaluate.evaluation import prompts_of
from tstar.evaluate.journal import JOURNAL_FILE
from tstar.model.tokenizer import load_tokenizer
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.rewards import FailedCall, Rewards, RewardSpec, Scores
from tstar.schedule import DecodedResponse
from tstar.tasks import open_problem_set
from tstar.tasks.chain_model import chain_tokenizer
from tstar.unmask import UnmaskPolicy

TOKENIZER = chain_tokenizer()
POLICY = UnmaskPolicy("dynamic", confidence_threshold=0.5)
SETTINGS = EvalSettings(PartitionRule(4), SamplingParams(max_tokens=18, unmask=POLICY), num_samples=3)


class ByLength:
    """Correct: an even number of characters. Fails on every response of 7."""

    specs = (RewardSpec("exact"),)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Scores:
        assert len(problems) == len(responses)
        is_correct = np.array([len(text) % 2 == 0 for text in responses])
        failures = tuple(FailedCall(i, "exact", "crash", "") for i, t in enumerate(responses) if len(t) == 7)
        return Scores(is_correct.astype(np.float64), {}, is_correct, failures)


def make_engine(is_diffusion: bool = True, **config: int) -> Engine:
    shape = make_config("qwen3", vocab_size=len(TOKENIZER), eos_token_id=1, num_hidden_layers=2)
    if is_diffusion:
        shape = replace(shape, mask_token_id=TOKENIZER.mask_token_id)
    model = LanguageModel(shape)
    randomise(model)
    return Engine(model, EngineConfig(**{"memory": 100_000_000, **config}))


def problems(count: int = 8) -> ProblemSet:
    return open_problem_set("chain:1@test", count)


def run(engine: Engine | None = None, settings: EvalSettings = SETTINGS, count: int = 8) -> Evaluation:
    return evaluate(engine or make_engine(), problems(count), TOKENIZER, settings, ByLength())


def lines(evaluation: Evaluation) -> list[str]:
    return [response.to_json() for response in evaluation.responses]


def assert_same(some: Sequence[DecodedResponse], others: Sequence[DecodedResponse]) -> None:
    """The same tokens at the same steps; log-probs as near as sums in another order are."""
    for one, other in zip(some, others, strict=True):
        assert (one.problem, one.is_correct) == (other.problem, other.is_correct)
        a, b = one.trajectory, other.trajectory
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert a.unmask_step.tolist() == b.unmask_step.tolist()
        assert (a.seed, a.stop_length, a.finish_reason) == (b.seed, b.stop_length, b.finish_reason)
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


def timeless(summary: Summary) -> Summary:
    return replace(summary, time=replace(summary.time, seconds=0.0, tokens_per_second=0.0))


# -- numbers -----------------------------------------------------------------------------------


def test_every_number_by_hand() -> None:
    evaluation = run()
    summary, responses = evaluation.summary, evaluation.responses
    trajectories = [response.trajectory for response in responses]
    assert [r.problem for r in responses] == [p.id for p in problems().problems for _ in range(3)]

    texts = [
        TOKENIZER.decode(t.response_ids[: t.stop_length - (t.finish_reason == "stop")]) for t in trajectories
    ]
    verdicts = [len(text) % 2 == 0 for text in texts]
    assert [r.is_correct for r in responses] == verdicts
    assert 0 < sum(verdicts) < 24  # neither trivial
    assert summary.accuracy.value == sum(verdicts) / 24
    groups = [verdicts[i : i + 3] for i in range(0, 24, 3)]
    assert summary.pass_at[3].value == pytest.approx(sum(map(any, groups)) / 8)
    assert summary.pass_at[1].value == pytest.approx(summary.accuracy.value)
    assert set(summary.pass_at) == {1, 2, 3}
    assert summary.num_worker_failures == sum(len(text) == 7 for text in texts)

    num_tokens = sum(t.stop_length for t in trajectories)
    num_forwards = sum(t.num_steps for t in trajectories)
    assert summary.tokens_per_forward.value == pytest.approx(num_tokens / num_forwards)
    assert summary.forwards.denoise == num_forwards
    assert summary.local_strict.value == pytest.approx(
        np.mean([slow_local_strict(t.unmask_step[: t.stop_length].tolist()) for t in trajectories])
    )
    assert summary.response_length.mean == pytest.approx(num_tokens / 24)
    assert summary.response_length.max == max(t.stop_length for t in trajectories)
    assert summary.truncated == sum(t.finish_reason == "length" for t in trajectories) / 24
    assert 0 < summary.truncated < 1
    assert summary.time.tokens_per_second == pytest.approx(num_tokens / summary.time.seconds)
    for estimate in (summary.accuracy, summary.tokens_per_forward, summary.local_strict):
        assert estimate.low <= estimate.value <= estimate.high


def slow_local_strict(steps: list[int]) -> float:
    """Eq. 8 to the letter: decode in order, look each time for the leftmost that is masked."""
    order = sorted(range(len(steps)), key=lambda i: (steps[i], i))
    masked = set(order)
    hits = 0
    for position in order:
        hits += position == min(masked)
        masked.remove(position)
    return hits / len(steps)


def test_the_papers_aime_number_is_a_mean_over_samples() -> None:
    """4 of 90 answers to 30 problems: 4.44 %, which no share of 30 problems is."""
    done = run(settings=SETTINGS, count=30)
    conditions = done.summary.conditions
    verdicts = np.zeros((30, 3), dtype=bool)
    verdicts[3, :2] = verdicts[11, 0] = verdicts[29, 2] = True
    judged = [replace(r, is_correct=bool(v)) for r, v in zip(done.responses, verdicts.ravel(), strict=True)]
    summary = Summary.of(conditions, judged, 0, 1.0)
    assert round(100 * summary.accuracy.value, 2) == 4.44
    assert summary.pass_at[1].value == pytest.approx(4 / 90)
    assert summary.pass_at[3].value == pytest.approx(3 / 30)
    assert summary.pass_at[2].value == pytest.approx((1 + 2 / 3 + 2 / 3) / 30)


def test_samples_of_a_problem_count_as_one_draw() -> None:
    """Three equal verdicts on each problem say as much as one."""
    done = run(settings=replace(SETTINGS, num_samples=4), count=30)
    verdicts = np.repeat(np.arange(30) % 3 == 0, 4)
    judged = [replace(r, is_correct=bool(v)) for r, v in zip(done.responses, verdicts, strict=True)]
    summary = Summary.of(done.summary.conditions, judged, 0, 1.0)
    half_width = (summary.accuracy.high - summary.accuracy.low) / 2
    assert half_width == pytest.approx(1.96 * np.sqrt((1 / 3) * (2 / 3) / 30), rel=0.15)


def test_an_ar_model_decodes_a_token_a_forward_from_the_left() -> None:
    settings = EvalSettings(PartitionRule(1), SamplingParams(max_tokens=18), num_samples=2)
    summary = run(make_engine(is_diffusion=False), settings).summary
    for estimate in (summary.tokens_per_forward, summary.local_strict):
        assert (estimate.value, estimate.low, estimate.high) == (1, 1, 1)
    assert (summary.conditions.policy, summary.conditions.block_size) == ("next token", 1)
    with pytest.raises(RefusedError, match=r"block_size: 4 .*use 1"):
        run(make_engine(is_diffusion=False))


# -- seeds -------------------------------------------------------------------------------------


def test_what_else_is_decoded_changes_nothing() -> None:
    together = run()
    for engine in (make_engine(max_requests=1), make_engine(max_requests=5, page_size=4)):
        other = run(engine)
        assert_same(other.responses, together.responses)
        assert timeless(other.summary) == timeless(together.summary)
    assert_same(run(count=3).responses, together.responses[:9])
    fewer = run(settings=replace(SETTINGS, num_samples=2)).responses
    assert_same(fewer, [response for i, response in enumerate(together.responses) if i % 3 < 2])
    other_seed = run(settings=replace(SETTINGS, seed=1)).responses
    texts = [[r.trajectory.response_ids.tolist() for r in each] for each in (other_seed, together.responses)]
    assert texts[0] != texts[1]


def test_seeds_are_all_different() -> None:
    seeds = {request_seed(s, p, k) for s in range(4) for p in range(40) for k in range(16)}
    assert len(seeds) == 4 * 40 * 16
    assert max(seeds) < 2**63


# -- text --------------------------------------------------------------------------------------


def test_what_is_judged_ends_before_the_stop_and_keeps_stray_special_tokens() -> None:
    ids = np.array([4, 5, 0, 6, 1, 7, 7, 7])  # 0 1 <pad> 2 <eos>, and what stands behind it
    fields = {"prompt_ids": np.array([4, 18]), "response_ids": ids}
    partition = PartitionRule(4).cut(2, 8)
    stopped = make_trajectory(partition, [0, 0, 1, 1, 2, 2, 2, 2], stop_length=5, **fields)
    response = to_response(TOKENIZER, stopped)
    assert response == "01<pad>2"
    assert (response.num_tokens, response.tokens_per_forward, response.finish_reason) == (5, 5 / 3, "stop")
    cut = replace(stopped, stop_length=8, finish_reason="length")
    assert to_response(TOKENIZER, cut) == "01<pad>2<eos>333"
    assert text_pieces(TOKENIZER, [stopped]) == {
        0: "<pad>", 1: "<eos>", 4: "0", 5: "1", 6: "2", 7: "3", 18: "="
    }  # fmt: skip


@pytest.mark.parametrize("name", ["models/stories15M", "tokenizers/sdar"])
def test_pieces_of_real_tokenizers_join_to_the_text(shared: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared / name)
    text = "The answer  is\n\\boxed{\\frac{14}{3}}, and he said: don't."
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    partition = PartitionRule(4).cut(len(ids), len(ids))
    steps = np.repeat(np.arange(len(ids)), 1)
    trajectory = make_trajectory(partition, steps, prompt_ids=ids, response_ids=ids, finish_reason="length")
    pieces = text_pieces(tokenizer, [trajectory])
    assert "".join(pieces[i] for i in ids.tolist()).lstrip() == text
    assert to_response(tokenizer, trajectory).lstrip() == text


def test_mathematics_is_asked_for_in_the_models_own_chat_form(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers/sdar")
    asked = open_problem_set(f"math500:{shared / 'data/math500.jsonl'}", 2)
    (first, _) = prompts_of(asked, tokenizer)
    text = tokenizer.decode(first)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert asked.problems[0].question in text
    assert "put your final answer within \\boxed{}.<|im_end|>" in text


# -- what goes wrong ---------------------------------------------------------------------------


def test_broken_weights_are_no_wrong_answers() -> None:
    engine = make_engine()
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(GenerationError, match="not finite"):
        run(engine)
    assert engine.num_unfinished == 0


def test_an_engine_is_left_as_it_was_found() -> None:
    engine = make_engine(max_requests=4)
    with pytest.raises(StopError):
        evaluate(engine, problems(), TOKENIZER, SETTINGS, ByLength(), on_progress=stop_after(5))
    assert engine.num_unfinished == 0
    assert_same(run(engine).responses, run().responses)


def test_a_response_longer_than_the_model_is_refused() -> None:
    settings = replace(SETTINGS, sampling=SamplingParams(max_tokens=600))
    with pytest.raises(RefusedError, match=r"max_tokens.*pass the model's 512 positions"):
        run(settings=settings)


@pytest.mark.parametrize(("field", "value"), [("num_samples", 0), ("seed", -1)])
def test_settings_say_what_is_wrong(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SETTINGS, **{field: value})


# -- directories -------------------------------------------------------------------------------


def test_a_directory_gives_back_what_was_written(tmp_path: Path) -> None:
    done = run()
    write_evaluation(tmp_path / "e", done)
    found = read_evaluation(tmp_path / "e")
    assert is_evaluation(tmp_path / "e")
    assert found.summary == done.summary
    assert lines(found) == lines(done)
    assert found.pieces == done.pieces
    assert [(p.id, p.question, p.answer, p.level) for p in found.problems] == [
        (p.id, p.question, p.answer, p.level) for p in done.problems
    ]
    write_evaluation(tmp_path / "e", run(count=2))  # replaced whole
    assert len(read_evaluation(tmp_path / "e").responses) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e"]


def test_the_summary_has_the_fields_that_readers_rely_on(tmp_path: Path) -> None:
    provenance = Provenance("T*", "run/model", update_step=40)
    done = evaluate(make_engine(), problems(), TOKENIZER, SETTINGS, ByLength(), provenance=provenance)
    write_evaluation(tmp_path / "e", done)
    record = json.loads((tmp_path / "e/summary.json").read_text(), parse_constant=pytest.fail)
    known = {
        "version": 1, "label": "T*", "model": "run/model", "data": "chain:1@test", "block_size": 4,
        "offset": 0, "origin": "response", "policy": "dynamic 0.5", "temperature": 1.0, "max_tokens": 18,
        "seed": 0, "num_problems": 8, "num_samples": 3, "update_step": 40,
    }  # fmt: skip
    assert {name: record[name] for name in known} == known
    assert record["unmask"]["kind"] == "dynamic"
    assert record["unmask"]["confidence_threshold"] == 0.5
    for estimate in (record["accuracy"], *record["pass_at"].values(), record["tokens_per_forward"]):
        assert list(estimate) == ["value", "low", "high"]
    assert list(record["local_strict"]) == ["value", "low", "high"]
    assert list(record["pass_at"]) == ["1", "2", "3"]
    assert set(record["response_length"]) == {"mean", "max"}
    assert set(record["forwards"]) == {"denoise", "commit", "prefill"}
    assert set(record["time"]) == {"seconds", "tokens_per_second"}
    assert {"truncated", "num_worker_failures"} < set(record)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", None, "cannot be read"),
        ("summary.json", "{", "is damaged"),
        ("summary.json", '{"version": 9}', "version: 9"),
        ("summary.json", '{"version": 1}', "label is missing"),
        ("problems.jsonl", '{"id": "x"}\n', "question is missing"),
        ("pieces.json", '{"a": "b"}', "is damaged"),
    ],
)
def test_a_damaged_directory_is_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    write_evaluation(tmp_path / "e", run(count=1))
    path = tmp_path / "e" / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=f"{file}.*{message}"):
        read_evaluation(tmp_path / "e")


# -- resume ------------------------------------------------------------------------------------


class StopError(Exception):
    """Stands for whatever ends an evaluation."""


def stop_after(count: int) -> Callable[[Progress], None]:
    def on_progress(progress: Progress) -> None:
        if progress.num_finished == count:
            raise StopError

    return on_progress


def begin(directory: Path, count: int = 10, settings: EvalSettings = SETTINGS) -> None:
    engine = make_engine(max_requests=4)
    with pytest.raises(StopError):
        evaluate_into(
            directory, engine, problems(), TOKENIZER, settings, ByLength(), on_progress=stop_after(count)
        )


def go_on(directory: Path, settings: EvalSettings = SETTINGS) -> tuple[Evaluation, list[Progress]]:
    told: list[Progress] = []
    engine = make_engine()
    done = evaluate_into(
        directory, engine, problems(), TOKENIZER, settings, ByLength(), on_progress=told.append
    )
    return done, told


@pytest.mark.parametrize("tail", [b"", b'{"version":1,"prompt_ids":[8,'], ids=["whole", "torn"])
def test_a_killed_evaluation_goes_on_to_the_same_numbers(tmp_path: Path, tail: bytes) -> None:
    begin(tmp_path / "e")
    assert not is_evaluation(tmp_path / "e")
    with (tmp_path / "e" / JOURNAL_FILE).open("ab") as file:
        file.write(tail)
    begin(tmp_path / "e", 14)  # which writes behind what was torn
    done, told = go_on(tmp_path / "e")
    assert len(told) == 24 - 14
    assert [p.num_finished for p in told] == list(range(15, 25))
    assert told[0].num_tokens > told[0].response.trajectory.stop_length  # the first call's count too
    whole = run()
    assert_same(done.responses, whole.responses)
    assert timeless(done.summary) == timeless(whole.summary)
    assert lines(read_evaluation(tmp_path / "e")) == lines(done)
    assert sorted(p.name for p in (tmp_path / "e").iterdir()) == [
        "pieces.json", "problems.jsonl", "responses.jsonl", "summary.json"
    ]  # fmt: skip


def test_several_kills_add_up(tmp_path: Path) -> None:
    for count in (3, 8, 20):
        begin(tmp_path / "e", count)
    done, told = go_on(tmp_path / "e")
    assert len(told) == 4
    assert_same(done.responses, run().responses)


def test_time_is_that_of_all_calls() -> None:
    engine = make_engine()
    kept = Kept({}, seconds=1000.0)
    done = evaluate(engine, problems(), TOKENIZER, SETTINGS, ByLength(), kept=kept)
    assert 1000 < done.summary.time.seconds < 1100


def test_other_conditions_are_not_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path / "e")
    other = replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=0.5))
    with pytest.raises(UserError, match=r"temperature: was evaluated with 1.0, asked for is 0.5; choose"):
        go_on(tmp_path / "e", other)
    assert len(go_on(tmp_path / "e")[1]) == 14  # and nothing was lost


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"version": 1}\n', b"[]\n"])
def test_a_damaged_journal_is_named(tmp_path: Path, line: bytes) -> None:
    begin(tmp_path / "e")
    with (tmp_path / "e" / JOURNAL_FILE).open("ab") as file:
        file.write(line)
    with pytest.raises(UserError, match=f"{JOURNAL_FILE}: is damaged.*remove it"):
        go_on(tmp_path / "e")


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    def intrude(progress: Progress) -> None:
        with pytest.raises(UserError, match="another process writes it"):
            go_on(tmp_path / "e")
        raise StopError

    engine = make_engine()
    with pytest.raises(StopError):
        evaluate_into(
            tmp_path / "e", engine, problems(), TOKENIZER, SETTINGS, ByLength(), on_progress=intrude
        )


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written .*choose another --out"):
        go_on(tmp_path / "file" / "e")


# -- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (UnmaskPolicy(), "static k=1"),
        (UnmaskPolicy(tokens_per_step=4), "static k=4"),
        (UnmaskPolicy(steps_per_block=2), "static S=2"),
        (UnmaskPolicy("dynamic", confidence_threshold=0.9), "dynamic 0.9"),
        (UnmaskPolicy("dynamic", 2, None, 0.95, confidence="sampled"), "dynamic 0.95 k=2 sampled"),
        (UnmaskPolicy("entropy", entropy_bound=0.5), "entropy 0.5"),
        (UnmaskPolicy("random", tokens_per_step=3), "random k=3"),
    ],
)  # fmt: skip
def test_policies_have_names(policy: UnmaskPolicy, words: str) -> None:
    assert describe_policy(policy) == words


def test_the_scorer_is_the_rewards_themselves() -> None:
    tokenizer: PreTrainedTokenizerBase = TOKENIZER
    with Rewards([RewardSpec("chain"), RewardSpec("chain_steps")]) as rewards:
        done = evaluate(make_engine(), problems(), tokenizer, SETTINGS, rewards)
    assert done.summary.conditions.reward == "chain"
    assert done.summary.accuracy.value == 0  # a random model
    for share in (done.summary.accuracy, done.summary.pass_at[3]):
        assert (share.low, share.high) == (0, pytest.approx(1 - 0.025 ** (1 / 8)))  # which is not certain
