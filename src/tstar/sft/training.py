"""An SFT run: optimizer steps, validation losses and checkpoints in a run directory.

What a step does is a function of the weights, the optimizer's state and the step's number: data order and
masks are keyed by it. So the number is the only cursor that a checkpoint has to keep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from tstar import atomic
from tstar.errors import UserError
from tstar.lora import LoraConfig, add_lora, has_lora, merged_copy
from tstar.model.checkpoint import DTYPES, load_model, save_model
from tstar.model.tokenizer import add_mask_token, load_tokenizer
from tstar.model.transformer import LanguageModel
from tstar.optimizer import NonFiniteGradientError, Optimizer, OptimizerConfig
from tstar.partition import PartitionRule
from tstar.run_dir import RunDir
from tstar.sft.examples import load_sft_data
from tstar.sft.gradient import BatchLoss, batch_loss, draw_sequences, examples_of_step
from tstar.sft.objective import BlockDiffusion, NextToken, Objective
from tstar.sft.options import SftOptions
from tstar.tasks.chain_model import chain_config, chain_tokenizer
from tstar.tracking import MetricsFile

if TYPE_CHECKING:
    import transformers  # slow to import


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as it is shown and written down."""

    optimizer_step: int
    """Steps done, this one included."""
    batch: BatchLoss
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    validation: BatchLoss | None
    seconds: float
    """Without the validation."""


