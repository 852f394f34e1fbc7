"""From what lies on disk to what a report says.

Numbers of an evaluation are its own (`summary.json`), with its intervals. Only schedules are computed
here, from samples of the stored responses, and the record says from how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from tstar.report import verdict
from tstar.report.curves import draw_health, draw_validation
from tstar.report.methods import Methods, name_run, number_methods
from tstar.report.record import Difference, EvaluationView, Report, RunView, Score
from tstar.report.schedules import ResponseSource, read_schedules
from tstar.report.sources import (
    EvaluationSource,
    Found,
    Interval,
    Notice,
    RunSource,
    find,
    name_paths,
    read_evaluation,
    read_run,
)


@dataclass(frozen=True)
class Setting:
    """How responses were decoded, and to which problems: only numbers of one setting may be compared."""

    data: str
    policy: str
    temperature: float | None
    max_tokens: int | None

    @property
    def name(self) -> str:
        temperature = "" if self.temperature in (None, 1.0) else f"T = {self.temperature:g}"
        parts = (short_name(self.data), self.policy, temperature)
        return " · ".join(part for part in parts if part) or "unknown"


def build(paths: Sequence[Path]) -> Report:
    """Read everything under the paths and say it."""
    found = find(paths)
    names = name_paths(found.all)
    notices: list[Notice] = []
    read = [read_run(path, names[path], notices) for path in found.runs]
    runs = [run for run in read if not run.is_sft]
    evaluations = _read_evaluations(found, names, notices)
    methods = number_methods([e.label for e in evaluations], [_run_label(r, evaluations) for r in runs])
    settings = tuple(dict.fromkeys(_setting(e) for e in evaluations))
    views = _view_evaluations(evaluations, runs, methods, settings)
    scores = _with_ar(list(_scores(views)), methods, settings)
    run_views = tuple(
        RunView(
            name=run.name,
            method=methods.index(_run_label(run, evaluations)),
            status=_status(run),
            is_running=not run.is_ended,
            stages=run.stages,
            guards=run.guards,
            config_yaml=run.config_yaml,
        )
        for run in runs
    )
    _note_runs(runs, evaluations, notices)
    if len(runs) < len(read):
        left_out = ", ".join(run.name for run in read if run.is_sft)
        notices.append(Notice("report", f"runs of `tstar sft` are left out: {left_out}"))
    sources = _response_sources(found, names, runs, evaluations, views, run_views, notices)
    schedules, samples = read_schedules(sources, notices)
    report = Report(
        title=_title(paths),
        verdict=(),
        notices=(),
        methods=methods.all,
        runs=run_views,
        settings=tuple(s.name for s in settings),
        evaluations=views,
        scores=tuple(scores),
        validation=draw_validation(runs, *_bases(views, evaluations, methods, runs, settings)),
        health=draw_health(runs, notices),
        schedules=schedules,
        samples=samples,
        differences=tuple(_differences(runs)),
    )
    if not evaluations:
        notices.append(Notice("report", "no evaluation was found: accuracy is the runs' own validation"))
    return replace(report, verdict=tuple(verdict.sentences(report)), notices=tuple(notices))


# -- names -------------------------------------------------------------------------------------


def short_name(data: str) -> str:
    """A data set by its file's name, or as it is: "gsm8k@test", "chain:3"."""
    return Path(data).stem if data.endswith((".jsonl", ".json", ".parquet", ".gz")) else data


def _title(paths: Sequence[Path]) -> str:
    return ", ".join(dict.fromkeys(path.resolve().name for path in paths))


def _setting(evaluation: EvaluationSource) -> Setting:
    return Setting(evaluation.data, evaluation.policy, evaluation.temperature, evaluation.max_tokens)


# -- runs --------------------------------------------------------------------------------------


def _run_label(run: RunSource, evaluations: Sequence[EvaluationSource]) -> str:
    """The method of a run: what its evaluations are called, if they agree."""
    labels = {e.label for e in evaluations if e.run == run.name}
    return labels.pop() if len(labels) == 1 else name_run(run.name, [e.label for e in evaluations])


def _status(run: RunSource) -> str:
    done = f"{run.update_step} updates done"
    if not run.is_ended:
        return f"in progress or interrupted, {done}"
    return f"finished, {done}" if run.end_reason is None else f"stopped: {run.end_reason}; {done}"


