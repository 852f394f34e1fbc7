"""`tstar generate`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import tyro

from tstar.errors import UserError
from tstar.generation.options import DecodingOptions, Device, Dtype

if TYPE_CHECKING:
    from tstar.cli.denoising import DenoisingView
    from tstar.engine import Engine, Request
    from tstar.generation.text_model import TextModel
    from tstar.trajectory import Trajectory

STDIN = Path("-")


@dataclass(frozen=True)
class Generate:
    """Decode responses to one prompt or many, in blocks (or token by token, with an AR model).

    The prompt is a user's message, put through the tokenizer's chat template; --raw takes it as it stands.

        tstar generate MODEL "7+6-3=" --block-size 8 --confidence-threshold 0.9 --show

        tstar generate MODEL --prompts problems.jsonl --num-samples 4 --output responses.jsonl

    Results come as they finish: on screen as text, in a .jsonl file as trajectories for `tstar analyze`.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Model directory (SDAR, Qwen3, Qwen2, Llama)."""
    prompt: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[PROMPT]")] = None
    """The prompt. Without one, and without --prompts, standard input is the prompt."""
    prompts: Path | None = None
    """JSON lines, each with a prompt, a question or messages, and perhaps an id; - reads standard input."""
    raw: bool = False
    """The prompt as it stands, without the chat template."""
    system: str | None = None
    """System message before each prompt."""
    num_samples: int = 1
    """Responses to each prompt."""
    output: Path | None = None
    """File for the responses. Default: standard output."""
    overwrite: bool = False
    """Replace the output file if it exists."""
    format: Literal["text", "jsonl"] | None = None
    """text, or trajectories as JSON lines. Default: jsonl for an output file *.jsonl, else text."""
    show: bool = False
    """Draw the denoising in the terminal, one response at a time: colour says at which step of its block a
    token was finalised."""
    pace: float = 0.05
    """With --show: hold each step at least so many seconds (tokens/s does not count them)."""
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")] = field(default_factory=DecodingOptions)
    dtype: Dtype | None = None
    """Precision of the weights. Default: as stored."""
    device: Device = "auto"
    """Where to decode. Default: the GPU, if there is one."""

    def run(self) -> None:
        self._check()
        prompts = list(self._read_prompts())
        from tstar.engine import Engine, EngineConfig
        from tstar.generation.text_model import TextModel
        from tstar.process import keep_freed_memory

        keep_freed_memory()
        text_model = TextModel.load(self.model, self.dtype, self.device)
        jobs = list(self._jobs(text_model, prompts))
        num_at_once = 1 if self.show else min(len(jobs), EngineConfig().max_requests)
        engine = Engine(text_model.model, EngineConfig(max_requests=num_at_once))
        for job in jobs:
            _submit(engine, job)  # request ids are indices into jobs
        with ExitStack() as stack:
            output = self._open_output(stack)
            run = _Run(self, text_model, jobs, output)
            run.decode(engine, stack)

    @property
    def is_jsonl(self) -> bool:
        if self.format is None:
            return self.output is not None and self.output.suffix == ".jsonl"
        return self.format == "jsonl"

    def _check(self) -> None:
        if self.prompt is not None and self.prompts is not None:
            raise UserError("prompts: a file of prompts beside a prompt; give one of the two")
        if self.num_samples < 1:
            raise UserError(f"num_samples: {self.num_samples} is too few; use 1 or more")
        if self.num_samples > 1 and self.decoding.temperature == 0 and self.decoding.unmask != "random":
            raise UserError(
                f"temperature: at 0 all {self.num_samples} samples of a prompt are equal; use more than 0"
            )
        if self.raw and self.system is not None:
            raise UserError("system: --raw has no system message; write it into the prompt")
        if self.output is not None and self.output.exists() and not self.overwrite:
            raise UserError(f"output: {self.output} exists already; choose another path, or give --overwrite")
        if not self.pace >= 0:
            raise UserError(f"pace: {self.pace} is no time; use 0 or more seconds")
        if self.show and self.output is None and self.is_jsonl:
            raise UserError(
                "show: standard output gets the trajectories; give --output FILE, or leave --show out"
            )
        if self.show and not _is_terminal():
            raise UserError("show: standard output is no terminal to draw in; leave it out")
        self.decoding.policy()  # refused before a model is loaded

    # -- prompts ---------------------------------------------------------------------------------

    def _read_prompts(self) -> Iterator[Prompt]:
        if self.prompts is not None:
            yield from _read_file(self.prompts, self.raw, self.system)
            return
        text = self.prompt
        if text is None:
            if sys.stdin.isatty():
                raise UserError("prompt: none is given; give one, --prompts FILE, or pipe one in")
            text = _read_stdin().removesuffix("\n")
        if not text:
            raise UserError("prompt: is empty; write something to answer")
        yield Prompt("prompt", None, text) if self.raw else Prompt("prompt", None, _chat(self.system, text))

    def _jobs(self, text_model: TextModel, prompts: list[Prompt]) -> Iterator[Job]:
        """A request for each sample of each prompt, with a seed of its own."""
        from tstar.generation.text_model import keyed_seed

        temperature = 1.0 if self.num_samples > 1 else 0.0
        for index, prompt in enumerate(prompts):
            content = prompt.content
            ids = text_model.encode(content) if isinstance(content, str) else text_model.encode_chat(content)
            for sample in range(self.num_samples):
                seed = keyed_seed(self.decoding.seed, index, sample)
                request = text_model.request(ids, self.decoding, seed, temperature)
                yield Job(index, sample, prompt, request)

    def _open_output(self, stack: ExitStack) -> Output:
        if self.output is None:
            return sys.stdout
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(self.output.open("w", encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"output: {self.output} cannot be written ({error.strerror}); choose another path"
            ) from None


@runtime_checkable
class Output(Protocol):
    """A text file, or standard output."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@dataclass(frozen=True)
