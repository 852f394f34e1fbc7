"""From what lies on disk to what a report says.

Numbers of an evaluation are its own (`summary.json`), with its intervals. Only schedules are computed
here, from samples of the stored responses, and the record says from how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tstar.report import verdict
from tstar.report.curves import Arm, draw_health, draw_validation
from tstar.report.methods import Methods, name_run, number_methods
from tstar.report.record import Difference, EvaluationView, Report, RunView, Score
from tstar.report.schedules import ResponseSource, read_schedules
from tstar.report.seeds import mean_interval, split_seed
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
    settings = _order_settings(evaluations, runs)
    views = _view_evaluations(evaluations, runs, methods, settings)
    scores = _with_ar(list(_scores(views)), methods, settings)
    arms = _arms(runs, [methods.index(_run_label(run, evaluations)) for run in runs])
    run_views = tuple(
        RunView(
            name=run.name,
            arm=next(i for i, arm in enumerate(arms) if number in arm.runs),
            method=methods.index(_run_label(run, evaluations)),
            status=_status(run),
            is_running=not run.is_ended,
            stages=run.stages,
            guards=run.guards,
            config_yaml=run.config_yaml,
        )
        for number, run in enumerate(runs)
    )
    _note_runs(runs, evaluations, notices)
    if len(runs) < len(read):
        left_out = ", ".join(run.name for run in read if run.is_sft)
        notices.append(Notice("report", f"runs of `tstar sft` are left out: {left_out}"))
    sources = _response_sources(found, names, runs, evaluations, views, run_views, notices)
    schedules, samples = read_schedules(sources, notices)
    report = Report(
        title=_title(paths),
        facts=tuple(_facts(runs)),
        verdict=(),
        notices=(),
        methods=methods.all,
        arms=arms,
        runs=run_views,
        settings=tuple(s.name for s in settings),
        evaluations=views,
        scores=tuple(scores),
        validation=draw_validation(runs, arms, *_bases(views, evaluations, methods, runs, settings)),
        health=draw_health(runs, arms, notices),
        schedules=schedules,
        samples=samples,
        differences=tuple(_differences(runs, arms)),
    )
    if not evaluations:
        notices.append(Notice("report", "no evaluation was found: accuracy is the runs' own validation"))
    return replace(report, verdict=tuple(verdict.claims(report)), notices=_merge(notices))


# -- names -------------------------------------------------------------------------------------


def short_name(data: str) -> str:
    """A data set by its file's name, or as it is: "gsm8k@test", "chain:3"."""
    return Path(data).stem if data.endswith((".jsonl", ".json", ".parquet", ".gz")) else data


def _title(paths: Sequence[Path]) -> str:
    return ", ".join(dict.fromkeys(path.resolve().name for path in paths))


def _setting(evaluation: EvaluationSource) -> Setting:
    return Setting(evaluation.data, evaluation.policy, evaluation.temperature, evaluation.max_tokens)


def _order_settings(
    evaluations: Sequence[EvaluationSource], runs: Sequence[RunSource]
) -> tuple[Setting, ...]:
    """Those that were evaluated apart from any run first, and of these the policy that runs validate with;
    AR models' own way of decoding last."""
    apart = {_setting(e) for e in evaluations if e.run is None}
    in_blocks = {_setting(e) for e in evaluations if e.block_size > 1}
    trained = {v.policy for run in runs for v in run.validations}
    settings = dict.fromkeys(_setting(e) for e in evaluations)
    return tuple(
        sorted(settings, key=lambda s: (s not in in_blocks, s not in apart, s.policy not in trained))
    )


MAX_MERGED = 4


def _merge(notices: Sequence[Notice]) -> tuple[Notice, ...]:
    """One remark for all that it holds of."""
    sources: dict[str, list[str]] = {}
    for notice in notices:
        sources.setdefault(notice.text, []).append(notice.source)

    def name(own: Sequence[str]) -> str:
        names = list(dict.fromkeys(own))
        more = len(names) - MAX_MERGED
        return ", ".join(names[:MAX_MERGED]) + (f" and {more} more" if more > 0 else "")

    return tuple(Notice(name(own), text) for text, own in sources.items())


# -- runs --------------------------------------------------------------------------------------


def _run_label(run: RunSource, evaluations: Sequence[EvaluationSource]) -> str:
    """The method of a run: what its evaluations are called, if they agree."""
    labels = {e.label for e in evaluations if e.run == run.name}
    return labels.pop() if len(labels) == 1 else name_run(run.name, [e.label for e in evaluations])


def _arms(runs: Sequence[RunSource], methods: Sequence[int]) -> tuple[Arm, ...]:
    """Runs of one method whose names differ by a seed belong together."""
    members: dict[tuple[str, int], list[int]] = {}
    for number, (run, method) in enumerate(zip(runs, methods, strict=True)):
        name, seed = split_seed(run.name)
        members.setdefault((run.name if seed is None else name, method), []).append(number)
    return tuple(
        Arm(name if len(own) > 1 and name else runs[own[0]].name, method, tuple(own))
        for (name, method), own in members.items()
    )


_FACTS = (
    ("{}", ("data.source",)),
    ("{} × {} responses an update", ("rollout.num_problems", "rollout.num_samples")),
    ("learning rate {}", ("trainer.optimizer.learning_rate",)),
    ("β = {}", ("trainer.objective.kl_beta",)),
)


