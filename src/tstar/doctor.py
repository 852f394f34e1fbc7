"""What this machine has, how tstar will use it, and what stands in the way.

`examine` gathers facts into a `Report`; `find_notes` judges them, and only looks at the report;
`to_json` and `to_table` show them. Optional packages are looked up, never imported.
"""

import json
import math
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tstar import __version__
from tstar.cgroup import CgroupLimits, read_limits
from tstar.model.attention import choose_backend

GIB = 2**30
LOW_MEMORY_BYTES = 2 * GIB
LOW_DISK_BYTES = 5 * GIB
"""A checkpoint of SDAR-1.7B in bf16 takes 3.4 GB; a new one is written before an old one goes."""

PACKAGES = {
    "transformers": "fast tokenizers and chat templates",
    "triton": "compiles FlexAttention on CUDA",
    "datasets": "problems from the Hub",
    "pyarrow": "problems in parquet files",
    "math-verify": "judges math answers",
    "lm-eval": "tstar lm-eval",
    "sglang": "serves a written checkpoint",
    "lmdeploy": "serves a written checkpoint",
    "peft": "LoRA adapters",
    "wandb": "metrics on wandb.ai",
    "tensorboard": "metrics in TensorBoard",
    "trackio": "metrics in a local dashboard",
    "matplotlib": "figures for a paper",
    "flash-attn": "attention of other engines; tstar does not use it",
}
"""Distribution name -> what it is for."""


@dataclass(frozen=True)
class Software:
    """Versions."""

    tstar: str
    python: str
    platform: str
    torch: str
    torch_build: str
    """What torch was compiled for: `cpu`, `cuda 13.0`, `rocm 6.4`."""
    nvidia_driver: str | None
    """Version of the NVIDIA kernel driver, whether or not torch can use it."""
    cuda_warning: str | None
    """What torch said when it was asked for CUDA devices."""


@dataclass(frozen=True)
class Cores:
    """CPU cores, and the threads that torch spreads over them."""

    num_logical: int
    num_physical: int
    num_allowed: int
    """Cores that the affinity mask of this process names."""
    cgroup_limit: float | None
    num_usable: int
    """The smaller of the affinity mask and the cgroup's limit, at least 1."""
    torch_threads: int
    torch_interop_threads: int
    omp_num_threads: str | None
    """The environment variable, as it stands."""


@dataclass(frozen=True)
class Memory:
    """Memory of the host, cut down to what the cgroup allows."""

    total_bytes: int
    free_bytes: int
    cgroup_limit_bytes: int | None


@dataclass(frozen=True)
class Disk:
    """The file system of the working directory, where runs are written."""

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Device:
    """One device that torch can compute on."""

    name: str
    """As torch names it: `cpu`, `cuda:0`, `mps`."""
    model: str
    total_memory_bytes: int
    free_memory_bytes: int
    compute_capability: str | None
    """CUDA only."""
    is_bf16_native: bool
    bf16_reason: str
    attention_backend: str
    attention_reason: str


@dataclass(frozen=True)
class Package:
    """A package that is useful beside tstar."""

    name: str
    version: str | None
    """None if it is not installed."""
    purpose: str


@dataclass(frozen=True)
class Note:
    """Something that hurts, and what to do about it."""

    finding: str
    fix: str


@dataclass(frozen=True)
class Report:
    """All of it."""

    software: Software
    cores: Cores
    memory: Memory
    disk: Disk
    devices: tuple[Device, ...]
    packages: tuple[Package, ...]
    notes: tuple[Note, ...]


def examine() -> Report:
    """Look at this machine."""
    limits = read_limits()
    memory = examine_memory(limits)
    report = Report(
        software=examine_software(),
        cores=examine_cores(limits),
        memory=memory,
        disk=examine_disk(Path.cwd()),
        devices=(examine_cpu(memory), *examine_cuda(), *examine_mps(memory)),
        packages=tuple(find_packages()),
        notes=(),
    )
    return replace(report, notes=tuple(find_notes(report)))


def examine_software() -> Software:
    if torch.version.cuda:
        build = f"cuda {torch.version.cuda}"
    elif torch.version.hip:
        build = f"rocm {torch.version.hip}"
    else:
        build = "cpu"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return Software(
        tstar=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        torch=str(torch.__version__),
        torch_build=build,
        nvidia_driver=find_nvidia_driver(Path("/proc/driver/nvidia/version")),
        cuda_warning=str(caught[0].message) if caught else None,
    )


