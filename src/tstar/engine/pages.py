"""Who owns which page of the KV store, and which prompts lie in it already.

A request gets every page that it can ever need when it is admitted, so nothing is allocated while it
runs. Pages are counted, not copied: the full pages of a prompt belong to every request that has it and to
the cache that remembers it. The page in which a prompt ends is each request's own, because its response
goes on in it; its prompt part is copied, or written together with the first one's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PromptKey = tuple[object, ...]


class PagePool:
    """Reference counts of pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = np.zeros(num_pages, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_last_reference(self, page: int) -> bool:
        return bool(self._counts[page] == 1)

    def take(self, count: int) -> list[int]:
        """Pages that nobody owned, with one reference each."""
        assert count <= len(self._free)
        pages = [self._free.pop() for _ in range(count)]
        self._counts[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._counts[page] > 0
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drop one reference each; the pages that became free by it."""
        freed = []
        for page in pages:
            assert self._counts[page] > 0
            self._counts[page] -= 1
            if self._counts[page] == 0:
                freed.append(page)
        self._free += freed
        return freed


@dataclass(eq=False)
class Prompt:
    """A prompt in the store: being read, in use, or remembered."""

    key: PromptKey
    length: int
    """Positions before the first block of the response."""
    full_pages: list[int]
    tail_page: int | None
    """Where its last, partly filled page can be copied from."""
    num_read: int = 0
    """Positions whose keys and values are written."""
    slots: list[int] = field(default_factory=list)
    """Running requests that have it; while it is being read, the first one reads it for all."""

    @property
    def is_read(self) -> bool:
        return self.num_read == self.length

    @property
    def reader(self) -> int | None:
        """The request that reads it for all; None once it is read."""
        return None if self.is_read else self.slots[0]

    @property
    def pages(self) -> list[int]:
        """What the cache itself holds references to."""
        return self.full_pages if self.tail_page is None else [*self.full_pages, self.tail_page]


@dataclass(frozen=True, slots=True)
class Lease:
    """What an admitted request holds."""

    prompt: Prompt | None
    """None: no prompt token stands before the first block of the response."""
    pages: list[int]
    """In order of positions, the prompt's full pages among them."""
    page_to_copy: tuple[int, int] | None
    """(from, to): the part of the prompt that has been read into a page of another request."""


class PageTable:
    """Admission: all pages of a request, or none and a later try."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self._prompts: OrderedDict[PromptKey, Prompt] = OrderedDict()
        """Least recently used first."""

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def admit(self, slot: int, key: PromptKey, prompt_length: int, length: int) -> Lease | None:
        """Pages for `length` positions, of which the first `prompt_length` are shared under `key`."""
        num_full, num_in_tail = divmod(prompt_length, self.page_size)
        known = self._prompts.get(key)
        num_pages = self.num_pages_for(length)
        if known is not None and not self._make_room(num_pages - num_full, keep=known):
            if known.slots:
                return None
            self.forget(known)  # nobody else's: its own tail page may be the one that is wanting
            known = None
        num_own = num_pages - (num_full if known else 0)
        if not self._make_room(num_own, keep=known):
            return None
        own = self.pool.take(num_own)
        if known is not None:
            self._prompts.move_to_end(key)
            self.pool.share(known.full_pages)
            known.slots.append(slot)
            has_tail = known.tail_page is not None and known.num_read > num_full * self.page_size
            copy = (known.tail_page, own[0]) if has_tail and known.tail_page is not None else None
            return Lease(known, [*known.full_pages, *own], copy)
        if prompt_length == 0:
            return Lease(None, own, None)
        prompt = Prompt(key, prompt_length, own[:num_full], own[num_full] if num_in_tail else None)
        prompt.slots.append(slot)
        self.pool.share(prompt.pages)
        self._prompts[key] = prompt
        return Lease(prompt, own, None)

    def release(self, slot: int, lease: Lease) -> list[int]:
        """Take back what a request holds; the pages that became free by it."""
        prompt = lease.prompt
        freed = self.pool.release(lease.pages)
        if prompt is not None:
            prompt.slots.remove(slot)
            if not prompt.slots and not prompt.is_read:
                freed += self.forget(prompt)
        return freed

    def hand_over(self, prompt: Prompt, lease: Lease) -> None:
        """Its reader left: the next one's page becomes the one that the prompt's end is copied from."""
        if prompt.tail_page is None or self._prompts.get(prompt.key) is not prompt:
            return
        tail_page = lease.pages[len(prompt.full_pages)]
        self.pool.share([tail_page])
        self.pool.release([prompt.tail_page])
        prompt.tail_page = tail_page

    def forget(self, prompt: Prompt) -> list[int]:
        """Nobody else will be given this prompt's pages."""
        if self._prompts.get(prompt.key) is not prompt:
            return []
        del self._prompts[prompt.key]
        return self.pool.release(prompt.pages)

    def forget_unused(self) -> None:
        for prompt in [p for p in self._prompts.values() if not p.slots]:
            self.forget(prompt)

    def _make_room(self, num_pages: int, keep: Prompt | None) -> bool:
        """Forget prompts that no running request has, the longest unused first, until there is room."""
        if self.pool.num_free >= num_pages:
            return True
        for prompt in list(self._prompts.values()):
            if self.pool.num_free >= num_pages:
                break
            if prompt is not keep and not prompt.slots:
                self.forget(prompt)
        return self.pool.num_free >= num_pages
