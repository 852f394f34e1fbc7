"""lm-evaluation-harness: the model type ``tstar``.

    tstar lm-eval --model_args pretrained=DIR,block_size=8 --tasks gsm8k     the command line, docs/lm-eval.md
    import tstar.harness                                                     from Python: it registers itself

lm-eval finds no models outside its own package (it has no entry points), so something has to import this
module first: `tstar lm-eval` does, and then is `lm_eval`.

What the numbers mean:

**generate_until** decodes as `tstar generate` does. Stop strings are looked for in the text whenever a block
is complete; the text returned ends before the first of them.

**loglikelihood** of a block-diffusion model depends on the order in which tokens are revealed; the model has
no likelihood but one for each order. Taken here is the order of reading, token by token from left to right:

    log p(y | x) = Σ_i log p(y_i | x and y_<i clean, y_i and the rest of its block masked),

each term from a forward of its own, without the mask token. It is exact; it is a distribution (over all
continuations of a length it sums to 1) and consistent (a text's probability is the sum over what may follow);
and it is the probability with which this very engine decodes y under ``unmask=sequential`` at temperature 1.
It is no bound, as the ELBO of Eq. 2 is, and needs no sampling. It does depend on the block size, which says
how many masks stand behind a token. The last block is as long as the others, masked where y has ended, for a
decoder does not know the end. `is_greedy` says whether this order, greedy, decodes y.

For an AR model all this is the usual sum of next-token log-probs.

**loglikelihood_rolling** is the same, given the beginning-of-text token; what is longer than the model's
positions is cut into windows, as the harness does for other models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tstar.engine import Engine, EngineConfig, RequestFailed, RequestFinished
from tstar.errors import UserError
from tstar.generation.options import DecodingOptions
from tstar.generation.text_model import TextModel, keyed_seed
from tstar.model.attention import prepare
from tstar.model.head import CPU_LIMITS, GPU_LIMITS
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.packing import pack
from tstar.partition import PartitionRule
from tstar.replay import replay
from tstar.trajectory import ForwardCounts, Trajectory

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(f"lm-eval: is not installed ({error}); pip install 'tstar[eval]'") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_MAX_TOKENS = 256
"""Of a task that does not say: the harness's own number."""
TOKEN_BUDGET = 8192
"""Tokens of one scoring forward."""


class Score(NamedTuple):
    log_prob: float
    is_greedy: bool


# -- scoring -----------------------------------------------------------------------------------


@torch.inference_mode()
def score_continuations(
    model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]], rule: PartitionRule
) -> list[Score]:
    """log p(continuation | context) of each pair, decoded token by token from left to right."""
    if model.config.is_diffusion:
        return _score_blocks(model, pairs, rule)
    return _score_causal(model, pairs)


def _score_blocks(
    model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]], rule: PartitionRule
) -> list[Score]:
    """Each continuation as a trajectory that unmasked a token a step, in order; its replay has the terms."""
    mask_token = model.config.mask_token_id
    assert mask_token is not None
    trajectories = [_left_to_right(*pair, rule, filler=int(mask_token == 0)) for pair in pairs]
    totals, is_greedy = np.zeros(len(pairs)), np.ones(len(pairs), dtype=np.bool_)
    for part in replay(trajectories, rule, mask_token, TOKEN_BUDGET):
        hidden = model(
            torch.from_numpy(part.token_ids).to(model.device),
            prepare(part.layout, model.device),
            torch.from_numpy(part.actions.read).to(model.device),
        )
        log_probs, is_likeliest = _read(model, hidden, part.actions.labels)
        members = part.trajectories[part.actions.members]
        np.add.at(totals, members, log_probs)
        np.logical_and.at(is_greedy, members, is_likeliest)
    return [Score(float(t), bool(g)) for t, g in zip(totals, is_greedy, strict=True)]


def _left_to_right(
    context: list[int], continuation: list[int], rule: PartitionRule, filler: int
) -> Trajectory:
    """As if the continuation had been decoded token by token, and its last block then filled up."""
    longest = rule.cut(len(context), len(continuation) + rule.block_size)
    last = longest.block(longest.block_id(len(context) + len(continuation) - 1))
    length = last.stop - len(context)
    return Trajectory(
        prompt_ids=np.array(context, dtype=np.int64),
        response_ids=np.array([*continuation, *[filler] * (length - len(continuation))], dtype=np.int64),
        unmask_step=np.arange(length, dtype=np.int64),
        log_probs=np.zeros(length, dtype=np.float32),
        stop_length=len(continuation),
        finish_reason="length",
        partition=rule.cut(len(context), length),
        forwards=ForwardCounts(length),
        weight_version=0,
        seed=0,
    )


