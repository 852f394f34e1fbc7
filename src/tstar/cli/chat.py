"""`tstar chat`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from tstar.errors import UserError
from tstar.generation.options import DecodingOptions, Device, Dtype

if TYPE_CHECKING:
    from rich.console import Console

    from tstar.cli.denoising import DenoisingView
    from tstar.engine import Engine, Request
    from tstar.generation.text_model import TextModel

HELP = "/reset begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclass(frozen=True)
class Chat:
    """Talk with a model; each answer is drawn as it is denoised.

    /reset forgets the conversation, /quit leaves; Ctrl-C stops an answer. From a pipe, every line is a turn,
    and the answers alone are printed:

        printf '%s\\n' "7+6-3=" "2*8=" | tstar chat MODEL
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Model directory whose tokenizer has a chat template."""
    system: str | None = None
    """System message before the conversation."""
    decoding: Annotated[DecodingOptions, tyro.conf.arg(name="")] = field(default_factory=DecodingOptions)
    dtype: Dtype | None = None
    """Precision of the weights. Default: as stored."""
    device: Device = "auto"
    """Where to decode. Default: the GPU, if there is one."""

    def run(self) -> None:
        self.decoding.policy()  # refused before a model is loaded
        from rich.console import Console

        from tstar.engine import Engine, EngineConfig
        from tstar.generation.text_model import TextModel
        from tstar.process import keep_freed_memory

        keep_freed_memory()
        text_model = TextModel.load(self.model, self.dtype, self.device)
        if text_model.tokenizer.chat_template is None:
            raise UserError(f"{self.model}: has no chat template; use tstar generate --raw")
        engine = Engine(text_model.model, EngineConfig(max_requests=1))
        conversation = Conversation(self, text_model, engine, Console(highlight=False))
        if sys.stdin.isatty():
            print(f"{HELP}\n")
        for line in _lines():
            if line == "/quit":
                break
            conversation.hear(line)


class Conversation:
    """What was said so far, and the engine that goes on with it."""

    def __init__(self, command: Chat, text_model: TextModel, engine: Engine, console: Console) -> None:
        self._command, self._text_model, self._engine, self._console = command, text_model, engine, console
        self._messages: list[dict[str, str]] = []
        self._num_turns = 0
        self._forget()

    def _forget(self) -> None:
        system = self._command.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def hear(self, line: str) -> None:
        """A line of the user: a command, or a turn to answer."""
        if line == "/reset":
            self._forget()
        elif line.startswith("/") and " " not in line:
            print(f"no such command; {HELP}", file=sys.stderr)
        elif line.strip():
            self._take_turn(line)

    def _take_turn(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            request = self._request(messages)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            print(f"tstar: error: {error}; /reset begins a new conversation", file=sys.stderr)
            return
        answer = self._answer(request)
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _request(self, messages: list[dict[str, str]]) -> Request:
        from tstar.generation.text_model import keyed_seed

        ids = self._text_model.encode_chat(messages)
        self._num_turns += 1
        seed = keyed_seed(self._command.decoding.seed, self._num_turns)
        request = self._text_model.request(ids, self._command.decoding, seed)
        try:
            self._request_id = self._engine.submit(request)
        except ValueError as error:
            raise UserError(str(error).removeprefix("rule.")) from None
        return request

    def _answer(self, request: Request) -> str:
        """Decode to the end, or to Ctrl-C; what was complete by then is the answer."""
        from rich.text import Text

        from tstar.cli.denoising import DenoisingView

        if not self._console.is_terminal:
            answer = self._decode(None)
            print(answer, flush=True)
            return answer
        view = DenoisingView(self._console, self._text_model, "chat")
        view.begin(request, Text())
        try:
            return self._decode(view)
        finally:
            view.close()

    def _decode(self, view: DenoisingView | None) -> str:
        from tstar.engine import RequestFailed, RequestFinished, TokensUnmasked

        began = time.perf_counter()
        with _ctrl_c(is_caught=view is not None) as is_asked_to_stop:
            while not is_asked_to_stop():
                for event in self._engine.step(wants_steps=view is not None):
                    seconds = time.perf_counter() - began
                    if isinstance(event, TokensUnmasked) and view is not None:
                        view.unmask(event, seconds)
                    elif isinstance(event, RequestFinished):
                        if view is not None:
                            view.finish(event.trajectory, seconds)
                        return self._text_model.text(event.trajectory, self._command.decoding.stop)
                    elif isinstance(event, RequestFailed):
                        raise UserError(event.reason)
        assert view is not None
        self._engine.abort(self._request_id)
        return view.settled_text


@contextmanager
def _ctrl_c(is_caught: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed meanwhile; not caught, it is a KeyboardInterrupt as ever.

    An exception out of nowhere could end up in a callback that drops it, and the answer would go on.
    """
    pressed: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    if is_caught:
        signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def _lines() -> Iterator[str]:
    """Turns: with a prompt and line editing in a terminal, else line by line."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    import readline  # noqa: F401  (input() edits lines once it is imported)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
