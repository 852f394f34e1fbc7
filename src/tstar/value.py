"""The value model: the policy's trunk with a scalar head, read where an action is read.

V_j is what the state promises in which token j is still masked, at its position: before the action, as
GAE wants it. The trunk starts as a copy of the policy's and the head as zero, so that the first values
are 0 and the first advantages the returns.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tstar.atomic import replacing
from tstar.errors import UserError
from tstar.model.attention import Attention, prepare
from tstar.model.config import ModelConfig
from tstar.model.transformer import Decoder, LanguageModel
from tstar.replay import ReplayPack

WEIGHTS_FILE = "value_model.safetensors"


class ValueModel(nn.Module):
    """A decoder and one number for each token that is read."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.value_head = nn.Linear(config.hidden_size, 1)

    @classmethod
    def from_policy(cls, policy: LanguageModel) -> ValueModel:
        """The policy's weights, copied, under a head of zeros; all of it is trained, also where the policy
        trains adapters alone."""
        with torch.device("meta"):
            value_model = cls(policy.config)
        value_model.model = copy.deepcopy(policy.model)
        value_model.value_head.to_empty(device=policy.device).to(policy.dtype)
        with torch.no_grad():
            for parameter in value_model.value_head.parameters():
                parameter.zero_()
        return value_model.requires_grad_(True)

    def forward(
        self,
        token_ids: Int64[Tensor, " tokens"],
        attention: Attention,
        read: Int64[Tensor, " chosen"],
        recompute_activations: bool = False,
    ) -> Float[Tensor, " chosen"]:
        hidden = self.model(token_ids, attention, read, recompute_activations)
        values: Tensor = self.value_head(hidden)[:, 0]
        return values.to(torch.promote_types(values.dtype, torch.float32))

    @property
    def device(self) -> torch.device:
        return self.value_head.weight.device


def predict_values(
    value_model: ValueModel, pack: ReplayPack, recompute_activations: bool = False
) -> Float[Tensor, " actions"]:
    """V_j of each action of a pack."""
    token_ids, read = (
        torch.from_numpy(x).to(value_model.device) for x in (pack.token_ids, pack.actions.read)
    )
    attention = prepare(pack.layout, value_model.device)
    values: Tensor = value_model(token_ids, attention, read, recompute_activations)
    return values


def save_value_model(value_model: ValueModel, directory: Path) -> None:
    """Write config.json and the weights; a directory that exists is replaced as a whole."""
    dtype = str(value_model.value_head.weight.dtype).removeprefix("torch.")
    with replacing(directory) as partial:
        config = json.dumps(value_model.config.to_hub(dtype), indent=2)
        (partial / "config.json").write_text(config, encoding="utf-8")
        save_file({n: p.detach().cpu() for n, p in value_model.named_parameters()}, partial / WEIGHTS_FILE)


def load_value_model(directory: Path, device: torch.device | str = "cpu") -> ValueModel:
    """Read what `save_value_model` wrote."""
    if not (directory / WEIGHTS_FILE).is_file():
        raise UserError(f"{directory}: {WEIGHTS_FILE} is missing; give a directory of a saved value model")
    config = ModelConfig.from_hub(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        value_model = ValueModel(config)
    value_model.load_state_dict(load_file(directory / WEIGHTS_FILE, device=str(device)), assign=True)
    for parameter in value_model.parameters():
        parameter.requires_grad_(True)
    return value_model