def _score_causal(model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
    lengths = [len(context) + len(continuation) - 1 for context, continuation in pairs]
    scores: list[Score | None] = [None] * len(pairs)
    for members in pack(lengths, TOKEN_BUDGET, oversized="alone"):
        chosen = [pairs[i] for i in members]
        starts = np.cumsum([0, *(lengths[i] for i in members)])
        read = [
            np.arange(stop - len(continuation), stop)
            for (_, continuation), stop in zip(chosen, starts[1:], strict=True)
        ]
        token_ids = [token for context, continuation in chosen for token in [*context, *continuation][:-1]]
        hidden = model(
            torch.tensor(token_ids, device=model.device),
            prepare(PackedLayout.causal([lengths[i] for i in members]), model.device),
            torch.from_numpy(np.concatenate(read)).to(model.device),
        )
        labels = np.array([token for _, continuation in chosen for token in continuation], dtype=np.int64)
        log_probs, is_likeliest = _read(model, hidden, labels)
        ends = np.cumsum([len(continuation) for _, continuation in chosen])
        for i, start, stop in zip(members, [0, *ends[:-1]], ends, strict=True):
            scores[i] = Score(float(log_probs[start:stop].sum()), bool(is_likeliest[start:stop].all()))
    assert all(score is not None for score in scores)
    return [score for score in scores if score is not None]


def _read(model: LanguageModel, hidden: torch.Tensor, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each label's log-prob, and whether it is the likeliest token; logits a portion of rows at a time."""
    limits = CPU_LIMITS if hidden.device.type == "cpu" else GPU_LIMITS
    targets = torch.from_numpy(labels).to(hidden.device)
    log_probs, likeliest = [], []
    rows = max(1, limits.portion // model.config.vocab_size)
    for portion, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        logits = model.logits(portion)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if model.config.mask_token_id is not None:
            logits[:, model.config.mask_token_id] = -torch.inf
        log_probs.append(torch.log_softmax(logits, dim=-1).gather(1, target[:, None])[:, 0])
        likeliest.append(logits.argmax(dim=-1) == target)
    return torch.cat(log_probs).double().cpu().numpy(), torch.cat(likeliest).cpu().numpy()


# -- the model type ----------------------------------------------------------------------------


@register_model("tstar")
class TStarLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """A model directory, decoded and scored by tstar; its arguments are `tstar generate`'s flags."""

    def __init__(
        self,
        pretrained: str,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **decoding: Any,
    ) -> None:
        """batch_size: most responses decoded at once; 1, which lm-eval says where nobody does, and "auto": as
        many as fit."""
        super().__init__()
        self._options = _to_options(decoding)
        self._options.policy()  # refused before a model is loaded
        self.text_model = TextModel.load(Path(pretrained), _check_dtype(dtype), _device(device))
        self.tokenizer = self.text_model.tokenizer
        self.model = self.text_model.model
        self._device = self.model.device
        self._engine = Engine(self.model, EngineConfig(max_requests=_limit(batch_size, max_batch_size)))
        self._rule = self._options.rule(self.model.config)
        self._num_generated = 0

    # -- tokens ------------------------------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation; the last block may reach beyond the continuation."""
        return self.model.config.max_position_embeddings - self._rule.block_size

    @property
    def eot_token_id(self) -> int:
        ids = self.model.config.eos_token_ids
        if not ids:
            raise UserError(f"{self.text_model.directory}: config.json names no eos_token_id; add it")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.text_model.directory).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: Any) -> list[int]:
        """What the tokenizer itself adds is added, unless the text begins with it, as templates make it."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{self.text_model.directory}: has no chat template; leave --apply_chat_template out"
            )
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    # -- likelihood --------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_options: Any,
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        results: list[tuple[float, bool]] = []
        # In portions, for the bar and the cache; neighbours often share their context.
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood") as bar:
            for start in range(0, len(requests), 64):
                part = requests[start : start + 64]
                pairs = [self._truncate(context, continuation) for _, context, continuation in part]
                scores = score_continuations(self.model, pairs, self._rule)
                for (key, _, _), score in zip(part, scores, strict=True):
                    results.append((score.log_prob, score.is_greedy))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, results[-1])
                bar.update(len(part))
        return results

    def _truncate(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The last tokens of a context that is too long; a continuation is never cut."""
        if len(continuation) >= self.max_length:
            raise UserError(
                f"loglikelihood: a continuation of {len(continuation)} tokens leaves no context in the "
                f"model's {self.max_length}; use a model with more positions"
            )
        return context[-(self.max_length - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        from tqdm import tqdm

        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            totals.append(sum(log_prob for log_prob, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    # -- generation --------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        from tqdm import tqdm

        texts: dict[int, str] = {}
        index_of: dict[int, int] = {}
        stops: list[tuple[str, ...]] = []
        for index, request in enumerate(requests):
            context, arguments = request.args
            options = _request_options(self._options, arguments)
            assert options.max_tokens is not None
            stops.append(options.stop)
            room = self.model.config.max_position_embeddings - options.max_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks: {options.max_tokens} tokens leave no room for a prompt in the model's "
                    f"{self.model.config.max_position_embeddings} positions; ask for fewer"
                )
            seed = keyed_seed(self._options.seed, self._num_generated)
            self._num_generated += 1
            ids = self.tok_encode(context)[-room:]
            index_of[self._engine.submit(self.text_model.request(ids, options, seed))] = index
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            while self._engine.num_unfinished:
                for event in self._engine.step():
                    if isinstance(event, RequestFailed):
                        raise UserError(event.reason)
                    if isinstance(event, RequestFinished):
                        index = index_of[event.request_id]
                        texts[index] = self.text_model.text(event.trajectory, stops[index])
                        self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                        bar.update()
        return [texts[index] for index in range(len(requests))]


def _to_options(arguments: Mapping[str, Any]) -> DecodingOptions:
    """model_args as `tstar generate`'s flags."""
    known = {each.name for each in fields(DecodingOptions)}
    for name in arguments:
        if name not in known:
            raise UserError(
                f"model_args: {name} is unknown; use pretrained, dtype or {', '.join(sorted(known))}"
            )
    given = dict(arguments)
    for name in ("temperature", "top_p", "min_p", "confidence_threshold", "entropy_bound"):
        if isinstance(given.get(name), int):
            given[name] = float(given[name])
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    return DecodingOptions(**given)


def _request_options(own: DecodingOptions, arguments: Mapping[str, Any]) -> DecodingOptions:
    """A task's generation arguments over those of the model; a temperature of the model's holds."""
    task = normalize_gen_kwargs(dict(arguments), own.max_tokens or DEFAULT_MAX_TOKENS)
    known = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}
    unknown = sorted(set(task) - known)
    if unknown:
        raise UserError(
            f"generation_kwargs: {unknown[0]} is unknown to tstar; use {', '.join(sorted(known))}, and "
            "--model_args for how blocks are decoded"
        )
    temperature = own.temperature
    if temperature is None:
        temperature = float(task.get("temperature", 1.0 if task["do_sample"] else 0.0))
    strings = [*own.stop, *(string for string in task["until"] if string)]
    return replace(
        own,
        stop=tuple(dict.fromkeys(strings)),
        max_tokens=int(task["max_gen_toks"]),
        temperature=temperature,
        top_k=int(task["top_k"]) if task.get("top_k") else own.top_k,
        top_p=float(task.get("top_p", own.top_p)),
        min_p=float(task.get("min_p", own.min_p)),
    )


def _check_dtype(dtype: str | None) -> Any:
    from tstar.model.checkpoint import DTYPES

    if dtype in (None, "auto"):
        return None
    if dtype not in DTYPES:
        raise UserError(f"model_args: dtype: {dtype!r} is unknown; use {', '.join(DTYPES)}")
    return dtype


def _limit(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """Responses decoded at once."""
    if isinstance(batch_size, str) and not batch_size.isdecimal():  # auto, auto:4
        batch_size = max_batch_size
    return int(batch_size) if batch_size is not None and int(batch_size) > 1 else EngineConfig().max_requests


def _device(name: str | None) -> str:
    """lm-eval says cuda:0 where nobody names a device."""
    return "auto" if name in (None, "cuda:0") else str(name)


# -- command line ------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """lm-eval's own command line, with ``tstar`` as the model unless another is named."""
    from lm_eval.__main__ import cli_evaluate

    given = list(arguments)
    is_run = not given or given[0] == "run" or given[0].startswith("-")
    wants_help = not given or any(argument in ("-h", "--help") for argument in given)
    if (
        is_run
        and not wants_help
        and not any(a.split("=")[0] in ("--model", "-M", "--config", "-C") for a in given)
    ):
        given += ["--model", "tstar"]
    previous = sys.argv
    sys.argv = ["lm_eval", *given]
    try:
        cli_evaluate()
    finally:
        sys.argv = previous