def find_nvidia_driver(path: Path) -> str | None:
    """The driver's version from the file by which Linux shows it."""
    if not path.is_file():
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
    return version.group() if version else "of unknown version"


def examine_cores(limits: CgroupLimits) -> Cores:
    num_logical = os.cpu_count() or 1
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_logical
    num_usable = num_allowed
    if limits.num_cpus is not None:
        num_usable = max(1, min(num_allowed, math.ceil(limits.num_cpus)))
    return Cores(
        num_logical=num_logical,
        num_physical=psutil.cpu_count(logical=False) or num_logical,
        num_allowed=num_allowed,
        cgroup_limit=limits.num_cpus,
        num_usable=num_usable,
        torch_threads=torch.get_num_threads(),
        torch_interop_threads=torch.get_num_interop_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
    )


def examine_memory(limits: CgroupLimits) -> Memory:
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    if limits.memory_bytes is not None and limits.free_memory_bytes is not None:
        total, free = min(total, limits.memory_bytes), min(free, limits.free_memory_bytes)
    return Memory(total_bytes=total, free_bytes=free, cgroup_limit_bytes=limits.memory_bytes)


def examine_disk(path: Path) -> Disk:
    usage = shutil.disk_usage(path)
    return Disk(path=str(path), total_bytes=usage.total, free_bytes=usage.free)


def examine_cpu(memory: Memory) -> Device:
    kernels = torch.backends.cpu.get_cpu_capability()
    native = sorted({"amx_bf16", "avx512_bf16", "bf16"} & cpu_capabilities())
    emulated = "no AMX, AVX512_BF16 or ARM BF16: emulated, slower than fp32"
    backend, reason = choose_backend(torch.device("cpu"))
    return Device(
        name="cpu",
        model=f"{cpu_model()}, torch's {kernels} kernels",
        total_memory_bytes=memory.total_bytes,
        free_memory_bytes=memory.free_bytes,
        compute_capability=None,
        is_bf16_native=bool(native),
        bf16_reason=", ".join(native) or emulated,
        attention_backend=backend,
        attention_reason=reason,
    )


