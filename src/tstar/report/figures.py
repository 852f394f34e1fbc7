"""The figures for a paper: PDF, SVG and PNG of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tstar import atomic
from tstar.errors import UserError
from tstar.report.curves import ValidationCurve, ValidationPoint
from tstar.report.record import Report, Score
from tstar.report.schedules import Response, ScheduleFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {
    "base": "#6a7078",
    "tracerl": "#c2570c",
    "tstar": "#2457d6",
    "ar": "#0f766e",
    "other1": "#9d2f86",
    "other2": "#5b7d12",
    "other3": "#6d4bc4",
    "other4": "#a1690b",
    "other5": "#b3263e",
    "other6": "#22748f",
}
"""The page's accents on white (assets/report.css)."""
MARKERS: Mapping[str, str] = {"base": "s", "tracerl": "^", "tstar": "o", "ar": "D"}
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # fonts that a publisher can embed and a reader can search
    "svg.fonttype": "none",
    "svg.hashsalt": "tstar",  # the same report gives the same bytes
}


def write_figures(report: Report, directory: Path) -> list[str]:
    """Each figure that there are data for; returns the files' names."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("figures: matplotlib is not installed; pip install 'tstar[report]'") from error
    names = []
    with mpl.rc_context(STYLE):
        for name, figure in _draw(report):
            for ending in ("pdf", "svg", "png"):
                _save(figure, directory / f"{name}.{ending}", ending)
                names.append(f"{name}.{ending}")
    return names


def _save(figure: Figure, path: Path, ending: str) -> None:
    import io

    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[ending]
    content = io.BytesIO()
    figure.savefig(content, format=ending, dpi=300, metadata=undated)
    atomic.write_bytes(path, content.getvalue())


def _draw(report: Report) -> Iterator[tuple[str, Figure]]:
    if report.validation.curves:
        yield "validation-accuracy", _validation(report)
    if any(s.accuracy is not None for s in report.scores):
        yield "accuracy-by-block-size", _block_sizes(report)
    if report.health.panels:
        yield "training-health", _health(report)
    if report.schedules:
        yield "schedules", _schedules(report)
    if report.samples.responses:
        yield "first-unmask", _first_unmask(report)


def _figure(width: float, height: float) -> Figure:
    """A figure that no global state knows of."""
    from matplotlib.figure import Figure as New

    return New(figsize=(width, height))


def _arm_style(report: Report, arm: int) -> dict[str, Any]:
    """As on the page: arms of one accent differ by their dashes."""
    slots = [report.methods[a.method].slot for a in report.arms]
    dash = DASHES[slots[:arm].count(slots[arm]) % len(DASHES)]
    name, num_seeds = report.arms[arm].name, len(report.arms[arm].runs)
    return {
        "color": COLOURS[slots[arm]],
        "marker": MARKERS.get(slots[arm], "o"),
        "linestyle": dash,
        "label": _plain(name if num_seeds == 1 else f"{name} ({num_seeds} seeds)"),
    }


def _run_style(report: Report, run: int) -> dict[str, Any]:
    """A run of several seeds is faint behind their mean, and not named."""
    arm = report.runs[run].arm
    style = _arm_style(report, arm)
    if len(report.arms[arm].runs) == 1:
        return style
    return {**style, "label": None, "marker": None, "linewidth": 0.7, "alpha": 0.4}


def _plain(text: str) -> str:
    """A label that is no formula, whatever a run is called."""
    return text.replace("$", r"\$")


def _once(style: dict[str, Any], number: int) -> dict[str, Any]:
    """Only the first segment of a curve is named in the legend."""
    return style if number == 0 else {**style, "label": None}


def _validation(report: Report) -> Figure:
    figure = _figure(6.5, 3.4)
    axes = figure.subplots()
    for mean in report.validation.means:
        _validation_curve(axes, mean.segments, _arm_style(report, mean.arm), with_band=True)
    for curve in report.validation.curves:
        style = _run_style(report, curve.run)
        _validation_curve(axes, curve.segments, style, with_band=style["label"] is not None)
    for curve in _one_of_each_arm(report):
        style = _arm_style(report, report.runs[curve.run].arm)
        for stage in report.runs[curve.run].stages[1:]:
            axes.axvline(stage.update_step, color=style["color"], linestyle=":", linewidth=1)
            axes.annotate(
                f"B = {stage.block_size}",
                (stage.update_step, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=7.5,
                color=style["color"],
            )
    name = "base" if report.validation.bases_setting else "start"
    curves = report.validation.curves
    seen = [100 * p.accuracy.value for c in curves for s in c.segments for p in s]
    seen += [100 * base.accuracy.value for base in report.validation.bases]
    room = 0.12 * (max(seen) - min(seen)) + 1
    low, high = max(0.0, min(seen) - room), max(seen) + room
    above = np.inf
    for base in sorted(report.validation.bases, key=lambda b: -b.accuracy.value):
        axes.axhline(100 * base.accuracy.value, color=COLOURS["base"], linestyle="--", linewidth=0.9)
        above = min(100 * base.accuracy.value, above - 0.05 * (high - low))  # names side by side
        axes.annotate(
            f"{name}, B = {base.block_size}",
            (1, above),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=COLOURS["base"],
        )
    # Few seeds may have an interval far beyond all that was seen.
    axes.set(xlabel="update steps", ylabel="validation accuracy (%)", ylim=(low, high))
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _validation_curve(
    axes: Axes, segments: Sequence[Sequence[ValidationPoint]], style: dict[str, Any], with_band: bool
) -> None:
    for number, segment in enumerate(segments):
        x = [p.update_step for p in segment]
        axes.plot(x, [100 * p.accuracy.value for p in segment], **_once(style, number))
        known = [p for p in segment if p.accuracy.low is not None and p.accuracy.high is not None]
        if with_band:
            axes.fill_between(
                [p.update_step for p in known],
                [100 * (p.accuracy.low or 0.0) for p in known],
                [100 * (p.accuracy.high or 0.0) for p in known],
                color=style["color"],
                alpha=0.12,
                linewidth=0,
            )


def _one_of_each_arm(report: Report) -> Iterator[ValidationCurve]:
    """Its seeds have the same stages."""
    seen: set[int] = set()
    for curve in report.validation.curves:
        arm = report.runs[curve.run].arm
        if arm not in seen:
            seen.add(arm)
            yield curve


def _block_sizes(report: Report) -> Figure:
    settings = [
        n
        for n in range(len(report.settings))
        if any(s.setting == n and s.accuracy is not None for s in report.scores)
    ]
    columns = {1: 1, 2: 2, 4: 2}.get(len(settings), 3)
    rows = -(-len(settings) // columns)
    figure = _figure(max(2.6 * columns, 4.0), 2.5 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, setting in zip(grid, settings, strict=False):
        scores = [s for s in report.scores if s.setting == setting and s.accuracy is not None]
        _block_size_panel(report, axes, scores)
        axes.set(xlabel="block size", ylabel="accuracy (%)")
        axes.set_title(_plain(report.settings[setting]), fontsize=9)
    _name_all(figure, grid[: len(settings)])
    for axes in grid[len(settings) :]:
        axes.set_axis_off()
    return figure


def _name_all(figure: Figure, panels: Iterable[Axes]) -> None:
    """One legend for all panels."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    named = {label: h for handles, labels in found for h, label in zip(handles, labels, strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4)


