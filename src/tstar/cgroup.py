"""What a container lets this process have: CPU and memory limits of cgroups, versions 1 and 2.

The kernel enforces the limit of a process's own group and of every group above it, so the tightest
one counts. psutil and torch see the whole host and know none of this.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 2**60
"""Version 1 writes "no limit" as the largest page-aligned int64; nobody has an exbibyte."""


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of this process; None where there is none."""

    num_cpus: float | None
    """CPU time per wall time, in cores; may be a fraction."""
    memory_bytes: int | None
    """The tightest memory limit."""
    free_memory_bytes: int | None
    """What is left under the tightest limit; file cache that the kernel can drop counts as free."""


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Read the limits from the kernel's files below `root`."""
    cpus = list(cpu_limits(root))
    memory = list(memory_limits(root))
    return CgroupLimits(
        num_cpus=min(cpus, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        free_memory_bytes=min((max(limit - used, 0) for limit, used in memory), default=None),
    )


def cpu_limits(root: Path) -> Iterator[float]:
    """The CPU limit, in cores, of every group of this process that has one."""
    for group in own_groups(root, "cpu"):
        quota = read_words(group / "cpu.max")
        if not quota:
            quota = read_words(group / "cpu.cfs_quota_us") + read_words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            yield int(quota[0]) / int(quota[1])


def memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The memory limit and the bytes in use of every group of this process that has a limit."""
    for group in own_groups(root, "memory"):
        limit = read_words(group / "memory.max") or read_words(group / "memory.limit_in_bytes")
        used = read_words(group / "memory.current") or read_words(group / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max" and int(limit[0]) < UNLIMITED_BYTES:
            yield int(limit[0]), int(used[0]) - droppable_cache_bytes(group)


def droppable_cache_bytes(group: Path) -> int:
    """File cache charged to the group that the kernel gives back under pressure."""
    words = read_words(group / "memory.stat")
    counters = dict(zip(words[0::2], words[1::2], strict=True))
    return int(counters.get("total_inactive_file", counters.get("inactive_file", 0)))


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's group and the groups above it, where `controller` is governed.

    Inside a container the path that the kernel names may not be mounted; the groups above it are.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        group = top / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(top))


def read_lines(path: Path) -> list[str]:
    """Lines of a kernel file; none if this kernel does not have it."""
    return path.read_text().splitlines() if path.is_file() else []


def read_words(path: Path) -> list[str]:
    """Words of a kernel file; none if this kernel does not have it."""
    return path.read_text().split() if path.is_file() else []
