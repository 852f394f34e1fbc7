"""`tstar eval`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tstar.engine import Engine
    from tstar.evaluate import Estimate, Progress, Summary
    from tstar.evaluate.sweep import Cell, Curve, EvalModel
    from tstar.rewards import Rewards
    from tstar.unmask import UnmaskPolicy

DEFAULT_POLICY = "dynamic:0.9"
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Eval:
    """Evaluate models: accuracy (avg@k and unbiased pass@k), tokens per forward, LocalStrict, all with 95 %
    intervals.

    Every combination of model, data, block size and policy is evaluated, each into a directory of its own
    under --out. Killed, the same command goes on where it was. An AR model is evaluated once, one token a
    forward.

        tstar eval base=SDAR-1.7B-Chat-b8 T*=run/best --data math500 gsm8k --block-size 8 --policy static:2

        tstar eval run/b4 --data chain:3@test --block-size 4 8 16 --threshold 0.6 0.7 0.8 0.9 --out eval
    """

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL|LABEL=MODEL...")]
    """Model directories (or runs of tstar sft), each with the name it has in tables. Default: that of the
    directory."""
    data: tuple[str, ...]
    """What to answer: presets (math500, gsm8k, aime24; math500:FILE without a network), .jsonl or .parquet
    files of {question, answer}, or generated tasks (chain:3@test)."""
    out: Path
    """Directory for the results; one that has some goes on."""

    block_size: tuple[int, ...] = ()
    """B. Default: what each model's config.json says."""
    policy: tuple[str, ...] = ()
    """Unmask policies: static:4 (4 tokens a step), static:S=2 (2 steps a block), dynamic:0.9,
    dynamic:0.9,k=2, sequential:2, random:2, entropy:0.5. Default: dynamic:0.9."""
    threshold: tuple[float, ...] = ()
    """Confidence thresholds η, each a policy dynamic:η: the curve of accuracy against tokens per forward."""
    offset: int = 0
    """Δ, how far the blocks are shifted."""
    origin: Literal["response", "sequence"] = "response"
    """Where blocks are counted from: the response's first token, or the sequence's (SDAR's generate.py)."""

    samples: int = 3
    """Responses to each problem: the k of avg@k."""
    limit: int | None = None
    """The first so many problems of each data set. Default: all (500 of a generated task)."""
    prompt: str | None = None
    """How a question becomes a prompt: math (the paper's instruction), chat (the question as the user's
    message), raw (the question alone), or a message of your own with {question} in it. Default: math; raw for
    a generated task."""
    reward: str | None = None
    """What decides that an answer is correct: math, exact, numeric, ..., or MODULE:FUNCTION. Default: math;
    the task's own for a generated one."""
    max_tokens: int | None = None
    """Longest response. Default: 2048, or what the model has positions for; what a generated task needs."""
    temperature: float = 1.0
    """0 takes the likeliest tokens."""
    top_k: int | None = None
    """Draw from the k likeliest tokens."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Every response has a seed of its own, made of this one, its problem and its sample."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the first GPU, or the CPU where there is none."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the weights. Default: as stored."""
    max_requests: int = 256
    """Responses decoded at once."""
    memory: float = 0.5
    """Share of the free memory for keys, values and activations."""
    json: bool = False
    """Print the results as JSON instead of tables; progress goes to stderr."""

    def run(self) -> None:
        from rich.console import Console

        from tstar.process import keep_freed_memory

        keep_freed_memory()
        cells = _plan(self)
        console = Console(stderr=self.json, width=None if sys.stdout.isatty() else 180)
        try:
            summaries = _evaluate(self, cells, console)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"what has finished is kept in {self.out}; the same command goes on"
            ) from interrupt
        results = _results_json(self.out, cells, summaries)
        _write_results(self.out / RESULTS_FILE, results)
        if self.json:
            print(results)
        else:
            print_tables(console, summaries)
            console.print(f"{self.out / RESULTS_FILE}: written, with {len(cells)} evaluations beside it")


# -- what is asked -----------------------------------------------------------------------------