def _facts(runs: Sequence[RunSource]) -> Iterator[str]:
    """What a reader asks first, where all runs agree; the rest is under Configuration."""
    for text, fields in _FACTS:
        known = {tuple(run.config.get(field) for field in fields) for run in runs}
        if len(known) == 1 and None not in (values := known.pop()):
            yield text.format(*values)
    policies = {v.policy for run in runs for v in run.validations}
    if len(policies) == 1 and (policy := policies.pop()) is not None:
        yield f"validated with {policy}"


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
            notices.append(Notice(run.name, "has no end: it is in progress or was killed"))
        if not run.train:
            notices.append(Notice(run.name, "has done no update yet"))
        if not run.validations:
            notices.append(Notice(run.name, "was never validated: it has no accuracy curve"))
        label = _run_label(run, evaluations)
        if evaluations and not any(label in (e.label, e.run) for e in evaluations):
            notices.append(Notice(run.name, "has no evaluation"))


_OF_THE_MACHINE = ("engine.memory",)
"""What was free when the run began: no choice of anybody's."""
MAX_VALUES = 30


def _differences(runs: Sequence[RunSource], arms: Sequence[Arm]) -> Iterator[Difference]:
    fields = dict.fromkeys(field for run in runs for field in run.config if field not in _OF_THE_MACHINE)
    for field in fields:
        values = [run.config.get(field, "None") for run in runs]
        if len(set(values)) > 1:
            yield Difference(field, tuple(_seeds_value([values[i] for i in arm.runs]) for arm in arms))


def _seeds_value(values: Sequence[str]) -> str:
    """The field's value in the runs of an arm."""
    shown = [value if value != "None" else "–" for value in dict.fromkeys(values)]
    text = ", ".join(shown)
    return text if len(shown) == 1 or len(text) <= MAX_VALUES else f"{shown[0]} and {len(shown) - 1} more"


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
        replace(e, label=split_seed(e.label)[0] or e.label)
        if e.label
        else replace(e, label=e.name if e.run is None else name_run(e.run, labels))
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
    """All that stand alone. For methods without any, those of their runs, one for each block size and
    setting: the best by validation (the paper's rule), else the last. A run's own were what its best
    checkpoint was chosen by, so they flatter it."""
    groups: dict[tuple[object, ...], list[EvaluationSource]] = {}
    apart = {e.label for e in evaluations if e.run is None}
    for e in (e for e in evaluations if e.run is None or e.label not in apart):
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
            accuracy=mean_interval([v.accuracy for v in cell], top=1.0),
            tokens_per_forward=mean_interval([v.tokens_per_forward for v in cell]),
            local_strict=mean_interval([v.local_strict for v in cell], top=1.0),
            num_evaluations=len(cell),
            by_seed=_by_seed(cell),
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


def _by_seed(cell: Sequence[EvaluationView]) -> Mapping[str, Interval]:
    """Empty where a seed is not known, or not the only one of its name."""
    seeds = [split_seed(view.name)[1] for view in cell]
    known = {s: v.accuracy for s, v in zip(seeds, cell, strict=True) if s is not None and v.accuracy}
    return known if len(known) == len(cell) else {}


def _bases(
    views: Sequence[EvaluationView],
    evaluations: Sequence[EvaluationSource],
    methods: Methods,
    runs: Sequence[RunSource],
    settings: Sequence[Setting],
) -> tuple[Mapping[int, Interval | None], str]:
    """The bases' accuracy at the runs' block sizes, and its setting: the first figure's horizontal lines.

    They are only comparable to validations on the same problems, so they come from the setting that the
    runs' own evaluations have, where there are any. If no base was evaluated there, the runs' validations
    before their first update stand for it, and no setting is named.
    """
    block_sizes = {s.block_size for run in runs for s in run.stages}
    trained = {v.policy for run in runs for v in run.validations}
    of_runs = [e for e in evaluations if e.run is not None]
    alike = [e for e in of_runs if e.policy in trained] or of_runs
    own = [settings.index(_setting(e)) for e in alike]
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
    of_setting = [v for v in bases if v.setting == setting]
    sizes = dict.fromkeys(v.block_size for v in of_setting)
    lines = {b: mean_interval([v.accuracy for v in of_setting if v.block_size == b], 1.0) for b in sizes}
    name = settings[setting].name if setting is not None and lines else ""
    return (lines, name) if lines else (_starts(runs), "")


def _starts(runs: Sequence[RunSource]) -> Mapping[int, Interval | None]:
    """What runs began with: their validations before the first update, by block size."""
    firsts = [run.validations[0] for run in runs if run.validations and run.validations[0].update_step == 0]
    sizes = dict.fromkeys(v.block_size for v in firsts)
    return {b: mean_interval([v.accuracy for v in firsts if v.block_size == b], 1.0) for b in sizes}


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
    for e, view in sorted(zip(evaluations, views, strict=True), key=lambda pair: pair[1].setting):
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
                    offset=e.offset,
                )
            )
    evaluated = {view.method for view in views if view.is_selected}
    for run, run_view in zip(runs, run_views, strict=True):
        if run_view.method not in evaluated:
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