class Prompt:
    place: str
    """Where it stands, for messages."""
    id: str | None
    content: str | list[dict[str, Any]]
    """Raw text, or a conversation."""

    @property
    def text(self) -> str:
        """What a reader is shown of it: the last message."""
        return self.content if isinstance(self.content, str) else str(self.content[-1]["content"])


@dataclass(frozen=True)
class Job:
    """One response to decode."""

    index: int
    sample: int
    prompt: Prompt
    request: Request


def _chat(system: str | None, text: str) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"prompt: standard input is no UTF-8 text ({error.reason}); convert it") from None


def _read_file(path: Path, is_raw: bool, system: str | None) -> Iterator[Prompt]:
    from tstar.data.rows import read_files

    file = Path("/dev/stdin") if path == STDIN else path
    if file.suffix == ".parquet" or file.is_dir():
        raise UserError(f"prompts: {path} is no file of JSON lines; give one")
    num_prompts = 0
    for row in read_files([file]):
        num_prompts += 1
        own_id = row.values.get("id")
        content = _content(row.place, row.values, is_raw, system)
        yield Prompt(row.place, None if own_id is None else str(own_id), content)
    if num_prompts == 0:
        raise UserError(
            f"prompts: {path} has no lines; write one JSON object a line, such as {{'prompt': ...}}"
        )


def _content(
    place: str, values: Mapping[str, Any], is_raw: bool, system: str | None
) -> str | list[dict[str, Any]]:
    if "messages" in values:
        messages = values["messages"]
        if is_raw:
            raise UserError(f"{place}: messages: --raw has no chat template for them; leave --raw out")
        is_list = isinstance(messages, list) and len(messages) > 0
        if not is_list or not all(_is_message(message) for message in messages):
            raise UserError(f"{place}: messages: is no list of {{role, content}}; correct the line")
        return [*_chat(system, "")[:-1], *messages]
    text = values.get("prompt", values.get("question"))
    if not isinstance(text, str) or not text:
        names = ", ".join(values) or "nothing"
        raise UserError(f"{place}: holds no prompt (it has {names}); give prompt, question or messages")
    return text if is_raw else _chat(system, text)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _submit(engine: Engine, job: Job) -> None:
    try:
        engine.submit(job.request)
    except ValueError as error:
        raise UserError(f"{job.prompt.place}: {str(error).removeprefix('rule.')}") from None


def _is_terminal() -> bool:
    from rich.console import Console

    return Console().is_terminal


# -- decoding ----------------------------------------------------------------------------------


