"""Job files under examples/: what they start is what torchrun and tstar take, and their parts agree."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from tstar.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SBATCH, JOB = EXAMPLES / "slurm" / "tstar.sbatch", EXAMPLES / "k8s" / "tstar.yaml"


def fake(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Slurm's commands and torchrun, which say what they were given; and where to find them."""
    there = tmp_path / "bin"
    there.mkdir()
    fake(there, "scontrol", f'[[ $1 == show ]] && printf "n7\\nn8\\n" || echo "$*" >> {tmp_path}/scontrol')
    for name in ("srun", "torchrun"):
        fake(there, name, f'printf "%s\\n" "$@" > {tmp_path}/{name}')
    slurm = {"SLURM_JOB_NODELIST": "n[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41"}
    return {"PATH": f"{there}:{os.environ['PATH']}", **slurm}


def given(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / name).read_text().splitlines()


def assert_is_taken(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """By torchrun, and what that starts by tstar."""
    parsed = parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == "tstar"
    assert main([*parsed.training_script_args, "--dry-run"]) == 0
    assert "target_block_size: 32" in capsys.readouterr().out
    return parsed


def test_slurm_starts_a_run_and_goes_on_with_it(
    tools: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["/bin/bash", str(SBATCH), "sdar-8b-tstar", "rollout.num_samples=8"]
    subprocess.run(command, env=tools, cwd=tmp_path, check=True)
    arguments = given(tmp_path, "srun")
    assert arguments[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    parsed = assert_is_taken(arguments[2:], capsys)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "8", "n7:29500")
    assert "rollout.num_samples=8" in parsed.training_script_args
    (tmp_path / "runs" / "sdar-8b-tstar").mkdir(parents=True)
    (tmp_path / "runs" / "sdar-8b-tstar" / "config.yaml").touch()
    subprocess.run(command, env=tools, cwd=tmp_path, check=True)
    assert given(tmp_path, "srun")[-4:] == ["tstar", "train", "--resume", "runs/sdar-8b-tstar"]


def test_slurm_saves_before_the_time_is_up_and_asks_for_more(tools: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "srun"
    told = f'trap "echo told >> {log}; exit 1" TERM; echo up > {log}; for ((;;)); do sleep 0.05; done'
    fake(tmp_path / "bin", "srun", told)
    job = subprocess.Popen(["/bin/bash", str(SBATCH), "sdar-8b-tstar"], env=tools, cwd=tmp_path)
    while not log.exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=120) != 0
    assert given(tmp_path, "srun") == ["up", "told"]
    assert given(tmp_path, "scontrol") == ["requeue 41"]


def test_slurm_passes_a_failure_on(tools: dict[str, str], tmp_path: Path) -> None:
    fake(tmp_path / "bin", "srun", "exit 3")
    done = subprocess.run(["/bin/bash", str(SBATCH), "sdar-8b-tstar"], env=tools, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert not (tmp_path / "scontrol").exists()


def test_kubernetes_job(tools: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service, job = yaml.safe_load_all(JOB.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    subprocess.run(
        [*container["command"], *container["args"]], env={**tools, **environment}, cwd=tmp_path, check=True
    )
    parsed = assert_is_taken(given(tmp_path, "torchrun"), capsys)
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    host, port = parsed.rdzv_endpoint.split(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert pod["terminationGracePeriodSeconds"] > parsed.shutdown_timeout
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
