"""From token ids to what a scorer and a reader see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tstar.rewards import Response
from tstar.trajectory import Trajectory

if TYPE_CHECKING:
    import transformers


def to_response(tokenizer: transformers.PreTrainedTokenizerBase, trajectory: Trajectory) -> Response:
    """The text that is judged: everything before the stop.

    Special tokens inside it stay: an answer with a stray one in it is not the answer without.
    """
    has_stop = trajectory.finish_reason == "stop"
    ids = trajectory.response_ids[: trajectory.stop_length - has_stop]
    return Response(
        _decode(tokenizer, ids.tolist()),
        trajectory.stop_length,
        trajectory.tokens_per_forward,
        trajectory.finish_reason,
    )


def text_pieces(
    tokenizer: transformers.PreTrainedTokenizerBase, trajectories: Iterable[Trajectory]
) -> dict[int, str]:
    """The text of every token id that occurs, so that readers need no tokenizer.

    A token is decoded behind another one: at the very beginning, some tokenizers drop its space.
    """
    arrays = [ids for each in trajectories for ids in (each.prompt_ids, each.response_ids)]
    ids: set[int] = set().union(*(array.tolist() for array in arrays))
    anchor = tokenizer.encode("0", add_special_tokens=False)[-1:]
    skipped = len(_decode(tokenizer, anchor))
    return {token_id: _decode(tokenizer, [*anchor, token_id])[skipped:] for token_id in sorted(ids)}


def _decode(tokenizer: transformers.PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