class _Run:
    """The responses of one call, on their way to where they go."""

    def __init__(self, command: Generate, text_model: TextModel, jobs: list[Job], output: Output) -> None:
        self.command, self.text_model, self.jobs, self.output = command, text_model, jobs, output
        self.figures = Figures()
        self.failed: list[str] = []

    def decode(self, engine: Engine, stack: ExitStack) -> None:
        try:
            if self.command.show:
                self._decode_in_view(engine)
            else:
                self._decode_all(engine, stack)
        except KeyboardInterrupt:
            where = f"{self.command.output} holds" if self.command.output else "finished"
            raise KeyboardInterrupt(
                f"{where} {self.figures.num_responses} of {len(self.jobs)} responses"
            ) from None
        finally:
            if self.figures.num_responses:
                print(self.figures, file=sys.stderr)
        if self.failed:
            raise UserError(f"{len(self.failed)} of {len(self.jobs)} responses failed: {self.failed[0]}")

    def _decode_all(self, engine: Engine, stack: ExitStack) -> None:
        from tstar.engine import RequestFailed, RequestFinished

        advance = stack.enter_context(_Progress(len(self.jobs))).advance
        while engine.num_unfinished:
            began = time.perf_counter()
            events = engine.step()
            self.figures.seconds += time.perf_counter() - began
            for event in events:
                job = self.jobs[event.request_id]
                if isinstance(event, RequestFinished):
                    self._write(job, event.trajectory)
                elif isinstance(event, RequestFailed):
                    self.failed.append(f"{job.prompt.place}: {event.reason}")
                advance(self.figures)

    def _decode_in_view(self, engine: Engine) -> None:
        from rich.console import Console

        from tstar.cli.denoising import DenoisingView, legend

        console = Console(highlight=False)
        view = DenoisingView(console, self.text_model, "show")
        console.print(legend(self.jobs[0].request.rule.block_size))
        try:
            for index in range(len(self.jobs)):
                self._show_one(engine, index, view)
        finally:
            view.close()

    def _show_one(self, engine: Engine, index: int, view: DenoisingView) -> None:
        """The engine decodes one request at a time, in order."""
        from tstar.engine import RequestFailed, RequestFinished, TokensUnmasked

        job = self.jobs[index]
        seconds, trajectory = 0.0, None
        view.begin(job.request, _lead(job, len(self.jobs)))
        while trajectory is None:
            began = time.perf_counter()
            events = engine.step(wants_steps=True)
            now = time.perf_counter()
            seconds += now - began
            for event in events:
                if isinstance(event, TokensUnmasked):
                    view.unmask(event, seconds)
                    time.sleep(max(0.0, self.command.pace - (time.perf_counter() - began)))
                elif isinstance(event, RequestFinished):
                    trajectory = event.trajectory
                elif isinstance(event, RequestFailed):
                    view.close()
                    self.failed.append(f"{job.prompt.place}: {event.reason}")
                    return
        view.finish(trajectory, seconds)
        self.figures.seconds += seconds
        if self.command.output is not None:
            self._write(job, trajectory)
        else:
            self.figures.add(trajectory)

    def _write(self, job: Job, trajectory: Trajectory) -> None:
        """One response, whole and at once: what was written stays, whatever happens next."""
        self.figures.add(trajectory)
        text = self.text_model.text(trajectory, self.command.decoding.stop)
        if self.command.is_jsonl:
            block = to_json_line(job, trajectory, text)
        else:
            if self.output.isatty():
                from tstar.cli.denoising import printable

                text = printable(text)
            heading = "" if len(self.jobs) == 1 else f"=== {_title(job)}, {_describe(trajectory)}\n"
            block = heading + text + "\n" * (1 if len(self.jobs) == 1 else 2)
        self.output.write(block)
        self.output.flush()


def to_json_line(job: Job, trajectory: Trajectory, text: str) -> str:
    """A trajectory's line with the prompt's id, the sample's number and the text."""
    from tstar.schedule import DecodedResponse

    line = DecodedResponse(trajectory, problem=job.prompt.id).to_json()
    more = json.dumps({"sample": job.sample, "text": text}, separators=(",", ":"))
    return f"{line[:-1]},{more[1:]}\n"


def _title(job: Job) -> str:
    name = f"prompt {job.index}" if job.prompt.id is None else f"prompt {json.dumps(job.prompt.id)}"
    return f"{name}, sample {job.sample}"


def _describe(trajectory: Trajectory) -> str:
    return (
        f"{trajectory.finish_reason} after {trajectory.stop_length} tokens, "
        f"TPF {trajectory.tokens_per_forward:.2f}"
    )


def _lead(job: Job, num_jobs: int) -> Any:
    """What stands before a response that is drawn: the prompt."""
    from rich.text import Text

    from tstar.cli.denoising import printable

    lead = Text(f"=== {_title(job)}\n" if num_jobs > 1 else "", style="")
    return lead.append(
        printable(job.prompt.text) + ("" if isinstance(job.prompt.content, str) else "\n"), style="dim"
    )


@dataclass
class Figures:
    """What a call decoded."""

    num_responses: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_truncated: int = 0
    seconds: float = 0.0
    """In the engine alone."""

    def add(self, trajectory: Trajectory) -> None:
        self.num_responses += 1
        self.num_tokens += trajectory.stop_length
        self.num_forwards += trajectory.forwards.denoise
        self.num_truncated += trajectory.finish_reason == "length"

    def __str__(self) -> str:
        responses = "1 response" if self.num_responses == 1 else f"{self.num_responses} responses"
        truncated = f", {self.num_truncated} cut at max_tokens" if self.num_truncated else ""
        return (
            f"{responses}, {self.num_tokens:,} tokens, TPF {self.num_tokens / self.num_forwards:.2f}, "
            f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s{truncated}"
        )


class _Progress:
    """A bar on standard error, where that is a terminal and there is something to wait for."""

    def __init__(self, total: int) -> None:
        self._total = total

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=self._total == 1 or not console.is_terminal,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, figures: Figures) -> None:
        speed = f"{figures.num_tokens / max(figures.seconds, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, completed=figures.num_responses, description=speed)
