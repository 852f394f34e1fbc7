"""`tstar plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tstar.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tstar.config import RunConfig
    from tstar.model.config import ModelConfig
    from tstar.plan import Cluster, Workload


@dataclass(frozen=True)
class Plan:
    """Estimate the memory and the time of a run, stage by stage, before it is started.

        tstar plan sdar-1.7b-tstar --gpus 8 --device h200

        tstar plan sdar-4b-tstar rollout.max_tokens=4096 --gpus 16 --device h100

        tstar plan sdar-8b-tstar --scale 8 64 512 4096

    A roofline (docs/scaling.md): what is multiplied and what is read, over what the device can do, plus
    launches. Response lengths and tokens per forward decide most of it and are assumed: give your own.
    Scoring answers and writing checkpoints are not in it."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE|FILE.yaml")]
    """What would be trained."""
    overrides: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Other values of settings, as rollout.num_samples=8."""
    gpus: int = 1
    """Devices in all."""
    device: Literal["h200", "h100", "a100", "cpu", "cuda"] = "h200"
    """cpu and cuda: this machine's own, measured now."""
    gpus_per_node: int = 8
    model: Path | None = None
    """A model directory in place of the recipe's; of a published SDAR the name is enough."""
    prompt_length: int | None = None
    """Tokens, mean."""
    response_length: int | None = None
    """Tokens, mean. Default: 700, or half of rollout.max_tokens if that is less."""
    tokens_per_forward: float | None = None
    """Mean of all stages. Default: what the policies give, 2 where they follow the model."""
    max_requests: int | None = None
    """Requests decoded at once on one device. Default: the recipe's."""
    scale: tuple[int, ...] = ()
    """Numbers of devices, like 8 64 512 4096: play an update on each, with stragglers, failures and all that
    must travel (docs/scaling.md), in place of --gpus."""
    groups_per_device: int = 2
    """With --scale: the batch grows with the devices to at least so many problems for each; 0: it stays."""
    json: bool = False
    """One JSON object for each stage, a line each."""

    def run(self) -> None:
        import json

        from rich.console import Console

        from tstar.config import load_config
        from tstar.plan import advise, plan_memory, plan_time
        from tstar.plan.table import to_record, to_table

        config = load_config(self.recipe, self.overrides)
        model, cluster = self._model(config), self._cluster(config)
        console = Console(highlight=False)
        if self.scale:
            self._play(console, cluster, list(self._workloads(config, model)))
            return
        hours = 0.0
        for workload in self._workloads(config, model):
            memory, timing = plan_memory(workload, cluster), plan_time(workload, cluster)
            advice = advise(workload, cluster)
            hours += timing.hours
            if self.json:
                print(json.dumps(to_record(workload, cluster, memory, timing, advice)))
            else:
                console.print(to_table(workload, cluster, memory, timing, advice))
        if not self.json:
            console.print(*self._closing(cluster, hours), sep="\n")

    def _play(self, console: Console, cluster: Cluster, workloads: list[Workload]) -> None:
        """Each stage on each number of devices."""
        import json

        from tstar.plan import scale, with_work_for
        from tstar.plan.table import to_scale_record, to_scale_table

        name = cluster.device.name
        for workload in workloads:
            updates = [
                scale(
                    with_work_for(workload, number, self.groups_per_device),
                    replace(cluster, num_devices=number),
                )
                for number in self.scale
            ]
            if self.json:
                for each in updates:
                    print(json.dumps(to_scale_record(workload, name, each)))
            else:
                console.print(to_scale_table(workload, name, updates))

    def _workloads(self, config: RunConfig, model: ModelConfig) -> Iterator[Workload]:
        from tstar.experiment.outlook import workload_of

        given = {
            "prompt_length": self.prompt_length,
            "response_length": self.response_length,
            "max_requests": self.max_requests,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for stage in config.stages:
            workload = workload_of(config, stage, model)
            if self.tokens_per_forward is not None:
                tokens = min(self.tokens_per_forward, float(stage.block_size))
                workload = replace(workload, tokens_per_forward=tokens)
            yield replace(workload, **changes)

    def _model(self, config: RunConfig) -> ModelConfig:
        from tstar.model.checkpoint import load_config
        from tstar.plan.shapes import SHAPES, shape_named

        directory = self.model or config.model
        if (directory / "config.json").is_file():
            return load_config(directory)
        shape = shape_named(directory.name)
        if shape is None:
            raise UserError(
                f"model: {directory} has no config.json, and its name is none of {', '.join(SHAPES)}; "
                "give --model DIRECTORY"
            )
        return shape

    def _cluster(self, config: RunConfig) -> Cluster:
        import torch

        from tstar.model.checkpoint import DTYPES
        from tstar.plan import DEVICES, Cluster, measure

        is_sharded = config.sharding == "full"
        if self.device in DEVICES:
            return Cluster(DEVICES[self.device], self.gpus, self.gpus_per_node, is_sharded)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device: this machine has no CUDA device; name one, like h200")
        measured = measure(torch.device(self.device), DTYPES[config.precision or "float32"])
        return Cluster(measured, self.gpus, self.gpus_per_node, is_sharded)

    def _closing(self, cluster: Cluster, hours: float) -> Iterator[RenderableType]:
        from rich.text import Text

        gpus = f"{cluster.num_devices} x {cluster.device.name}"
        yield Text(f"all stages: {hours:.2f} hours on {gpus}, {hours * cluster.num_devices:.1f} device-hours")
        yield Text(f"constants: {cluster.device.source}")
