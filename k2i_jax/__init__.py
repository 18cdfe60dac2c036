"""DeepSeek-V4.1's sparse-attention index lookup (K2i) in JAX, for both FP4 page layouts of SGLang on MI355X."""

from k2i_jax.candidates import CandidateBlocks, CandidateTable, candidate_table
from k2i_jax.fp4 import FP4Array, FP4Recipe, fake_quant_fp4, quantize_fp4
from k2i_jax.layout import PageLayout, query_scale_from_aiter, query_scale_to_aiter
from k2i_jax.page_pool import Append, PagePool, append, fork, release, truncate
from k2i_jax.page_table import PageTable, decode_row_ends, prefill_row_ends, verify_row_ends
from k2i_jax.plane import IndexKPlane, copy_pages, read_keys, repack, write_keys
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import Selection, reindex, select_candidate_blocks, select_topk, source
from k2i_jax.tag import LayoutTag

__version__ = "0.1.0"

__all__ = [
    "Append",
    "CandidateBlocks",
    "CandidateTable",
    "FP4Array",
    "FP4Recipe",
    "IndexKPlane",
    "LayoutTag",
    "PageLayout",
    "PagePool",
    "PageTable",
    "Selection",
    "append",
    "candidate_logits",
    "candidate_table",
    "copy_pages",
    "decode_row_ends",
    "fake_quant_fp4",
    "fork",
    "index_logits",
    "prefill_row_ends",
    "quantize_fp4",
    "query_scale_from_aiter",
    "query_scale_to_aiter",
    "read_keys",
    "reindex",
    "release",
    "repack",
    "select_candidate_blocks",
    "select_topk",
    "source",
    "truncate",
    "verify_row_ends",
    "write_keys",
]