class SftRun:
    """Model, optimizer and data of one run, at one optimizer step."""

    def __init__(self, options: SftOptions, run: RunDir) -> None:
        self.options, self.run = options, run
        self.model, self.tokenizer = start_model(options)
        self._adapt()
        self.objective = make_objective(options, self.model, self.tokenizer)
        self.data = load_sft_data(options, self.tokenizer, self.objective)
        self.optimizer = Optimizer(self.model.named_parameters(), _optimizer_config(options))

    @classmethod
    def start(cls, options: SftOptions, directory: Path) -> SftRun:
        """A new run; its directory appears once model and data are there."""
        if options.model is not None:
            options = replace(options, model=options.model.resolve())
        run = cls(options, RunDir(directory))
        run.run = RunDir.create(directory, options.to_yaml())
        return run

    @classmethod
    def resume(cls, directory: Path) -> SftRun:
        """A run as its latest checkpoint has it, or as it began."""
        run_dir = RunDir.open(directory)
        run = cls(SftOptions.from_yaml(run_dir.config_yaml, run_dir.path / "config.yaml"), run_dir)
        if run_dir.latest_checkpoint is not None:
            run._load(run_dir.checkpoint_path(run_dir.latest_checkpoint))
        return run

    @property
    def optimizer_step(self) -> int:
        """Steps done."""
        return self.optimizer.num_steps_done

    @property
    def model_directory(self) -> Path:
        """Where the trained model is at the end."""
        return self.run.path / "model"

    def train(
        self, on_step: Callable[[StepReport], None], should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Go on to the last step and write the model; False: stopped before, with a checkpoint."""
        options = self.options
        with self.run.locked(), closing(MetricsFile(self.run.metrics)) as metrics:
            metrics.truncate(self._metrics_offset())
            while self.optimizer_step < options.num_steps:
                report = self._step()
                metrics.append(_record(report))
                on_step(report)
                stops = should_stop()
                if stops or self._is_due(options.checkpoint_every):
                    self._save(metrics.offset)
                if stops:
                    return False
            self._write_model(self.model_directory)
        return True

    # -- steps ---------------------------------------------------------------------------------

    def _step(self) -> StepReport:
        began = time.perf_counter()
        options, data = self.options, self.data
        members = examples_of_step(len(data.examples), options.batch_size, options.seed, self.optimizer_step)
        sequences = draw_sequences(
            self.objective, [data.examples[i] for i in members], (options.seed, self.optimizer_step)
        )
        batch = batch_loss(self.model, self.objective, sequences, options.token_budget)
        try:
            step = self.optimizer.step()
        except NonFiniteGradientError as error:
            raise UserError(
                f"learning_rate: {options.learning_rate} made the training diverge ({error}); lower it, or "
                "raise min_mask_ratio or warmup_steps"
            ) from error
        seconds = time.perf_counter() - began
        validation = self.validate() if data.validation and self._is_due(options.validate_every) else None
        return StepReport(self.optimizer_step, batch, step.learning_rate, step.grad_norm, validation, seconds)

    @torch.no_grad()
    def validate(self) -> BatchLoss:
        """The loss of the validation examples, under the same masks every time."""
        sequences = draw_sequences(
            self.objective, self.data.validation, (self.options.seed, 0), purpose="validation"
        )
        return batch_loss(self.model, self.objective, sequences, self.options.token_budget)

    def _is_due(self, every: int) -> bool:
        return self.optimizer_step % every == 0 or self.optimizer_step == self.options.num_steps

    # -- files ---------------------------------------------------------------------------------

    def _save(self, metrics_offset: int) -> None:
        state = {
            "optimizer_step": self.optimizer_step,
            "metrics_offset": metrics_offset,
            "data": self.data.fingerprint,
        }

        def fill(directory: Path) -> None:
            self._write_model(directory / "model")
            save_file(self.optimizer.state_dict(), directory / "optimizer.safetensors")
            if has_lora(self.model):
                save_file(self._adapters(), directory / "adapters.safetensors")
            atomic.write_text(directory / "state.json", json.dumps(state) + "\n")

        self.run.save_checkpoint(self.optimizer_step, fill)
        self.run.prune([self.optimizer_step])

    def _load(self, checkpoint: Path) -> None:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        if state["data"] != self.data.fingerprint:
            raise UserError(
                f"data: {self.options.data} is not what this run began with; restore it, or start a new run"
            )
        if has_lora(self.model):
            weights = load_file(checkpoint / "adapters.safetensors")
        else:
            weights = dict(load_model(checkpoint / "model").named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        self.optimizer.load_state_dict(load_file(checkpoint / "optimizer.safetensors"))

    def _metrics_offset(self) -> int:
        latest = self.run.latest_checkpoint
        if latest is None:
            return 0
        state = json.loads((self.run.checkpoint_path(latest) / "state.json").read_text(encoding="utf-8"))
        return int(state["metrics_offset"])

    def _write_model(self, directory: Path) -> None:
        model = merged_copy(self.model) if has_lora(self.model) else self.model
        save_model(model, directory, carry_from=self.options.model, tokenizer=self.tokenizer, overwrite=True)

    def _adapt(self) -> None:
        options = self.options
        if options.lora_rank is not None:
            add_lora(self.model, LoraConfig(options.lora_rank, options.lora_alpha), options.seed)

    def _adapters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}


# -- from options ------------------------------------------------------------------------------


def start_model(options: SftOptions) -> tuple[LanguageModel, transformers.PreTrainedTokenizerBase]:
    """The model that the run begins with, a mask token added if the objective asks for one."""
    dtype = None if options.precision is None else DTYPES[options.precision]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model is not None:
        tokenizer = load_tokenizer(options.model)
        model = load_model(options.model, dtype, device)
    elif options.data.startswith("chain:"):
        tokenizer = chain_tokenizer()
        model = LanguageModel(chain_config(options.hidden_size, options.num_layers))
        model.initialise(torch.Generator().manual_seed(options.seed))
        model = model.to(device, dtype)
    else:
        raise UserError(f"model: none is given, and {options.data} brings no tokenizer; give --model DIR")
    if options.objective == "diffusion":
        add_mask_token(model, tokenizer)
        is_one = len(options.block_sizes) == 1
        block_size = options.block_sizes[0] if is_one else None
        model.config = model.model.config = replace(model.config, block_size=block_size)
    elif model.config.is_diffusion:
        raise UserError(
            f"objective: {options.model} denoises blocks and cannot be trained on the next token; use "
            "--objective diffusion"
        )
    return model, tokenizer


def make_objective(
    options: SftOptions, model: LanguageModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> Objective:
    if options.objective == "ar":
        return NextToken()
    assert model.config.mask_token_id is not None
    rules = tuple(
        PartitionRule(block_size, offset, options.origin)
        for block_size in options.block_sizes
        for offset in options.offsets
    )
    weights = options.block_size_weights
    if weights is not None:
        weights = tuple(weight for weight in weights for _ in options.offsets)
    return BlockDiffusion(
        mask_token_id=model.config.mask_token_id,
        eos_token_id=int(tokenizer.eos_token_id),
        rules=rules,
        rule_weights=weights,
        weighting=options.weighting,
        min_mask_ratio=options.min_mask_ratio,
    )


def _optimizer_config(options: SftOptions) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=options.learning_rate,
        lr_schedule=options.lr_schedule,
        warmup_steps=options.warmup_steps,
        num_steps=options.num_steps,
        final_lr_ratio=options.final_lr_ratio,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
    )


def _record(report: StepReport) -> dict[str, object]:
    record: dict[str, object] = {
        "event": "sft",
        "optimizer_step": report.optimizer_step,
        **asdict(report.batch),
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
    }
    if report.validation is not None:
        record["validation_loss"] = report.validation.loss
        record["validation_cross_entropy"] = report.validation.cross_entropy
    record["time"] = {
        "seconds": report.seconds,
        "tokens_per_second": report.batch.num_tokens / report.seconds,
    }
    return record
