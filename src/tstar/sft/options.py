"""What an SFT run is told: the options of `tstar sft`, and what stands in the run's config.yaml."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tstar.errors import UserError

_COUNTS = (
    "batch_size",
    "checkpoint_every",
    "hidden_size",
    "lora_rank",
    "num_examples",
    "num_layers",
    "num_steps",
    "num_validation",
    "token_budget",
    "validate_every",
)


@dataclass(frozen=True)
class SftOptions:
    """From which model, on what, by which objective, for how long."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    data: str = ""
    """What to learn: a .jsonl or .parquet file of {question, solution} (or answer, the whole response), of
    {messages} or of plain {text}, a preset (gsm8k@train, math-train, ...) or a generated task (chain:3,
    chain:2-4)."""
    levels: tuple[int, int] | None = None
    """Only problems from one level to another, both included: the paper's 3 5. Default: all."""
    validation_data: str | None = None
    """Where the validation loss is taken: a source of its own. Default: examples held out of `data`."""
    prompt: str | None = None
    """How a question becomes a prompt: math (the paper's instruction), chat (the question as the user's
    message), raw (the question alone), or a message of your own with {question} in it. Default: math; raw for
    a generated task."""
    model: Path | None = None
    """Model directory to start from (SDAR, Qwen3, Qwen2, Llama). Default: a fresh small model; only for a
    generated task, whose tokenizer it takes."""
    hidden_size: int = 128
    """Width of a fresh model."""
    num_layers: int = 4
    """Layers of a fresh model."""

    objective: Literal["diffusion", "ar"] = "diffusion"
    """Block diffusion (Eq. 2), or the next token. An AR model gets a mask token for block diffusion."""
    block_sizes: tuple[int, ...] = (4,)
    """B. With several, each sequence draws one."""
    block_size_weights: tuple[float, ...] | None = None
    """How often each block size is drawn, relative to the others. Default: all alike."""
    offsets: tuple[int, ...] = (0,)
    """Δ, how far the blocks are shifted. With several, each sequence draws one."""
    origin: Literal["response", "sequence"] = "response"
    """Where blocks are counted from: the response's first token, or the sequence's (SDAR's generate.py)."""
    weighting: Literal["inverse_t", "constant"] = "constant"
    """What a masked token counts: 1/t as in Eq. 2, or the same everywhere."""
    min_mask_ratio: float = 1e-3
    """t is drawn from U(this, 1), which bounds the weight 1/t."""

    num_examples: int | None = None
    """Use that many examples only. Default: all; 20000 of a generated task."""
    num_validation: int = 200
    """Examples of the validation loss, with masks that never change."""
    num_steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 64
    """Examples per optimizer step."""
    token_budget: int = 8192
    """Most tokens in one forward, clean and noisy ones: it bounds the memory and changes nothing else. Longer
    examples are left out, and counted."""
    learning_rate: float = 1e-4
    """The highest one."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How it falls after the warm-up."""
    warmup_steps: int = 20
    """Optimizer steps over which it rises."""
    final_lr_ratio: float = 0.0
    """What linear and cosine end at, as a share of learning_rate."""
    beta2: float = 0.99
    """AdamW's; beta1 is 0.9."""
    weight_decay: float = 0.0
    """AdamW's, on matrices alone."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the weights in the forward; below float32 the optimizer keeps float32 masters. Default: as stored,
    float32 for a fresh model."""
    lora_rank: int | None = None
    """Train adapters of this rank on all linear layers instead of the weights; what is written is merged."""
    lora_alpha: float = 32.0
    """Adapters count alpha / rank."""

    validate_every: int = 100
    """Optimizer steps between two validation losses; the last step has one too."""
    checkpoint_every: int = 100
    """Optimizer steps between two checkpoints; the latest is kept."""
    seed: int = 0
    """Of fresh weights, the data's order and the masks."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: {value} is too small; use 1 or more")
        if not 0 <= self.min_mask_ratio < 1:
            raise UserError(f"min_mask_ratio: {self.min_mask_ratio} cannot be used; use 0 <= ratio < 1")
        if self.prompt is not None:
            from tstar.data import prompt_template  # numpy would slow down --help

            prompt_template(self.prompt)
        if self.seed < 0:
            raise UserError(f"seed: {self.seed} is negative; use 0 or more")
        if self.levels is not None and self.levels[0] > self.levels[1]:
            raise UserError(f"levels: {list(self.levels)} is empty; give the lower one first")
        self._check_blocks()

    def _check_blocks(self) -> None:
        sizes, weights = self.block_sizes, self.block_size_weights
        if not sizes or min(sizes) < 1:
            raise UserError(f"block_sizes: {sizes} cannot be used; give one or more of at least 1, like 4")
        if not self.offsets or not all(0 <= offset < min(sizes) for offset in self.offsets):
            raise UserError(
                f"offsets: {self.offsets} do not fit block_sizes {sizes}; use 0 <= offset < {min(sizes)}"
            )
        if weights is not None and (len(weights) != len(sizes) or min(weights) < 0 or sum(weights) <= 0):
            raise UserError(
                f"block_size_weights: {weights} cannot be used; give {len(sizes)} numbers, none of them "
                "negative, not all of them 0"
            )

    # -- config.yaml ---------------------------------------------------------------------------

    def to_yaml(self) -> str:
        import yaml

        values = {name: _plain(value) for name, value in asdict(self).items()}
        text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_yaml(cls, text: str, place: Path) -> SftOptions:
        """Read back what `to_yaml` wrote, perhaps by another version or changed by hand."""
        import pydantic
        import yaml

        try:
            options: SftOptions = pydantic.TypeAdapter(cls).validate_python(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise UserError(f"{place}: not valid YAML ({str(error).splitlines()[0]}); repair it") from error
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{place}: {field}: {first['msg']}; correct the line") from error
        return options


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