def _note_runs(
    runs: Sequence[RunSource], evaluations: Sequence[EvaluationSource], notices: list[Notice]
) -> None:
    for run in runs:
        if not run.is_ended:
            notices.append(Notice(run.name, f"has no end: it is in progress or was killed ({_status(run)})"))
        if not run.train:
            notices.append(Notice(run.name, "has done no update yet"))
        if not run.validations:
            notices.append(Notice(run.name, "was never validated: it has no accuracy curve"))
        if evaluations and not any(e.run == run.name for e in evaluations):
            notices.append(Notice(run.name, "has no evaluation of its own"))


def _differences(runs: Sequence[RunSource]) -> Iterator[Difference]:
    fields = dict.fromkeys(field for run in runs for field in run.config)
    for field in fields:
        values = tuple(run.config.get(field, "–") for run in runs)
        if len(set(values)) > 1:
            yield Difference(field, values)


# -- evaluations -------------------------------------------------------------------------------


def _read_evaluations(
    found: Found, names: Mapping[Path, str], notices: list[Notice]
) -> list[EvaluationSource]:
    evaluations = []
    for path in found.evaluations:
        run = next((r for r in found.runs if r.resolve() in path.resolve().parents), None)
        read = read_evaluation(path, names[path], None if run is None else names[run], notices)
        if read is not None:
            evaluations.append(read)
    labels = [e.label for e in evaluations if e.label]
    return [
        e if e.label else replace(e, label=e.name if e.run is None else name_run(e.run, labels))
        for e in evaluations
    ]


def _view_evaluations(
    evaluations: Sequence[EvaluationSource],
    runs: Sequence[RunSource],
    methods: Methods,
    settings: Sequence[Setting],
) -> tuple[EvaluationView, ...]:
    selected = {id(e) for e in _select(evaluations, runs)}
    return tuple(
        EvaluationView(
            name=e.name,
            method=methods.index(e.label),
            setting=settings.index(_setting(e)),
            block_size=e.block_size,
            offset=e.offset,
            update_step=e.update_step,
            num_problems=e.num_problems,
            num_samples=e.num_samples,
            accuracy=e.accuracy,
            pass_at=e.pass_at,
            tokens_per_forward=e.tokens_per_forward,
            local_strict=e.local_strict,
            mean_length=e.mean_length,
            truncated=e.truncated,
            tokens_per_second=e.tokens_per_second,
            is_selected=id(e) in selected,
        )
        for e in evaluations
    )


def _select(evaluations: Sequence[EvaluationSource], runs: Sequence[RunSource]) -> Iterator[EvaluationSource]:
    """All that stand alone; of a run, one for each block size and setting: its best by validation (the
    paper's rule), else its last."""
    groups: dict[tuple[object, ...], list[EvaluationSource]] = {}
    for e in evaluations:
        key = (e.run, e.block_size, e.offset, _setting(e)) if e.run is not None else (e.name,)
        groups.setdefault(key, []).append(e)
    by_name = {run.name: run for run in runs}
    for group in groups.values():
        first = group[0]
        best = None
        if first.run in by_name:
            bests = [v for v in by_name[first.run].validations if v.is_best]
            best = next((v.update_step for v in reversed(bests) if v.block_size == first.block_size), None)
        chosen = next((e for e in group if e.update_step == best and best is not None), None)
        yield chosen or max(group, key=lambda e: -1 if e.update_step is None else e.update_step)


def _scores(views: Sequence[EvaluationView]) -> Iterator[Score]:
    cells: dict[tuple[int, int, int], list[EvaluationView]] = {}
    for view in views:
        if view.is_selected and view.offset == 0:
            cells.setdefault((view.setting, view.block_size, view.method), []).append(view)
    for (setting, block_size, method), cell in sorted(cells.items()):
        yield Score(
            setting=setting,
            method=method,
            block_size=block_size,
            accuracy=_together([v.accuracy for v in cell]),
            tokens_per_forward=_together([v.tokens_per_forward for v in cell]),
            local_strict=_together([v.local_strict for v in cell]),
            num_evaluations=len(cell),
            num_samples=cell[0].num_samples,
            num_problems=cell[0].num_problems,
        )