def cpu_model() -> str:
    """The processor's name: Linux keeps it in /proc/cpuinfo, others where Python looks."""
    names = re.findall(r"^model name\s*:\s*(.+)$", read_cpuinfo(), re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def cpu_capabilities() -> frozenset[str]:
    """Instruction sets of the CPU, as torch spells them; for bf16 Linux spells them alike."""
    if hasattr(torch.cpu, "get_capabilities"):
        return frozenset(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", read_cpuinfo(), re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> str:
    return path.read_text() if path.is_file() else ""


def examine_cuda() -> Iterator[Device]:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        backend, reason = choose_backend(device)
        yield Device(
            name=str(device),
            model=torch.cuda.get_device_name(device),
            total_memory_bytes=total,
            free_memory_bytes=free,
            compute_capability=f"{major}.{minor}",
            is_bf16_native=major >= 8,
            bf16_reason="compute capability " + (">= 8.0" if major >= 8 else "< 8.0: emulated"),
            attention_backend=backend,
            attention_reason=reason,
        )


def examine_mps(memory: Memory) -> Iterator[Device]:
    """Apple's GPU; it shares the host's memory."""
    if not torch.backends.mps.is_available():
        return
    backend, reason = choose_backend(torch.device("mps"))
    macos = platform.mac_ver()[0]
    yield Device(
        name="mps",
        model=f"{platform.machine()} GPU, macOS {macos}",
        total_memory_bytes=memory.total_bytes,
        free_memory_bytes=memory.free_bytes,
        compute_capability=None,
        is_bf16_native=int(macos.split(".")[0]) >= 14,
        bf16_reason="needs macOS 14",
        attention_backend=backend,
        attention_reason=reason,
    )


def find_packages() -> Iterator[Package]:
    for name, purpose in PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        yield Package(name=name, version=version, purpose=purpose)


def find_notes(report: Report) -> Iterator[Note]:
    """What hurts, each with its fix."""
    yield from find_thread_notes(report.cores)
    yield from find_gpu_notes(report)
    free = format_bytes(report.memory.free_bytes)
    if report.memory.free_bytes < LOW_MEMORY_BYTES:
        yield Note(
            f"only {free} of memory is free",
            "close other programs, raise the container's limit, or choose a smaller model",
        )
    if report.disk.free_bytes < LOW_DISK_BYTES:
        yield Note(
            f"only {format_bytes(report.disk.free_bytes)} of disk is free in {report.disk.path}",
            "free some, or start runs in another directory",
        )


def find_thread_notes(cores: Cores) -> Iterator[Note]:
    num_useful = min(cores.num_usable, cores.num_physical)
    fix = f"export OMP_NUM_THREADS={num_useful}"
    if cores.torch_threads > cores.num_usable:
        yield Note(
            f"torch runs {cores.torch_threads} threads on {cores.num_usable} usable cores,"
            " and they wait for one another",
            fix,
        )
    elif cores.torch_threads < num_useful:
        yield Note(
            f"torch runs {cores.torch_threads} thread{'s' * (cores.torch_threads > 1)} and leaves"
            f" {num_useful - cores.torch_threads} of {num_useful} cores idle",
            fix,
        )


def find_gpu_notes(report: Report) -> Iterator[Note]:
    software = report.software
    has_gpu = any(device.name.startswith("cuda") for device in report.devices)
    has_triton = any(package.name == "triton" and package.version for package in report.packages)
    if software.torch_build != "cpu" and not has_gpu:
        said = f" ({software.cuda_warning})" if software.cuda_warning else ""
        yield Note(
            f"torch is built for {software.torch_build} but sees no GPU{said}",
            "check CUDA_VISIBLE_DEVICES and the driver; with no GPU, torch's cpu build is smaller",
        )
    if software.torch_build == "cpu" and software.nvidia_driver:
        yield Note(
            f"NVIDIA driver {software.nvidia_driver} is here but torch is built for the CPU",
            "install torch's CUDA build, https://pytorch.org/get-started/locally",
        )
    if has_gpu and not has_triton:
        yield Note("FlexAttention cannot compile without triton", "pip install triton")


def to_json(report: Report) -> str:
    """One JSON object with the report's fields; sizes are in bytes."""
    return json.dumps(asdict(report), indent=2, allow_nan=False)


def to_table(report: Report) -> RenderableType:
    """Tables and notes for a terminal."""
    machine = Table("machine", "", title=f"tstar {report.software.tstar}", title_justify="left")
    for rows in (host_rows(report), *(device_rows(device) for device in report.devices)):
        for name, value in rows:
            machine.add_row(name, Text(value))
        machine.add_section()
    packages = Table("package", "version", "for")
    for package in report.packages:
        packages.add_row(package.name, package.version or "-", package.purpose)
    notes = [Text(f"note: {note.finding}: {note.fix}") for note in report.notes]
    return Group(machine, packages, *notes)


def host_rows(report: Report) -> list[tuple[str, str]]:
    software, cores, memory, disk = report.software, report.cores, report.memory, report.disk
    driver = f", NVIDIA driver {software.nvidia_driver}" if software.nvidia_driver else ""
    usable = f"{cores.num_usable} of {cores.num_logical} usable"
    if cores.cgroup_limit is not None:
        usable += f", cgroup limit {cores.cgroup_limit:g}"
    free = free_of_total(memory.free_bytes, memory.total_bytes)
    if memory.cgroup_limit_bytes is not None:
        free += f", cgroup limit {format_bytes(memory.cgroup_limit_bytes)}"
    omp = f"OMP_NUM_THREADS is {cores.omp_num_threads or 'not set'}"
    return [
        ("python", f"{software.python}, {software.platform}"),
        ("torch", f"{software.torch}, built for {software.torch_build}{driver}"),
        ("cores", usable),
        (
            "threads",
            f"{cores.torch_threads} in an operation, {cores.torch_interop_threads} across; {omp}",
        ),
        ("memory", free),
        ("disk", f"{free_of_total(disk.free_bytes, disk.total_bytes)} in {disk.path}"),
    ]


def device_rows(device: Device) -> list[tuple[str, str]]:
    capability = device.compute_capability
    native = "native" if device.is_bf16_native else "not native"
    return [
        (device.name, device.model + (f", compute capability {capability}" if capability else "")),
        ("  memory", free_of_total(device.free_memory_bytes, device.total_memory_bytes)),
        ("  bf16", f"{native} ({device.bf16_reason})"),
        ("  attention", f"{device.attention_backend}: {device.attention_reason}"),
    ]


def free_of_total(free_bytes: int, total_bytes: int) -> str:
    return f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"


def format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
