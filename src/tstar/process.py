"""Settings of the whole process, made once where a program begins and never inside the library."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_REUSED_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """Let malloc keep large freed blocks for the next allocation; says whether it could be set.

    A forward on the CPU allocates and frees the same large activations in every layer. glibc returns
    blocks over 32 MiB to the kernel at once and has to fault them in, zeroed, page by page, the next time:
    a tenth to a fifth of a training step. Memory use stays at the high-water mark instead of going down.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    was_set = libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_REUSED_BLOCK)
    return bool(was_set and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
