"""Several models, data sets, block sizes and policies: one evaluation directory for each combination."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tstar.data import ProblemSet, prompt_template
from tstar.engine import SamplingParams
from tstar.errors import UserError
from tstar.evaluate.directory import is_evaluation, read_summary
from tstar.evaluate.evaluation import prompts_of
from tstar.evaluate.journal import refuse_other_conditions
from tstar.evaluate.summary import Conditions, EvalSettings, Provenance, Summary, describe_policy
from tstar.model.checkpoint import load_config
from tstar.model.config import ModelConfig
from tstar.model.tokenizer import find_mask_token, load_tokenizer
from tstar.partition import PartitionRule
from tstar.rewards import default_reward
from tstar.tasks import open_problem_set, open_problems
from tstar.tasks.chain import ChainTask
from tstar.unmask import UnmaskPolicy

if TYPE_CHECKING:
    import transformers

DEFAULT_MAX_TOKENS = 2048
MAX_BLOCK_SIZE = 256
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 16, 1 << 16


# -- models ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EvalModel:
    """A model directory, opened as far as planning needs it."""

    label: str
    path: Path
    config: ModelConfig
    tokenizer: transformers.PreTrainedTokenizerBase

    @classmethod
    def open(cls, argument: str) -> EvalModel:
        """``MODEL`` or ``LABEL=MODEL``; a run of `tstar sft` stands for the model in it."""
        label, separator, location = argument.partition("=")
        if "/" in label or not separator:  # a path, perhaps with a sign in it
            label, location = "", argument
        elif not label or not location:
            raise UserError(f"models: {argument!r} has an empty half; write MODEL or LABEL=MODEL")
        path = Path(location)
        is_named = bool(label)
        label = label or path.resolve().name
        if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
            path = path / "model"
        elif not is_named and path.name == "model":
            label = path.resolve().parent.name
        config = load_config(path)
        tokenizer = load_tokenizer(path)
        if config.is_diffusion:
            find_mask_token(tokenizer, config)
        return cls(label, path, config, tokenizer)

    def provenance(self, dtype: str | None = None) -> Provenance:
        return Provenance(self.label, str(self.path), fingerprint(self.path), dtype)


def open_models(arguments: Sequence[str]) -> list[EvalModel]:
    models = [EvalModel.open(argument) for argument in arguments]
    labels = [model.label for model in models]
    for model in models:
        if labels.count(model.label) > 1:
            raise UserError(
                f"models: {labels.count(model.label)} of them are called {model.label!r}; "
                "name them, LABEL=MODEL"
            )
    return models


def fingerprint(directory: Path) -> str:
    """Tells one model from another by names, sizes and samples of its files, those of the tokenizer too.

    Reading samples alone costs milliseconds where 16 GB cost seconds; training moves every weight.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".json", ".jinja")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES_PER_FILE):
                file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


# -- policies ----------------------------------------------------------------------------------

_POLICY = re.compile(
    r"(?P<kind>[a-z]+)(?::(?P<number>[0-9]+|[0-9]*\.[0-9]+))?(?P<rest>(?:[:,](?:[kS]=[0-9]+|sampled))*)"
)
_THRESHOLDS = {"dynamic": "confidence_threshold", "entropy": "entropy_bound"}
_FORMS = "static:4, static:S=2, dynamic:0.9, dynamic:0.9,k=2, sequential:2, random:2, entropy:0.5"


def parse_policy(text: str) -> UnmaskPolicy:
    """A policy as the command line writes it.

    ``KIND[:NUMBER][,k=K][,S=S][,sampled]``; the number is k, η of ``dynamic`` or the bound of ``entropy``.
    """
    matched = _POLICY.fullmatch(text)
    kind, number, rest = matched.groups() if matched else ("", None, "")
    options = dict(each.partition("=")[::2] for each in re.split("[:,]", rest)[1:])
    budgets = [options["k"]] if "k" in options else []
    budgets += [number] if number is not None and kind not in _THRESHOLDS else []
    if matched is None or len(budgets) > 1 or "." in "".join(budgets):
        raise UserError(f"policy: {text!r} is not understood; write one like {_FORMS}")
    threshold = {_THRESHOLDS[kind]: float(number)} if kind in _THRESHOLDS and number is not None else {}
    try:
        return UnmaskPolicy(
            kind=kind,  # type: ignore[arg-type]  # the policy names what is unknown
            tokens_per_step=int(budgets[0]) if budgets else None,
            steps_per_block=int(options["S"]) if "S" in options else None,
            confidence="sampled" if "sampled" in options else "max",
            **threshold,
        )
    except ValueError as error:
        raise UserError(f"policy: {text!r}: {str(error).removeprefix('unmask.')}") from error


# -- cells -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepOptions:
    """What all combinations share, and what they combine."""

    block_sizes: tuple[int, ...] = ()
    """None given: each model's own."""
    policies: tuple[UnmaskPolicy, ...] = ()
    max_tokens: int | None = None
    """None: what the data is said to need, at most what the model has positions for."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 3
    seed: int = 0
    offset: int = 0
    origin: Literal["response", "sequence"] = "response"
    dtype: str | None = None
    """What the weights are converted to."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One combination."""

    directory: Path
    model: EvalModel
    provenance: Provenance
    problems: ProblemSet
    reward: str
    settings: EvalSettings

    @property
    def conditions(self) -> Conditions:
        return Conditions.of(
            self.provenance, self.settings, self.problems, self.reward, self.model.config.is_diffusion
        )

    def summary(self) -> Summary | None:
        """What an earlier call found, if it finished; refused if it asked something else."""
        if not is_evaluation(self.directory):
            return None
        summary = read_summary(self.directory)
        refuse_other_conditions(self.directory, summary.conditions, self.conditions)
        return summary


