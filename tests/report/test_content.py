"""What a report says: the numbers, the verdict, and what is missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from fake_runs import Evaluated, make_evaluation, make_response, make_run, write_lines
from tstar.errors import UserError
from tstar.report import schedules
from tstar.report.content import build
from tstar.report.methods import guess_slot
from tstar.report.page import render, to_json
from tstar.report.record import Report
from tstar.report.sources import find
from tstar.schedule import analyze, read_responses

T8 = Evaluated("T*", 8, 0.6)


def notices(report: Report) -> list[str]:
    return [f"{n.source}: {n.text}" for n in report.notices]


def methods(report: Report) -> list[tuple[str, str]]:
    return [(m.name, m.slot) for m in report.methods]


# -- an experiment -----------------------------------------------------------------------------


def test_an_experiment_is_found_whole(world_report: Report) -> None:
    report = world_report
    assert [run.name for run in report.runs] == ["direct-b16", "direct-b8", "tstar"]
    assert [[s.block_size for s in run.stages] for run in report.runs] == [[16], [8], [4, 8, 16]]
    assert len(report.evaluations) == 16
    assert methods(report) == [
        ("AR", "ar"),
        ("base", "base"),
        ("TraceRL", "tracerl"),
        ("T*", "tstar"),
    ]
    assert [world_report.methods[run.method].name for run in report.runs] == ["TraceRL", "TraceRL", "T*"]
    assert [b.block_size for b in report.validation.bases] == [4, 8, 16]
    assert {d.field for d in report.differences} == {"seed", "curriculum.block_sizes"}


def test_numbers_are_those_of_the_evaluations(world: Path, world_report: Report) -> None:
    report = world_report
    summary = json.loads((world / "eval" / "tracerl-b16" / "summary.json").read_text())
    (score,) = (s for s in report.scores if report.methods[s.method].name == "TraceRL" and s.block_size == 16)
    assert score.accuracy is not None
    assert score.accuracy.value == summary["accuracy"]["value"]
    assert (score.accuracy.low, score.accuracy.high) == (
        summary["accuracy"]["low"],
        summary["accuracy"]["high"],
    )
    found = analyze(read_responses(world / "eval" / "tracerl-b16" / "responses.jsonl"))
    (figure,) = (f for f in report.schedules if f.name == "eval/tracerl-b16")
    assert figure.local_strict == pytest.approx(found.local_strict, abs=1e-4)
    assert figure.tokens_per_forward == pytest.approx(found.tokens_per_forward, abs=1e-4)
    assert figure.num_tokens == found.num_tokens


def test_ar_models_stand_beside_every_way_of_decoding_the_same_problems(world_report: Report) -> None:
    report = world_report
    ar = [report.settings[s.setting] for s in report.scores if report.methods[s.method].slot == "ar"]
    assert ar == ["math500 · dynamic 0.9"]


@pytest.mark.parametrize(
    ("accuracies", "half"),
    [
        ((0.59, 0.6, 0.61), 4.303 * 0.01 / 3**0.5),
        ((0.6, 0.6, 0.6), 0.021),  # seeds that agree say no more of other problems than one of them
    ],
)
def test_several_seeds_of_a_method_are_one_point(
    tmp_path: Path, accuracies: tuple[float, ...], half: float
) -> None:
    for seed, accuracy in enumerate(accuracies):
        make_evaluation(tmp_path / f"seed{seed}" / "eval", Evaluated("T*", 8, accuracy), seed=seed)
    report = build([tmp_path])
    (score,) = report.scores
    assert score.num_evaluations == 3
    assert {s: i.value for s, i in score.by_seed.items()} == dict(zip("012", accuracies, strict=True))
    assert score.accuracy is not None
    assert (score.accuracy.value, score.accuracy.low, score.accuracy.high) == pytest.approx(
        (0.6, 0.6 - half, 0.6 + half)
    )
    (figure,) = report.schedules  # of all three files
    assert (figure.num_files, figure.num_responses) == (3, 72)
    assert {r.file for r in report.samples.responses} <= {"seed 0", "seed 1", "seed 2"}


def test_seeds_of_a_run_are_one_arm(tmp_path: Path) -> None:
    lengths = {0: 10, 1: 10, 2: 7}
    for seed, num_updates in lengths.items():
        make_run(tmp_path / f"seed{seed}" / "tstar", [(4, 5), (8, num_updates)], seed=seed)
        make_run(tmp_path / f"seed{seed}" / "direct-b8", [(8, 5)], seed=10 + seed)
    make_run(tmp_path / "tstar-long", [(4, 5)])
    report = build([tmp_path])
    assert [(a.name, len(a.runs)) for a in report.arms] == [("direct-b8", 3), ("tstar", 3), ("tstar-long", 1)]
    assert {report.runs[i].name for i in report.arms[1].runs} == {f"seed{s}/tstar" for s in lengths}
    (direct, tstar) = report.validation.means
    assert (direct.arm, tstar.arm) == (0, 1)
    # As far as all seeds go: the third was killed after update 12.
    assert [[p.update_step for p in s] for s in tstar.segments] == [[0, 5], [5, 10]]
    first = [c.segments[0][0].accuracy.value for c in report.validation.curves[1:6:2]]
    assert tstar.segments[0][0].accuracy.value == pytest.approx(sum(first) / 3)
    (reward,) = (p for p in report.health.panels if p.name == "reward")
    assert [x for x, _ in reward.means[1].points] == list(range(1, 13))
    assert [b.block_size for b in report.validation.bases] == [4, 8]  # what the runs began with
    assert report.validation.bases_setting == ""


def test_differences_are_those_of_arms(tmp_path: Path) -> None:
    for seed in range(2):
        for name, rate in (("tstar", "0.1"), ("direct-b8", "0.2")):
            run = make_run(tmp_path / f"seed{seed}" / name, [(8, 2)], seed=seed)
            stages = (
                f"stages: {{8: {{policies: null, num_updates: 2}}}}\nmodel: /a/long/way/to/{seed}/of/{name}"
            )
            text = f"seed: {seed}\nrate: {rate}\nengine: {{memory: {seed}}}\n"
            (run / "config.yaml").write_text(text + (stages if name == "tstar" else ""))
    report = build([tmp_path])
    assert [arm.name for arm in report.arms] == ["direct-b8", "tstar"]
    assert {d.field: d.values for d in report.differences} == {
        "seed": ("0, 1", "0, 1"),
        "rate": ("0.2", "0.1"),
        "stages.8.num_updates": ("–", "2"),
        "model": ("–", "/a/long/way/to/0/of/tstar and 1 more"),
    }


def test_the_trained_policy_comes_first_and_the_runs_own_validations_do_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tstar", [(8, 5)])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    write_lines(run / "metrics.jsonl", [json.dumps(json.loads(e) | {"policy": "static k=4"}) for e in lines])
    make_evaluation(run / "eval" / "000005-b8", Evaluated("", 8, 0.9, policy="static k=4", data="validation"))
    for policy in ("dynamic 0.9", "static k=4"):
        for label in ("base", "T*"):
            make_evaluation(tmp_path / "eval" / label / policy, Evaluated(label, 8, 0.5, policy=policy))
    report = build([tmp_path])
    assert report.settings == ("math500 · static k=4", "math500 · dynamic 0.9", "validation · static k=4")
    assert {s.setting for s in report.scores} == {0, 1}
    assert [e.is_selected for e in report.evaluations] == [True] * 4 + [False]
    assert report.facts == ("validated with static k=4",)


def test_a_method_that_was_not_evaluated_is_shown_by_its_runs_own_validations(tmp_path: Path) -> None:
    make_evaluation(tmp_path / "ar", Evaluated("AR", 1, 0.9, data="test"))
    for name in ("tstar", "direct-b8"):
        run = make_run(tmp_path / name, [(8, 5)], is_ended=name != "tstar")
        make_evaluation(run / "eval" / "000005-b8", Evaluated("", 8, 0.5, update_step=5))
    report = build([tmp_path])
    assert [report.methods[s.method].name for s in report.scores] == ["TraceRL", "T*", "AR"]
    assert report.settings[1] == "test · dynamic 0.9"  # AR models decode in their own way
    assert report.verdict[0].numbers.endswith(" Not finished: T*.")
    assert report.verdict[0].text == "math500 · dynamic 0.9, B = 8: T* and TraceRL are equal."


def test_a_run_is_judged_by_its_best_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tstar", [(8, 10)], evaluate_every=5)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "validation":
            event["is_best"] = event["update_step"] == 5
    write_lines(run / "metrics.jsonl", [json.dumps(e) for e in events])
    for update, accuracy in ((0, 0.5), (5, 0.6), (10, 0.55)):
        how = Evaluated("", 8, accuracy, update_step=update)
        make_evaluation(run / "eval" / f"{update:06}-b8", how)
    report = build([run])
    assert [e.update_step for e in report.evaluations if e.is_selected] == [5]
    assert methods(report) == [("T*", "tstar")]  # named by its run


def test_each_method_has_an_accent_of_its_own(tmp_path: Path) -> None:
    for label in ("base", "SFT jump", "mine", "T*"):
        make_evaluation(tmp_path / label, Evaluated(label, 8, 0.5, num_problems=1))
    assert methods(build([tmp_path])) == [
        ("SFT jump", "other1"),
        ("base", "base"),
        ("T*", "tstar"),
        ("mine", "other2"),
    ]


def test_settings_are_never_mixed(tmp_path: Path) -> None:
    for number, policy in enumerate(("static k=4", "dynamic 0.9")):
        make_evaluation(tmp_path / f"base{number}", Evaluated("base", 8, 0.5, policy=policy))
        make_evaluation(tmp_path / f"t{number}", Evaluated("T*", 8, 0.6, policy=policy))
    report = build([tmp_path])
    assert len(report.settings) == 2
    assert all(s.num_evaluations == 1 for s in report.scores)
    assert [c.text.split(",")[0] for c in report.verdict] == ["math500 · static k=4", "math500 · dynamic 0.9"]


@pytest.mark.parametrize(
    ("label", "slot"),
    [
        ("T*", "tstar"),
        ("tstar-b16", "tstar"),
        ("runs/T⋆", "tstar"),
        ("TraceRL", "tracerl"),
        ("direct-b8", "tracerl"),
        ("base", "base"),
        ("SFT jump", "base"),
        ("b16", "base"),
        ("AR", "ar"),
        ("Qwen3-1.7B", "ar"),
        ("mine", None),
        ("arena", None),
    ],
)
def test_methods_are_known_by_name(label: str, slot: str | None) -> None:
    assert guess_slot(label) == slot


# -- the verdict -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [
        (0.6, "T* is 10.0 points ahead of base; the intervals do not overlap."),
        (0.53, "T* is 3.0 points ahead of base, but the intervals overlap: these data do not separate them."),
        (0.4, "T* is 10.0 points behind base; the intervals do not overlap."),
        (0.5, "T* and base are equal."),
    ],
)
def test_the_verdict_says_what_the_intervals_allow(tmp_path: Path, accuracy: float, verdict: str) -> None:
    make_evaluation(tmp_path / "base", Evaluated("base", 16, 0.5))
    make_evaluation(tmp_path / "t", Evaluated("T*", 16, accuracy))
    (claim,) = build([tmp_path]).verdict
    assert claim.text == f"B = 16: {verdict}"
    assert claim.numbers.startswith("math500 · dynamic 0.9: ")
    assert "base 50.0 % [47.9, 52.1] at TPF " in claim.numbers


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ((0.02, 0.03, 0.04), "T* is 3.0 points [0.5, 5.5] ahead of TraceRL over 3 seeds."),
        (
            (0.0, 0.02, 0.04),
            (
                "T* is 2.0 points [-3.0, 7.0] ahead of TraceRL over 3 seeds, "
                "but the interval holds 0: these data do not separate them."
            ),
        ),
        ((-0.02, -0.03, -0.04), "T* is 3.0 points [0.5, 5.5] behind TraceRL over 3 seeds."),
        (
            (0.02,),
            "T* is 2.0 points ahead of TraceRL, but the intervals overlap: these data do not separate them.",
        ),
    ],
)
def test_seeds_are_compared_one_by_one(tmp_path: Path, gains: tuple[float, ...], verdict: str) -> None:
    """Bases differ more from seed to seed than methods do: only the differences are steady."""
    for seed, gain in enumerate(gains):
        start = 0.4 + 0.1 * seed
        for name, label, accuracy in (("direct-b8", "TraceRL", start), ("tstar", "T*", start + gain)):
            make_evaluation(tmp_path / f"seed{seed}" / "eval" / name, Evaluated(label, 8, accuracy))
    (claim,) = build([tmp_path]).verdict
    assert claim.text == f"B = 8: {verdict}"
    assert (", means of 3 seeds: " in claim.numbers) == (len(gains) == 3)


def test_t_star_is_compared_even_if_it_is_last(tmp_path: Path) -> None:
    for label, accuracy in (("base", 0.6), ("TraceRL", 0.55), ("T*", 0.4)):
        make_evaluation(tmp_path / label, Evaluated(label, 8, accuracy))
    (claim,) = build([tmp_path]).verdict
    assert claim.text == "B = 8: T* is 20.0 points behind base; the intervals do not overlap."


def test_the_verdict_claims_nothing_without_intervals(tmp_path: Path) -> None:
    for label, accuracy in (("base", 0.2), ("T*", 0.9)):
        make_evaluation(tmp_path / label, Evaluated(label, 8, accuracy), accuracy={"value": accuracy})
    (claim,) = build([tmp_path]).verdict
    assert claim.text.endswith("these data do not separate them.")


def test_nothing_solved_is_no_draw(tmp_path: Path) -> None:
    for label in ("base", "T*"):
        make_evaluation(tmp_path / label, Evaluated(label, 8, 0.0))
    (claim,) = build([tmp_path]).verdict
    assert claim.text == "B = 8: no method has solved a problem."


def test_the_guard_is_named(world_report: Report) -> None:
    assert "direct-b16: the guard warned at update 38" in " ".join(c.text for c in world_report.verdict)


# -- what is missing ---------------------------------------------------------------------------


def test_a_run_in_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 6)], is_ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "upd')
    report = build([run])
    said = " ".join(notices(report))
    assert "run: metrics.jsonl ends in half a line, which is left out" in said
    assert "run: has no end: it is in progress or was killed" in said
    assert "no evaluation was found" in said
    assert report.runs[0].status == "in progress or interrupted, 6 updates done"
    assert len(report.validation.curves) == 1
    assert len(report.health.panels) == 9
    assert "best validation accuracy at B = 4" in report.verdict[0].text
    render(report)


def test_a_run_that_has_said_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("a: [")
    report = build([run])
    said = " ".join(notices(report))
    for text in ("metrics.jsonl is missing", "config.yaml is no YAML", "no update yet", "never validated"):
        assert text in said
    render(report)


def test_an_sft_run_is_no_run_of_the_curriculum(tmp_path: Path) -> None:
    make_run(tmp_path / "tstar", [(4, 2)])
    sft = tmp_path / "b4"
    sft.mkdir()
    (sft / "config.yaml").write_text("data: chain:3\n")
    write_lines(sft / "metrics.jsonl", ['{"event": "sft", "optimizer_step": 1, "loss": 1.0, "time": {}}'])
    report = build([tmp_path])
    assert [run.name for run in report.runs] == ["tstar"]
    assert "report: runs of `tstar sft` are left out: b4" in notices(report)


def test_torn_and_foreign_responses(tmp_path: Path) -> None:
    path = make_evaluation(tmp_path / "e", T8) / "responses.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "version": 2})
    path.write_text("\n".join(lines) + "\n" + lines[0][:50])
    report = build([tmp_path])
    said = " ".join(notices(report))
    assert "responses.jsonl ends in half a line, which is left out" in said
    assert "1 of 24 lines are left out; responses.jsonl:2: version: 2 is not this program's 1" in said
    assert report.schedules[0].num_responses == 23


def test_a_last_line_without_its_break_is_whole(tmp_path: Path) -> None:
    path = make_evaluation(tmp_path / "e", T8) / "responses.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    report = build([tmp_path])
    assert report.schedules[0].num_responses == 24
    assert not any("half a line" in text for text in notices(report))


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("summary.json", '{"version": 2}', "version 2 is not this program's 1; left out"),
        ("summary.json", '{"version": 1, "bl', "cannot be read (no JSON; was it cut short?)"),
        ("summary.json", '{"version": 1}', "block_size is missing; left out"),
        ("summary.json", '{"version": 1, "block_size": 8}', "accuracy, tokens_per_forward, local_strict"),
        ("pieces.json", None, "pieces.json is missing: tokens are shown by their ids"),
        ("pieces.json", "{", "pieces.json cannot be read"),
        ("problems.jsonl", None, "problems.jsonl is missing"),
        ("problems.jsonl", '{"id"', "problems.jsonl cannot be read to its end"),
        ("responses.jsonl", "", "responses.jsonl holds no responses"),
        ("responses.jsonl", "{}\n[]\n", "2 of 2 lines are left out; responses.jsonl:1: version: None is not"),
    ],
)
def test_a_broken_evaluation(tmp_path: Path, file: str, content: str | None, text: str) -> None:
    make_evaluation(tmp_path / "whole", Evaluated("base", 8, 0.5))
    broken = make_evaluation(tmp_path / "broken", T8) / file
    broken.unlink()
    if content is not None:
        broken.write_text(content)
    report = build([tmp_path])
    assert any(said.startswith("broken:") and text in said for said in notices(report))
    assert any(report.methods[s.method].name == "base" for s in report.scores)
    render(report)


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 6)])
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "train" and event["update_step"] == 3:
            event |= {"kl_old": "nan", "grad_norm": "inf"}
    write_lines(run / "metrics.jsonl", [json.dumps(e) for e in events])
    report = build([run])
    assert "run: kl_old, grad_norm not finite (first at update 3): gaps in the curves" in notices(report)
    (kl,) = (p for p in report.health.panels if p.name == "kl")
    assert [x for x, _ in kl.curves[0].segments[0]] == [1, 2, 4, 5, 6]
    json.loads(to_json(report).replace("\\u0026", "&"))


def test_passes_that_were_refused_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 3)])
    refused = {"event": "train", "update_step": 2, "block_size": 4, "pass": 0, "refused": "log-probs: NaN"}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(refused) + "\n")
    said = "run: 1 passes were not trained on (first at update 2): log-probs: NaN"
    assert said in notices(build([run]))


def test_a_kl_of_zero_is_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 3)])
    kinds = {p.name: p.kind for p in build([run]).health.panels}
    assert (kinds["kl"], kinds["ratio"]) == ("log", "log")
    text = (run / "metrics.jsonl").read_text()
    events = [json.loads(line) | {"kl_old": 0.0} for line in text.splitlines()]
    write_lines(run / "metrics.jsonl", [json.dumps(e) for e in events])
    kinds = {p.name: p.kind for p in build([run]).health.panels}
    assert (kinds["kl"], kinds["ratio"]) == ("number", "log")


def test_a_roll_back_begins_a_new_segment(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 6)])
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    again = [e for e in events if e["event"] == "train" and e["update_step"] >= 4]
    guard = {
        "event": "guard",
        "update_step": 6,
        "signal": "kl",
        "message": "too far",
        "action": "roll_back",
        "time": {},
    }
    write_lines(run / "metrics.jsonl", [json.dumps(e) for e in (*events[:-1], guard, *again, events[-1])])
    report = build([run])
    (reward,) = (p for p in report.health.panels if p.name == "reward")
    assert [[x for x, _ in s] for s in reward.curves[0].segments] == [[1, 2, 3, 4, 5, 6], [4, 5, 6]]
    assert "the guard rolled it back at update 6: too far" in report.verdict[0].text


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        build([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no run, no evaluation"):
        build([tmp_path])


# -- files alone, and many of them -------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_trajectories_alone_make_a_report(tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(0)
    lines = "".join(make_response(rng, None, None, 8, num_tokens=20).to_json() + "\n" for _ in range(3))
    path = tmp_path / f"mine{ending}"
    path.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    report = build([path])
    (figure,) = report.schedules
    assert (figure.method, figure.num_responses, figure.accuracy) == (None, 3, None)
    assert report.samples.pieces[0].startswith("⟨")
    assert report.samples.responses[0].is_correct is None


def test_a_compressed_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 5)])
    (plain,) = (run / "rollouts").iterdir()
    compressed = gzip.compress(plain.read_bytes())
    plain.unlink()
    (run / "rollouts" / "000005.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
    assert any("000005.jsonl.gz cannot be read" in text for text in notices(build([run])))


def test_a_large_run_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 updates, 100 000 stored trajectories (types are checked here: fewer of them are read)."""
    monkeypatch.setattr(schedules, "MAX_RESPONSES", 50)
    run = make_run(tmp_path / "run", [(4, 100), (8, 100)], rollouts_every=100, num_rollouts=20)
    for first, last in ((1, 100), (101, 200)):
        written = run / "rollouts" / f"{last:06}.jsonl"
        written.write_bytes(written.read_bytes() * 25)
        for update in range(first, last):
            (run / "rollouts" / f"{update:06}.jsonl").hardlink_to(written)
    report = build([run])
    page = render(report)
    assert len(page.encode()) < 10_000_000
    said = notices(report)
    assert "run: rollouts of 3 of 200 stored update steps are looked at" in said
    names = ", ".join(f"run/rollouts/{update:06}.jsonl" for update in (1, 100, 200))
    assert f"{names}: schedules are from 50 of 500 stored responses" in said
    assert [f.block_size for f in report.schedules] == [4, 4, 8]


def test_an_evaluation_is_sampled_in_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MAX_RESPONSES", 50)
    make_evaluation(tmp_path / "e", Evaluated("T*", 4, 0.5, num_problems=2, num_samples=3))
    path = tmp_path / "e" / "responses.jsonl"
    lines = path.read_text().splitlines()
    large = [
        json.dumps({**json.loads(line), "problem": f"p{number}"})
        for number in range(400)
        for line in lines[:3]
    ]
    write_lines(path, large)
    report = build([tmp_path])
    (figure,) = report.schedules
    assert (figure.num_responses, figure.num_stored) == (48, 1200)
    assert figure.distinct_schedules == 1.0


def test_runs_and_evaluations_are_found_at_any_depth(world: Path) -> None:
    found = find([world])
    assert (len(found.runs), len(found.evaluations), len(found.trajectories)) == (3, 16, 0)
    assert find([world / "tstar" / "eval"]).evaluations == tuple(sorted((world / "tstar" / "eval").iterdir()))
    assert find([world, world / "tstar"]).runs == found.runs
