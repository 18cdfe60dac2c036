"""A functional allocator of pages: the state is a pytree, every step returns a new one, all of it under jit.

Pages are reference-counted, so sequences can share a prefix. A sequence that appends into a shared page gets a
page of its own first; ``Append.source`` and ``.target`` say which bytes the caller must copy (``copy_pages``).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from k2i_jax._check import AnyArray, as_int32, as_size, check_array
from k2i_jax._varying import varying
from k2i_jax.layout import PAGE_SIZE


@functools.partial(jax.tree_util.register_dataclass, data_fields=["references", "pages", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PagePool:
    """Which pages are in use, by whom, and how long each sequence is.

    Attributes:
      references: i32[num_pages] sequences that hold each page; page 0 is reserved and never handed out.
      pages: i32[sequences, P] each sequence's pages, 0 past its length. A ``PageTable`` takes it as it is.
      lengths: i32[sequences] keys each sequence holds.
    """

    references: Int32[Array, "num_pages"]
    pages: Int32[Array, "sequences P"]
    lengths: Int32[Array, "sequences"]

    @classmethod
    def create(cls, num_pages: int, sequences: int, pages_per_sequence: int) -> "PagePool":
        """An empty pool with room for ``sequences`` of up to ``64 * pages_per_sequence`` keys.

        Raises:
          TypeError, ValueError: no integer, or a size below 1 (num_pages: below 2, page 0 is reserved).
        """
        num_pages, sequences = as_size("num_pages", num_pages, 2), as_size("sequences", sequences)
        pages_per_sequence = as_size("pages_per_sequence", pages_per_sequence)
        return cls(
            jnp.zeros(num_pages, jnp.int32).at[0].set(1),
            jnp.zeros((sequences, pages_per_sequence), jnp.int32),
            jnp.zeros(sequences, jnp.int32),
        )

    @property
    def num_free(self) -> Int32[Array, ""]:
        return jnp.sum(self.references == 0, dtype=jnp.int32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slots", "source", "target", "ok"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Append:
    """What :func:`append` handed out.

    Attributes:
      slots: i32[sequences, max_new] slot of each new key, -1 past a sequence's count.
      source, target: i32[sequences] page to copy before writing (``copy_pages``), -1 for none.
      ok: bool[sequences] False where the pool or the sequence's table was full; nothing changed there.
    """

    slots: Int32[Array, "sequences max_new"]
    source: Int32[Array, "sequences"]
    target: Int32[Array, "sequences"]
    ok: Bool[Array, "sequences"]


def _pages_of(lengths):
    return (lengths + PAGE_SIZE - 1) // PAGE_SIZE


def append(pool: PagePool, counts: Int[AnyArray, "sequences"], *, max_new: int) -> tuple[PagePool, Append]:
    """Lengthens each sequence by ``counts`` keys, allocating pages in order of their ids.

    Sequences are served in order; one that does not fit keeps its state and has ``ok`` False.

    Args:
      counts: i32[sequences], taken as 0..max_new.
      max_new: most keys a sequence may gain in one call (a shape, hence static).

    Raises:
      TypeError, ValueError: no integers, counts of another shape, a negative ``max_new``.
    """
    return _append(pool, as_int32("counts", counts, pool.lengths.shape), as_size("max_new", max_new, 0))


@functools.partial(jax.jit, static_argnames="max_new")
def _append(pool, counts, max_new):
    sequences, width = pool.pages.shape
    counts = jnp.clip(counts, 0, max_new)
    rows = jnp.arange(sequences, dtype=jnp.int32)
    old, new = pool.lengths, pool.lengths + counts
    last = pool.pages[rows, jnp.minimum(old // PAGE_SIZE, width - 1)]
    shared = (counts > 0) & (old % PAGE_SIZE > 0) & (pool.references[last] > 1)
    fits = new <= width * PAGE_SIZE
    demand = _pages_of(new) - _pages_of(old) + shared

    def serve(left, request):  # in order, so that one that does not fit takes nothing from the next
        fits, pages = request
        ok = fits & (pages <= left)
        return left - jnp.where(ok, pages, 0), ok

    _, ok = lax.scan(serve, varying(pool.num_free, fits, demand), (fits, demand))
    demand = jnp.where(ok, demand, 0)
    through = jnp.cumsum(demand, dtype=jnp.int32)
    shared &= ok

    most = sequences * (-(-max_new // PAGE_SIZE) + 1)
    free = jnp.nonzero(pool.references == 0, size=most, fill_value=-1)[0].astype(jnp.int32)
    order = (through - demand)[:, None] + jnp.arange(-(-max_new // PAGE_SIZE) + 1, dtype=jnp.int32)
    granted = free[jnp.minimum(order, most - 1)]  # [sequences, pages a call], the copy's page first
    granted = jnp.where(jnp.arange(granted.shape[1]) < demand[:, None], granted, -1)

    # The copy's page replaces the last one; the others follow it.
    first = jnp.where(shared, old // PAGE_SIZE, _pages_of(old))
    column = jnp.where(granted >= 0, first[:, None] + jnp.arange(granted.shape[1], dtype=jnp.int32), width)
    pages = pool.pages.at[rows[:, None], column].set(granted, mode="drop")
    num_pages = pool.references.shape[0]
    references = pool.references.at[jnp.where(granted >= 0, granted, num_pages)].add(1, mode="drop")
    references = references.at[jnp.where(shared, last, num_pages)].add(-1, mode="drop")
    lengths = jnp.where(ok, new, old)

    position = old[:, None] + jnp.arange(max_new, dtype=jnp.int32)
    page = pages[rows[:, None], jnp.minimum(position // PAGE_SIZE, width - 1)]
    slots = jnp.where(position < lengths[:, None], page * PAGE_SIZE + position % PAGE_SIZE, -1)
    copied = jnp.where(shared, granted[:, 0], -1)
    return PagePool(references, pages, lengths), Append(slots, jnp.where(shared, last, -1), copied, ok)


def truncate(pool: PagePool, lengths: Int[AnyArray, "sequences"]) -> PagePool:
    """Shortens sequences to ``lengths`` (rejected drafts, say) and frees the pages that nobody holds any more.

    Raises:
      TypeError, ValueError: no integers, or lengths of another shape.
    """
    return _truncate(pool, as_int32("lengths", lengths, pool.lengths.shape))


@jax.jit
def _truncate(pool, lengths):
    lengths = jnp.clip(lengths, 0, pool.lengths)
    columns = jnp.arange(pool.pages.shape[1], dtype=jnp.int32)
    dropped = (columns >= _pages_of(lengths)[:, None]) & (columns < _pages_of(pool.lengths)[:, None])
    target = jnp.where(dropped, pool.pages, pool.references.shape[0])
    references = pool.references.at[target].add(-1, mode="drop")
    return PagePool(references, jnp.where(dropped, 0, pool.pages), lengths)


def release(pool: PagePool, ended: Bool[AnyArray, "sequences"]) -> PagePool:
    """Empties the sequences marked in ``ended``.

    Raises:
      TypeError, ValueError: no booleans (ids would be taken for marks), or marks of another shape.
    """
    ended = ended if isinstance(ended, jax.Array) else np.asarray(ended)
    check_array("ended", ended, (jnp.bool_,), pool.lengths.shape)
    return truncate(pool, jnp.where(ended, 0, pool.lengths))


def fork(pool: PagePool, parent: Int[AnyArray, ""], child: Int[AnyArray, ""], length=None) -> PagePool:
    """Makes ``child`` share the first ``length`` keys (None: all) of ``parent``; what child held is released.

    Indices outside the pool, and a parent that is its own child, change nothing.

    Raises:
      TypeError, ValueError: no integers, or not one each.
    """
    length = None if length is None else as_int32("length", length, ())
    return _fork(pool, as_int32("parent", parent, ()), as_int32("child", child, ()), length)


@jax.jit
def _fork(pool, parent, child, length):
    sequences, width = pool.pages.shape
    live = (parent >= 0) & (parent < sequences) & (child >= 0) & (child < sequences) & (parent != child)
    parent, child = jnp.where(live, parent, 0), jnp.where(live, child, sequences)
    pool = release(pool, jnp.arange(sequences) == child)
    held = pool.lengths[parent]
    length = held if length is None else jnp.clip(length, 0, held)
    used = jnp.arange(width) < _pages_of(length)
    pages = jnp.where(used, pool.pages[parent], 0)
    references = pool.references.at[jnp.where(used & live, pages, pool.references.shape[0])].add(1, mode="drop")
    return PagePool(
        references,
        pool.pages.at[child].set(pages, mode="drop"),
        pool.lengths.at[child].set(length, mode="drop"),
    )