@dataclass(frozen=True, eq=False)
class EvalData:
    """A data set to evaluate on."""

    problems: ProblemSet
    reward: str
    """What decides that a response is correct."""
    max_tokens: int | None = None
    """What its responses need, where that is known."""

    @classmethod
    def open(
        cls, source: str, limit: int | None = None, prompt: str | None = None, reward: str | None = None
    ) -> EvalData:
        """prompt: as `tstar.data.prompt_template` takes it. None: what suits the data, as with reward."""
        problems = open_problem_set(source, limit)
        if prompt is not None:
            problems = replace(problems, prompt=prompt_template(prompt))
        task = open_problems(source) if source.startswith("chain:") else None
        longest = task.max_tokens if isinstance(task, ChainTask) else None
        return cls(problems, reward or default_reward(source), longest)


def plan_cells(
    out: Path, models: Sequence[EvalModel], data: Sequence[EvalData], options: SweepOptions
) -> list[Cell]:
    """All combinations, model by model; an AR model has one for each data set."""
    cells: list[Cell] = []
    for model in models:
        provenance = model.provenance(options.dtype)
        for each in data:
            max_tokens = _max_tokens(model, each, options.max_tokens)
            for settings in _settings(model, options, max_tokens):
                directory = out / _slug(each.problems.name) / _cell_name(model, settings)
                cells.append(Cell(directory, model, provenance, each.problems, each.reward, settings))
    directories = [cell.directory for cell in cells]
    for directory in directories:
        if directories.count(directory) > 1:
            raise UserError(
                f"{directory}: {directories.count(directory)} combinations would be written here; "
                "give each block size, policy and data set once, and models labels that differ"
            )
    return cells


def _settings(model: EvalModel, options: SweepOptions, max_tokens: int) -> Iterator[EvalSettings]:
    sampling = replace(options.sampling, max_tokens=max_tokens)
    if not model.config.is_diffusion:
        yield EvalSettings(PartitionRule(1), sampling, options.num_samples, options.seed)
        return
    own = model.config.block_size
    block_sizes = options.block_sizes or (() if own is None else (own,))
    if not block_sizes:
        raise UserError(f"block_size: {model.path} does not say which it was trained with; give --block-size")
    for block_size in block_sizes:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise UserError(f"block_size: {block_size} is out of range; use 1 to {MAX_BLOCK_SIZE}")
        try:
            rule = PartitionRule(block_size, options.offset, options.origin)
        except ValueError as error:
            raise UserError(str(error)) from error
        for policy in options.policies:
            with_policy = replace(sampling, unmask=policy)
            yield EvalSettings(rule, with_policy, options.num_samples, options.seed)


def _max_tokens(model: EvalModel, data: EvalData, asked: int | None) -> int:
    """Refused here, before anything is loaded, where prompt and response pass the model's positions."""
    prompts = prompts_of(data.problems, model.tokenizer)
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    positions = model.config.max_position_embeddings
    left = positions - len(prompts[longest])
    wanted = asked or data.max_tokens
    if left < (wanted or 1):
        what = f"max_tokens: {wanted}" if wanted else "max_tokens"
        raise UserError(
            f"{what}: {model.path} has {positions} positions and the prompt of "
            f"{data.problems.problems[longest].id} takes {len(prompts[longest])}; "
            + (f"ask for at most {left}" if left > 0 else "leave the problem out")
        )
    return wanted or min(DEFAULT_MAX_TOKENS, left)


def _cell_name(model: EvalModel, settings: EvalSettings) -> str:
    rule = settings.rule
    if not model.config.is_diffusion:
        return _slug(model.label)
    parts = [model.label, f"b{rule.block_size}"]
    parts += [f"o{rule.offset}"] * (rule.offset != 0) + [rule.origin] * (rule.origin != "response")
    return _slug("-".join([*parts, describe_policy(settings.sampling.unmask).replace("=", "")]))


def _slug(text: str) -> str:
    """A text as a file name."""
    return re.sub(r"[^\w.*+-]+", "-", text).strip("-") or "unnamed"


# -- curves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy against tokens per forward as the threshold of dynamic decoding falls."""

    data: str
    label: str
    block_size: int
    points: tuple[Summary, ...]
    """By rising threshold."""


def find_curves(summaries: Sequence[Summary]) -> list[Curve]:
    """Evaluations that differ in the confidence threshold alone, where there are several thresholds."""
    groups: dict[tuple[str, str, int, str], list[Summary]] = {}
    for summary in summaries:
        c = summary.conditions
        if c.unmask["confidence_threshold"] is not None:
            others = str({**c.unmask, "confidence_threshold": None})
            groups.setdefault((c.data, c.label, c.block_size, others), []).append(summary)
    return [
        Curve(*key[:3], tuple(sorted(group, key=_threshold)))
        for key, group in groups.items()
        if len(group) > 1
    ]


def _threshold(summary: Summary) -> float:
    return float(summary.conditions.unmask["confidence_threshold"])