def _block_size_panel(report: Report, axes: Axes, scores: Sequence[Score]) -> None:
    def is_line(score: Score) -> bool:
        return report.methods[score.method].slot == "ar"

    blocks = [s for s in scores if not is_line(s)] or list(scores)
    sizes = sorted({s.block_size for s in blocks})
    methods = sorted({s.method for s in scores})
    for number, index in enumerate(methods):
        aside = 0.05 * (number - (len(methods) - 1) / 2)  # or error bars would stand on each other
        method = report.methods[index]
        own = [s for s in blocks if s.method == index]
        for s in (s for s in scores if s.method == index and s not in blocks):
            assert s.accuracy is not None
            axes.axhline(
                100 * s.accuracy.value, color=COLOURS["ar"], linestyle="--", label=_plain(method.name)
            )
        if own:
            values = [100 * s.accuracy.value for s in own if s.accuracy is not None]
            axes.errorbar(
                [sizes.index(s.block_size) + aside for s in own],
                values,
                yerr=_errors(own),
                color=COLOURS[method.slot],
                marker=MARKERS.get(method.slot, "o"),
                capsize=2,
                label=_plain(method.name),
            )
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])


def _errors(scores: Sequence[Score]) -> np.ndarray:
    bounds = []
    for interval in (s.accuracy for s in scores):
        assert interval is not None
        low = interval.value if interval.low is None else interval.low
        high = interval.value if interval.high is None else interval.high
        bounds.append((100 * (interval.value - low), 100 * (high - interval.value)))
    errors: np.ndarray = np.maximum(np.array(bounds).T, 0)
    return errors