def _with_ar(scores: Sequence[Score], methods: Methods, settings: Sequence[Setting]) -> list[Score]:
    """AR models are decoded in their own way only; they stand beside every way of decoding the same problems,
    as in the paper's table."""
    found = []
    for score in scores:
        is_ar = methods.all[score.method].slot == "ar"
        same_data = {
            other.setting
            for other in scores
            if is_ar and other.block_size > 1 and settings[other.setting].data == settings[score.setting].data
        }
        found += [replace(score, setting=setting) for setting in same_data or {score.setting}]
    return sorted(found, key=lambda s: (s.setting, s.block_size, s.method))


def _together(intervals: Sequence[Interval | None]) -> Interval | None:
    known = [i for i in intervals if i is not None]
    if len(known) <= 1:
        return known[0] if known else None
    values = [i.value for i in known]
    lows = [i.value if i.low is None else i.low for i in known]
    highs = [i.value if i.high is None else i.high for i in known]
    return Interval(mean(values), min(lows), max(highs))


def _bases(
    views: Sequence[EvaluationView],
    evaluations: Sequence[EvaluationSource],
    methods: Methods,
    runs: Sequence[RunSource],
    settings: Sequence[Setting],
) -> tuple[Mapping[int, Interval], str]:
    """The bases' accuracy at the runs' block sizes: the horizontal lines of the first figure.

    They are only comparable to validations on the same problems, so they come from the setting that the
    runs' own evaluations have, where there are any.
    """
    block_sizes = {s.block_size for run in runs for s in run.stages}
    own = [settings.index(_setting(e)) for e in evaluations if e.run is not None]
    bases = [
        v
        for v in views
        if methods.all[v.method].slot == "base"
        and v.accuracy is not None
        and v.offset == 0
        and (not block_sizes or v.block_size in block_sizes)
    ]
    candidates = own or [v.setting for v in bases]
    setting = max(candidates, key=candidates.count, default=None)
    lines = {v.block_size: v.accuracy for v in bases if v.setting == setting and v.accuracy is not None}
    return lines, settings[setting].name if setting is not None and lines else ""


# -- responses ---------------------------------------------------------------------------------


def _response_sources(
    found: Found,
    names: Mapping[Path, str],
    runs: Sequence[RunSource],
    evaluations: Sequence[EvaluationSource],
    views: Sequence[EvaluationView],
    run_views: Sequence[RunView],
    notices: list[Notice],
) -> list[ResponseSource]:
    """Where responses are looked at: the evaluations that stand for something; of a run without any, some of
    its rollouts; files that stand alone."""
    sources = []
    for e, view in zip(evaluations, views, strict=True):
        if view.is_selected:
            sources.append(
                ResponseSource(
                    path=e.responses,
                    name=e.name,
                    method=view.method,
                    setting=_setting(e).name,
                    data=e.data,
                    group_size=max(e.num_samples, 1),
                    evaluation=e.path,
                )
            )
    evaluated = {e.run for e in evaluations}
    for run, run_view in zip(runs, run_views, strict=True):
        if run.name not in evaluated:
            sources += _rollout_sources(run, run_view.method, notices)
    alone = (ResponseSource(path, names[path], None, names[path], names[path]) for path in found.trajectories)
    return [*sources, *alone]


def _rollout_sources(run: RunSource, method: int, notices: list[Notice]) -> list[ResponseSource]:
    """The first rollouts of a run, and the last of each of its stages."""
    updates = {int(digits): p for p in run.rollouts if (digits := p.name.split(".")[0]).isdecimal()}
    ends = [stage.update_step for stage in run.stages[1:]] + [max(updates, default=0)]
    lasts = [max((u for u in updates if u <= end), default=None) for end in ends]
    chosen = sorted({u for u in (min(updates, default=None), *lasts) if u is not None})
    if len(chosen) < len(updates):
        text = f"rollouts of {len(chosen)} of {len(updates)} stored update steps are looked at"
        notices.append(Notice(run.name, text))
    return [
        ResponseSource(
            path=updates[u],
            name=f"{run.name}/rollouts/{updates[u].name}",
            method=method,
            setting=f"rollouts of update {u}",
            data=f"{run.name}, update {u}",
        )
        for u in chosen
    ]