def _plan(options: Eval) -> list[Cell]:
    from tstar.engine import SamplingParams
    from tstar.evaluate.sweep import EvalData, SweepOptions, open_models, plan_cells

    if not options.models or not options.data:
        missing = "data" if options.models else "models"
        raise UserError(f"{missing}: none given; write tstar eval MODEL --data math500 --out DIR")
    policies = _policies(options)
    if options.samples > 1 and options.temperature == 0 and any(p.kind != "random" for p in policies):
        raise UserError(
            f"samples: {options.samples} at temperature 0 are one response repeated; use --samples 1, or a "
            "temperature above 0"
        )
    if options.samples < 1 or options.seed < 0:
        name = "samples" if options.samples < 1 else "seed"
        raise UserError(f"{name}: {getattr(options, name)} is too few; use {int(name == 'samples')} or more")
    try:
        sampling = SamplingParams(
            max_tokens=1 if options.max_tokens is None else options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    models = open_models(options.models)
    data = [EvalData.open(source, options.limit, options.prompt, options.reward) for source in options.data]
    sweep = SweepOptions(
        block_sizes=options.block_size,
        policies=policies,
        max_tokens=options.max_tokens,
        sampling=sampling,
        num_samples=options.samples,
        seed=options.seed,
        offset=options.offset,
        origin=options.origin,
        dtype=options.dtype,
    )
    return plan_cells(options.out, models, data, sweep)


def _policies(options: Eval) -> tuple[UnmaskPolicy, ...]:
    from tstar.evaluate.sweep import parse_policy

    texts = [*options.policy, *(f"dynamic:{threshold}" for threshold in options.threshold)]
    return tuple(parse_policy(text) for text in texts or [DEFAULT_POLICY])


# -- the work ----------------------------------------------------------------------------------


def _evaluate(options: Eval, cells: Sequence[Cell], console: Console) -> list[Summary]:
    """The summaries of all cells, in their order; those of earlier calls are read."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBars

    found = {id(cell): cell.summary() for cell in cells}
    num_done = sum(summary is not None for summary in found.values())
    if num_done:
        console.print(f"{num_done} of {len(cells)} evaluations are done already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = ProgressBars(
        *columns, TextColumn("{task.fields[speed]}"), console=console, disable=not console.is_terminal
    )
    with ExitStack() as stack:
        stack.enter_context(bars)
        rewards = _start_rewards([cell for cell in cells if found[id(cell)] is None], stack)
        for model, group in groupby(cells, key=lambda cell: cell.model):
            missing = [cell for cell in group if found[id(cell)] is None]
            engine = _load(options, model) if missing else None
            for cell in missing:
                assert engine is not None
                found[id(cell)] = summary = _evaluate_cell(cell, engine, rewards[cell.reward], bars)
                console.print(_describe(summary))
            del engine  # the next model takes its memory
    return [summary for summary in found.values() if summary is not None]


def _start_rewards(cells: Sequence[Cell], stack: ExitStack) -> Mapping[str, Rewards]:
    from tstar.rewards import Rewards, RewardSpec

    names = sorted({cell.reward for cell in cells})
    return {name: stack.enter_context(Rewards([RewardSpec(name)])) for name in names}


def _load(options: Eval, model: EvalModel) -> Engine:
    import torch

    from tstar.engine import Engine, EngineConfig
    from tstar.model.checkpoint import DTYPES, load_model

    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise UserError("device: cuda is not there (torch finds no GPU); use cpu")
    device = ("cuda" if has_gpu else "cpu") if options.device == "auto" else options.device
    try:
        config = EngineConfig(memory=options.memory, max_requests=options.max_requests)
    except ValueError as error:
        raise UserError(str(error)) from error
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    loaded = load_model(model.path, dtype, device)
    return Engine(loaded, config)


def _evaluate_cell(cell: Cell, engine: Engine, rewards: Rewards, bars: Any) -> Summary:
    from tstar.engine import GenerationError, RefusedError
    from tstar.evaluate import evaluate_into

    task = bars.add_task(_name(cell), total=len(cell.problems) * cell.settings.num_samples, speed="")

    def show(progress: Progress) -> None:
        speed = f"{progress.num_tokens / progress.seconds:,.0f} tokens/s"
        bars.update(task, completed=progress.num_finished, speed=speed)

    try:
        evaluation = evaluate_into(
            cell.directory,
            engine,
            cell.problems,
            cell.model.tokenizer,
            cell.settings,
            rewards,
            provenance=cell.provenance,
            on_progress=show,
        )
    except (GenerationError, RefusedError) as error:
        raise UserError(f"{cell.model.path}: {error}") from error
    finally:
        bars.remove_task(task)
    return evaluation.summary


def _name(cell: Cell) -> str:
    conditions = cell.conditions
    return f"{conditions.data} · {conditions.label} · B={conditions.block_size} · {conditions.policy}"


# -- what is shown -----------------------------------------------------------------------------


def _describe(summary: Summary) -> str:
    c = summary.conditions
    strict, accuracy = summary.local_strict.value, 100 * summary.accuracy.value
    figures = f"{strict:.3f} / {accuracy:.2f} % / {summary.tokens_per_forward.value:.2f}"
    return f"{c.data} · {c.label} · B={c.block_size} · {c.policy}: {figures} (LocalStrict / accuracy / TPF)"


def print_tables(console: Console, summaries: Sequence[Summary]) -> None:
    """One for each data set, then the curves over thresholds."""
    from tstar.evaluate.sweep import find_curves

    by_data = {summary.conditions.data: summary for summary in summaries}
    for data in by_data:
        console.print(_to_table([s for s in summaries if s.conditions.data == data]))
    for curve in find_curves(summaries):
        console.print(_curve_table(curve))


def _to_table(summaries: Sequence[Summary]) -> Table:
    """As in the paper: a section for each block size, a row for each method."""
    from rich.table import Table

    conditions = summaries[0].conditions
    k = conditions.num_samples
    table = Table(
        title=f"{conditions.data}: {conditions.num_problems} problems, {k} samples each [95 % interval]"
    )
    for name in ("model", "B", "policy"):
        table.add_column(name, overflow="fold")
    names = ["LocalStrict", f"accuracy (avg@{k}) %", *([f"pass@{k} %"] if k > 1 else []), "TPF"]
    for name in [*names, "length", "truncated %", "tokens/s"]:
        table.add_column(name, justify="right")
    ordered = sorted(summaries, key=lambda s: s.conditions.block_size)
    for _, section in groupby(ordered, key=lambda s: s.conditions.block_size):
        for cells in (_cells(summary) for summary in section):
            table.add_row(*cells)
        table.add_section()
    num_failures = sum(summary.num_worker_failures for summary in summaries)
    if num_failures:
        table.caption = f"{num_failures} responses count as wrong because scoring them failed"
    return table


def _cells(summary: Summary) -> Iterator[str]:
    c = summary.conditions
    yield from (c.label, str(c.block_size), c.policy)
    yield _interval(summary.local_strict, 3)
    yield _interval(summary.accuracy, 2, 100.0)
    if c.num_samples > 1:
        yield _interval(summary.pass_at[c.num_samples], 2, 100.0)
    yield _interval(summary.tokens_per_forward, 2)
    yield f"{summary.response_length.mean:,.1f}"
    yield f"{100 * summary.truncated:.1f}"
    yield f"{summary.time.tokens_per_second:,.0f}"


def _interval(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    value, low, high = (
        f"{scale * number:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [dim]\\[{low}, {high}][/dim]"


def _curve_table(curve: Curve) -> Table:
    from rich.table import Table

    table = Table(title=f"{curve.data}, {curve.label}, B={curve.block_size}: accuracy against TPF")
    for name in ("threshold", "TPF", "accuracy %"):
        table.add_column(name, justify="right")
    for summary in curve.points:
        threshold = summary.conditions.unmask["confidence_threshold"]
        accuracy, tpf = _interval(summary.accuracy, 2, 100.0), _interval(summary.tokens_per_forward, 2)
        table.add_row(f"{threshold:g}", tpf, accuracy)
    return table


def _results_json(out: Path, cells: Sequence[Cell], summaries: Sequence[Summary]) -> str:
    import json
    from dataclasses import asdict

    from tstar.evaluate.sweep import find_curves

    evaluations = [
        {"directory": str(cell.directory.relative_to(out)), **json.loads(summary.to_json())}
        for cell, summary in zip(cells, summaries, strict=True)
    ]
    curves = [
        {
            "data": curve.data,
            "label": curve.label,
            "block_size": curve.block_size,
            "points": [
                {
                    "threshold": point.conditions.unmask["confidence_threshold"],
                    "tokens_per_forward": asdict(point.tokens_per_forward),
                    "accuracy": asdict(point.accuracy),
                }
                for point in curve.points
            ],
        }
        for curve in find_curves(summaries)
    ]
    return json.dumps({"version": 1, "evaluations": evaluations, "curves": curves}, indent=2)


def _write_results(path: Path, results: str) -> None:
    from tstar import atomic

    try:
        atomic.write_text(path, results + "\n")
    except OSError as error:
        raise UserError(f"{path}: could not be written ({error.strerror})") from error
