"""Stands in for the aiter entry points that SGLang's ROCm indexer imports, scoring with k2i_jax.

With it SGLang's own decode and prefill bodies run on any host: on a laptop, to see what they pass and select, or on a
GPU, to hold aiter's kernels against this library's from inside SGLang. It is no replacement for aiter in a server:
each call waits for its result.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from k2i_jax.candidates import CandidateTable
from k2i_jax.fp4 import FP4Array
from k2i_jax.interop.devices import torch
from k2i_jax.interop.dlpack import ALIGNMENT, call
from k2i_jax.interop.sglang_host import SGLang
from k2i_jax.layout import PAGE_SIZE, SUB_PAGE_SIZE, PageLayout, query_scale_from_aiter
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, index_logits

_PREFILL = "aiter.ops.flydsl.kernels.mqa_logits.pa_mqa_logits_fp4_prefill"
_PLAN_KEYS = ("num_seqs", "max_qlen", "num_rows", "heads", "page_size", "max_seq_len", "pages_per_block")


@contextlib.contextmanager
def aiter_standin(sglang: SGLang | None = None, **options: Any) -> Iterator[types.ModuleType]:
    """While it is open, ``import aiter`` finds this stand-in, and SGLang takes it for an aiter with row-group kernels.

    Args:
      sglang: SGLang's modules (``import_sglang()``), so that what they remember of the installed aiter is forgotten on
        the way in and out. On a host without a GPU their radix top-k, a GPU module, becomes ``torch.topk`` over each
        row's prefix.
      **options: ``implementation``, ``interpret`` or ``config`` of the scoring.

    Yields:
      The module that stands for ``aiter.ops.flydsl``; its ``calls`` lists what was asked for.
    """
    modules = _modules(options)
    saved = {
        name: sys.modules.get(name) for name in {*modules, *(n for n in sys.modules if n.split(".")[0] == "aiter")}
    }
    with contextlib.ExitStack() as stack:
        for name in saved:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        stack.callback(_restore, saved)
        if sglang is not None:
            _forget(sglang)
            stack.callback(_forget, sglang)
            if not torch().cuda.is_available():
                _replace_topk(sglang, stack)
        yield modules["aiter.ops.flydsl"]


def _restore(saved) -> None:
    for name, module in saved.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def _forget(sglang: SGLang) -> None:
    sglang.indexer.aiter_has_fp4_rowgroup.cache_clear()
    sglang.decode._fp4_rowgroup_enabled.cache_clear()


def _modules(options) -> dict[str, types.ModuleType]:
    names, parts = [], _PREFILL.split(".")
    for count in range(1, len(parts) + 1):
        names.append(".".join(parts[:count]))
    modules = {name: types.ModuleType(name, __doc__) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    flydsl: Any = modules["aiter.ops.flydsl"]
    flydsl.calls = []
    flydsl.make_fp4_mqa_plan = make_fp4_mqa_plan
    flydsl.flydsl_pa_mqa_logits_fp4 = functools.partial(pa_mqa_logits_fp4, _calls=flydsl.calls, _options=options)
    flydsl.flydsl_pa_mqa_logits_fp4_prefill = functools.partial(
        pa_mqa_logits_fp4_prefill, _calls=flydsl.calls, _options=options
    )
    prefill: Any = modules[_PREFILL]
    prefill.CTA_INFO_WIDTH, prefill._prefill_cta_info_kernel = 4, _NoSchedule()
    prefill.compute_prefill_schedule = _too_many_rows
    return modules


def _too_many_rows(*arguments, **keywords):
    raise NotImplementedError("the aiter stand-in takes prefills of at most 4096 rows; score in smaller chunks")


class _NoSchedule:
    """A kernel that SGLang launches to fill a schedule, which the stand-in never reads."""

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: None


def make_fp4_mqa_plan(**facts: int) -> dict[str, int]:
    """aiter's plan of a row-group launch: here the facts themselves, held against the call they are passed to."""
    if sorted(facts) != sorted(_PLAN_KEYS):
        raise TypeError(f"make_fp4_mqa_plan: expected {', '.join(_PLAN_KEYS)}, got {', '.join(facts)}")
    return facts


def pa_mqa_logits_fp4(
    q, q_scale, kv, kv_scale, block_tables, weights, seq_lens, max_seq_len, *, weight_scale, kv_block_size, out,
    row_ends=None, query_start_loc=None, max_query_len=1, pages_per_block=1, plan=None, next_n=1, _calls, _options,
    **schedule,
):  # fmt: skip
    """aiter's FP4 paged logits: row-group (``row_ends``, ``plan``) or one row a sequence (``seq_lens``).

    Writes f32 logits into ``out[rows, max_seq_len]`` up to each row's end, and leaves the rest as it was.
    """
    rows, heads = q.shape[0], q.shape[2]
    if plan is not None:
        made = (query_start_loc.shape[0] - 1, max_query_len, rows, heads, kv_block_size, max_seq_len, pages_per_block)
        if plan != dict(zip(_PLAN_KEYS, made, strict=True)):
            raise ValueError(f"plan: made for {plan}, called with {dict(zip(_PLAN_KEYS, made, strict=True))}")
    elif next_n != 1:
        raise ValueError(f"next_n: expected 1 row a sequence, got {next_n}")
    _calls.append(
        {"page8": kv_block_size == 8, "pages_per_block": pages_per_block, "tables": tuple(block_tables.shape)}
    )
    ends = seq_lens if row_ends is None else row_ends
    return _score(
        q, q_scale, kv, kv_scale, block_tables, weights, ends, query_start_loc, weight_scale, kv_block_size,
        pages_per_block, out, _options,
    )  # fmt: skip


