"""Limits are read from the kernel's files, here from made-up ones."""

from pathlib import Path

import pytest

from tstar.cgroup import CgroupLimits, read_limits

GIB = 2**30
NO_LIMITS = CgroupLimits(num_cpus=None, memory_bytes=None, free_memory_bytes=None)


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_no_cgroups_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == NO_LIMITS


def test_version_2_takes_the_tightest_group_above(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/job/memory.current": f"{GIB}\n",
        },
    )
    assert read_limits(tmp_path) == CgroupLimits(1.5, 4 * GIB, 2 * GIB)


def test_version_1(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n3:pids:/other\n0::/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB // 2}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"cache 7\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
        },
    )
    assert read_limits(tmp_path) == CgroupLimits(2.0, 2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize("used", [GIB, 5 * GIB])
def test_path_of_the_host_is_not_mounted_inside_a_container(tmp_path: Path, used: int) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../host/path\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{used}\n",
        },
    )
    assert read_limits(tmp_path) == CgroupLimits(None, 4 * GIB, max(4 * GIB - used, 0))


def test_unlimited_groups(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.current": f"{GIB}\n",
        },
    )
    assert read_limits(tmp_path) == NO_LIMITS
