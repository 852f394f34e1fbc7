"""What the doctor sees, what it makes of it, and that both outputs say it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tstar import cli, doctor
from tstar.cgroup import CgroupLimits
from tstar.doctor import GIB, Cores, Device, Disk, Memory, Note, Package, Report, Software

NO_LIMITS = CgroupLimits(num_cpus=None, memory_bytes=None, free_memory_bytes=None)

CPU = Device("cpu", "a CPU", 16 * GIB, 8 * GIB, None, True, "avx512_bf16", "tiled", "tiles")
GPU = Device("cuda:0", "a GPU", 80 * GIB, 79 * GIB, "9.0", True, "new", "flex", "block mask")
TRITON = Package("triton", "3.4.0", "compiles")
HEALTHY = Report(
    software=Software("0.1.0", "3.11.7", "Linux", "2.13.0", "cpu", None, None),
    cores=Cores(8, 4, 8, None, 8, 4, 4, None),
    memory=Memory(16 * GIB, 8 * GIB, None),
    disk=Disk("/runs", 100 * GIB, 50 * GIB),
    devices=(CPU,),
    packages=(TRITON,),
    notes=(),
)


def findings(report: Report) -> list[str]:
    return [f"{note.finding}: {note.fix}" for note in doctor.find_notes(report)]


def test_examine_sees_this_machine() -> None:
    report = doctor.examine()
    assert report.software.torch == torch.__version__
    assert 1 <= report.cores.num_usable <= len(os.sched_getaffinity(0))
    assert report.cores.torch_threads == torch.get_num_threads()
    assert 0 < report.memory.free_bytes <= report.memory.total_bytes
    assert report.disk.path == str(Path.cwd())
    assert report.devices[0].name == "cpu"
    assert report.devices[0].attention_backend == "tiled"
    assert [package.name for package in report.packages] == list(doctor.PACKAGES)
    assert report.notes == tuple(doctor.find_notes(report))


def test_json_on_stdout_is_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = replace(HEALTHY, notes=(Note("it hurts", "rest"),))
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(report)))


def test_table_shows_every_device_package_and_note() -> None:
    output = StringIO()
    report = replace(HEALTHY, devices=(CPU, GPU), notes=(Note("it [hurts]", "rest"),))
    Console(file=output, width=100).print(doctor.to_table(report))
    for shown in ("a CPU", "cuda:0", "compute capability 9.0", "flex: block mask", "3.4.0", "50.0"):
        assert shown in output.getvalue()
    assert "note: it [hurts]: rest" in output.getvalue()


def test_optional_packages_are_not_imported() -> None:
    code = (
        "import sys; from tstar import doctor; doctor.examine()\n"
        "print({'transformers', 'datasets', 'wandb', 'matplotlib'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize(("num_cpus", "num_usable"), [(None, 6), (0.5, 1), (2.0, 2), (2.5, 3), (64.0, 6)])
def test_usable_cores_obey_affinity_and_cgroup(
    monkeypatch: pytest.MonkeyPatch, num_cpus: float | None, num_usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    cores = doctor.examine_cores(replace(NO_LIMITS, num_cpus=num_cpus))
    assert (cores.num_allowed, cores.num_usable) == (6, num_usable)


def test_memory_obeys_the_cgroup() -> None:
    limits = CgroupLimits(num_cpus=None, memory_bytes=3_000_000, free_memory_bytes=1_000_000)
    assert doctor.examine_memory(limits) == Memory(3_000_000, 1_000_000, 3_000_000)
    assert doctor.examine_memory(NO_LIMITS).total_bytes > 3_000_000


@pytest.mark.parametrize(
    ("cpuinfo", "is_native"),
    [
        ("model name : x\nflags\t\t: fpu amx_bf16 avx512_bf16\n", True),
        ("flags : fpu avx2\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_bf16_of_a_cpu_without_torchs_capabilities(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str, is_native: bool
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(doctor, "read_cpuinfo", lambda: cpuinfo)
    assert doctor.examine_cpu(HEALTHY.memory).is_bf16_native == is_native


def test_bf16_of_a_cpu_by_torchs_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"avx512_bf16": False, "amx_bf16": True, "l2_cache_size": 1, "architecture": "x"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert doctor.examine_cpu(HEALTHY.memory).bf16_reason == "amx_bf16"


@pytest.mark.parametrize(("capability", "is_native"), [((9, 0), True), ((7, 5), False)])
def test_cuda_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_native: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    (device,) = doctor.examine_cuda()
    assert (device.name, device.attention_backend) == ("cuda:0", "flex")
    assert (device.free_memory_bytes, device.total_memory_bytes) == (79 * GIB, 80 * GIB)
    assert device.compute_capability == f"{capability[0]}.{capability[1]}"
    assert device.is_bf16_native == is_native


@pytest.mark.parametrize(("macos", "is_native"), [("13.6", False), ("14.0", True)])
def test_mps_device(monkeypatch: pytest.MonkeyPatch, macos: str, is_native: bool) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("platform.mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    (device,) = doctor.examine_mps(HEALTHY.memory)
    assert (device.name, device.is_bf16_native) == ("mps", is_native)


def test_nvidia_driver_is_found_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert doctor.find_nvidia_driver(path) is None
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    assert doctor.find_nvidia_driver(path) == "550.54.15"


def test_healthy_machine_has_no_notes() -> None:
    assert findings(HEALTHY) == []


@pytest.mark.parametrize(
    ("part", "changes", "fix"),
    [
        ("cores", {"torch_threads": 9}, "export OMP_NUM_THREADS=4"),
        ("cores", {"num_usable": 2}, "export OMP_NUM_THREADS=2"),
        ("cores", {"torch_threads": 1}, "export OMP_NUM_THREADS=4"),
        ("memory", {"free_bytes": GIB}, "smaller model"),
        ("disk", {"free_bytes": GIB}, "another directory"),
        ("software", {"torch_build": "cuda 13.0"}, "CUDA_VISIBLE_DEVICES"),
        ("software", {"nvidia_driver": "550.54.15"}, "CUDA build"),
    ],
)
def test_what_hurts_gets_one_note_with_its_fix(part: str, changes: dict[str, int | str], fix: str) -> None:
    report = replace(HEALTHY, **{part: replace(getattr(HEALTHY, part), **changes)})
    (finding,) = findings(report)
    assert fix in finding


def test_note_about_a_missing_gpu_says_what_torch_said() -> None:
    software = replace(HEALTHY.software, torch_build="cuda 13.0", cuda_warning="driver too old")
    (finding,) = findings(replace(HEALTHY, software=software))
    assert "driver too old" in finding


@pytest.mark.parametrize(("version", "num_notes"), [("3.4.0", 0), (None, 1)])
def test_a_gpu_wants_triton(version: str | None, num_notes: int) -> None:
    report = replace(
        HEALTHY,
        software=replace(HEALTHY.software, torch_build="cuda 13.0"),
        devices=(CPU, GPU),
        packages=(replace(TRITON, version=version),),
    )
    assert len(findings(report)) == num_notes