def pa_mqa_logits_fp4_prefill(
    q, q_scale, kv, kv_scale, page_table, weights, row_to_batch, local_starts, local_ends, max_seq_len, *,
    weight_scale, kv_block_size, out, _calls, _options, **schedule,
):  # fmt: skip
    """aiter's FP4 prefill logits: row r scores ``page_table[row_to_batch[r]]`` from position 0 to its end."""
    if bool(local_starts.any()):
        raise ValueError("local_starts: only rows that start at position 0 are scored")
    _calls.append({"page8": False, "pages_per_block": 1, "tables": tuple(page_table.shape), "prefill": True})
    tables = page_table.index_select(0, row_to_batch.long())
    return _score(
        q, q_scale, kv, kv_scale, tables, weights, local_ends, None, weight_scale, kv_block_size, 1, out, _options
    )


def _score(
    q, q_scale, kv, kv_scale, tables, weights, ends, starts, weight_scale, page_size, pages_per_block, out, options
):  # fmt: skip
    uint8, rows = torch().uint8, q.shape[0]
    layout = PageLayout.PAGE8 if page_size == SUB_PAGE_SIZE else PageLayout.PAGE64
    pages = kv.shape[0] * page_size // PAGE_SIZE
    virtual = layout is PageLayout.PAGE8 and pages_per_block == 1
    logits = call(
        functools.partial(_logits, layout=layout, virtual=virtual, **options),
        _whole(q.view(uint8).reshape(rows, -1, 64)),
        _whole(q_scale.reshape(rows, 1, 4, 16, 4)),
        kv.view(uint8).view(pages, -1),
        kv_scale.view(pages, -1),
        _whole(tables),
        _whole(weights),
        _whole(ends.reshape(-1).int()),
        None if starts is None else _whole(starts),
        weight_scale=weight_scale,
    )
    width = min(logits.shape[1], out.shape[1])
    live = torch().arange(width, device=out.device) < ends.reshape(-1, 1)
    out[:, :width] = torch().where(live, logits[:, :width], out[:, :width])
    return out


def _whole(tensor):
    return tensor.clone() if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT else tensor


def _logits(q, q_scale, kv, kv_scale, tables, weights, ends, starts, *, layout, virtual, **options):
    queries = FP4Array(q, query_scale_from_aiter(q_scale, q.shape[1]))
    plane = IndexKPlane.from_arrays(kv, kv_scale, layout)
    if virtual:  # one row a sequence, an 8-slot page an entry; only positions would need the block ids
        return candidate_logits(queries, weights, plane, CandidateTable(tables, tables, ends), **options)
    if starts is None:
        return index_logits(queries, weights, plane, PageTable.from_rows(tables, ends), **options)
    return index_logits(queries, weights, plane, PageTable.from_arrays(tables, ends, starts), **options)


def _replace_topk(sglang: SGLang, stack: contextlib.ExitStack) -> None:
    for module, name, replacement in (
        (sglang.candidates, "plan_topk_v2", lambda seq_lens: None),
        (sglang.candidates, "topk_transform_paged_v2", _topk_v2),
        (sglang.decode, "topk_transform_paged", _topk),
    ):
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, replacement)


def _topk_v2(scores, seq_lens, page_table, page_indices, page_size, plan, raw_indices) -> None:
    _topk(scores, seq_lens, page_table, page_indices, page_size, raw_indices)


def _topk(scores, seq_lens, page_table, page_indices, page_size, raw_indices) -> None:
    """SGLang's paged top-k transform: slots (and positions) of each row's best, unordered, -1 after."""
    for row in range(page_indices.shape[0]):
        length, k = int(seq_lens[row]), page_indices.shape[1]
        if length <= k:  # the transform reads no scores then
            chosen = torch().arange(max(length, 0), device=page_indices.device)
        else:
            chosen = scores[row, :length].topk(k).indices
        slots = chosen
        if page_table is not None:
            slots = page_table[row, chosen // page_size].long() * page_size + chosen % page_size
        for buffer, values in ((page_indices, slots), (raw_indices, chosen)):
            if buffer is not None:
                buffer[row].fill_(-1)
                buffer[row, : len(values)] = values.int()