def _health(report: Report) -> Figure:
    from matplotlib.ticker import NullFormatter

    panels = report.health.panels
    rows = -(-len(panels) // 3)
    figure = _figure(7.5, 1.9 * rows + 0.3)
    grid = figure.subplots(rows, 3, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        scale = 100 if panel.kind == "share" else 1
        for mean in panel.means:
            style = {**_arm_style(report, mean.arm), "marker": None, "linewidth": 1}
            axes.plot([x for x, _ in mean.points], [scale * y for _, y in mean.points], **style)
        for curve in panel.curves:
            style = {"linewidth": 1, **_run_style(report, curve.run), "marker": None}
            for number, segment in enumerate(curve.segments):
                axes.plot([x for x, _ in segment], [scale * y for _, y in segment], **_once(style, number))
        for run in report.runs:
            for guard in run.guards:
                axes.axvline(guard.update_step, color="#b3263e", linewidth=0.8)
        if panel.kind == "log":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{panel.title} (%)" if panel.kind == "share" else panel.title, fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _schedules(report: Report) -> Figure:
    """Of the setting with most figures: a row for each block size."""
    names = [f.setting for f in report.schedules]
    chosen = [f for f in report.schedules if f.setting == max(names, key=names.count)]
    sizes = sorted({f.block_size for f in chosen})
    figure = _figure(7.5, 2.1 * len(sizes))
    grid = figure.subplots(len(sizes), 3, squeeze=False)
    for row, size in zip(grid, sizes, strict=True):
        own = [f for f in chosen if f.block_size == size]
        for each in own:
            is_alone = sum(f.method == each.method for f in own) == 1
            _schedule_row(report, row, each, with_name=not is_alone)
        row[0].set(ylabel=f"B = {size}\nout of order (%)", xlabel="place in the block")
        row[1].set(ylabel="blocks (%)", xlabel="steps per block")
        row[2].set(ylabel="tokens (%)", xlabel="confidence when unmasked")
    _name_all(figure, grid[:, 0])
    return figure


def _schedule_row(report: Report, row: Sequence[Axes], each: ScheduleFigure, with_name: bool) -> None:
    method = None if each.method is None else report.methods[each.method]
    slot = "base" if method is None else method.slot
    style: dict[str, Any] = {"color": COLOURS[slot], "marker": MARKERS.get(slot, "o"), "markersize": 3}
    shares = [np.nan if p.non_monotone is None else 100 * p.non_monotone for p in each.places]
    name = each.name if method is None else f"{method.name} ({each.name})" if with_name else method.name
    row[0].plot(range(1, len(shares) + 1), shares, label=_plain(name), **style)
    steps = each.steps_per_block[1:]
    row[1].plot(range(1, len(steps) + 1), [100 * s for s in steps], **style)
    for values, dash in ((each.confidence_correct, "-"), (each.confidence_wrong, "--")):
        if values is not None:
            middles = (np.arange(len(values)) + 0.5) / len(values)
            row[2].plot(middles, [100 * v for v in values], linestyle=dash, **style)


def _first_unmask(report: Report) -> Figure:
    """The case study: the first problem, a row for each block size, a column for each method."""
    own = [r for r in report.samples.responses if r.problem == 0]
    places: dict[tuple[int, str], Response] = {}
    for response in own:
        shown = report.schedules[response.figure]
        if shown.block_size == 1 and any(f.block_size > 1 for f in report.schedules):
            continue  # nothing to see: one token a step
        name = shown.name if shown.method is None else report.methods[shown.method].name
        places.setdefault((shown.block_size, name), response)
    sizes = sorted({size for size, _ in places})
    names = list(dict.fromkeys(name for _, name in places))
    width, title = 2.4, 0.3
    heights = [
        title
        + width / _columns(size) * max(_num_rows(r, size) for (of, _), r in places.items() if of == size)
        for size in sizes
    ]
    figure = _figure(width * len(names), sum(heights))
    grid = figure.subplots(len(sizes), len(names), squeeze=False, height_ratios=heights)
    for row, size in zip(grid, sizes, strict=True):
        for axes, name in zip(row, names, strict=True):
            axes.set_axis_off()
            if (size, name) in places:
                _heat_map(report, axes, places[size, name], size, name)
    return figure


def _columns(size: int) -> int:
    """Tokens side by side: whole blocks."""
    return size * max(1, 32 // size)


def _num_rows(response: Response, size: int) -> int:
    return -(-(response.first_place + len(response.steps)) // _columns(size))


def _heat_map(report: Report, axes: Axes, response: Response, size: int, name: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    columns, rows = _columns(size), _num_rows(response, size)
    cells = np.full(rows * columns, np.nan)
    start = 0
    for length in response.blocks:
        steps = np.array(response.steps[start : start + length])
        cells[response.first_place + start :][:length] = steps - steps.min()
        start += length
    method = report.schedules[response.figure].method
    slot = "base" if method is None else report.methods[method].slot
    colours = LinearSegmentedColormap.from_list(slot, ["#f3f3f0", COLOURS[slot]])
    axes.imshow(cells.reshape(rows, columns), cmap=colours, aspect="equal", interpolation="nearest")
    axes.set_anchor("NW")
    for row in np.arange(1, rows):
        axes.axhline(row - 0.5, color="white", linewidth=1.5)
    for column in np.arange(size, columns, size):
        axes.axvline(column - 0.5, color="white", linewidth=2)  # between blocks
    verdict = {True: ", correct", False: ", wrong", None: ""}[response.is_correct]
    axes.set_title(_plain(f"{name}, B = {size}{verdict}"), fontsize=7.5, loc="left")
