"""DeepSeek-V4.1's sparse-attention index lookup (K2i) in JAX, for both FP4 page layouts of SGLang on MI355X."""

from k2i_jax.candidates import CandidateBlocks, CandidateTable, candidate_table
from k2i_jax.chain import head_weights, index_keys, index_queries, key_slots
from k2i_jax.fp4 import FP4Array, FP4Recipe, fake_quant_fp4, quantize_fp4
from k2i_jax.layout import PageLayout, query_scale_from_aiter, query_scale_to_aiter
from k2i_jax.page_pool import Append, PagePool, append, fork, release, truncate
from k2i_jax.page_table import PageTable, decode_row_ends, prefill_row_ends, verify_row_ends
from k2i_jax.plane import IndexKPlane
from k2i_jax.plane_ops import copy_pages, read_keys, repack, write_keys
from k2i_jax.rope import rope_frequencies, rope_rotations
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import Selection, reindex, select_candidate_blocks, select_topk, source
from k2i_jax.spec import IndexLayer, K2iSpec
from k2i_jax.step import K2i, LayerInputs, StepResult, build_k2i
from k2i_jax.tag import LayoutTag

__version__ = "0.1.0"

__all__ = [
    "Append",
    "CandidateBlocks",
    "CandidateTable",
    "FP4Array",
    "FP4Recipe",
    "IndexKPlane",
    "IndexLayer",
    "K2i",
    "K2iSpec",
    "LayerInputs",
    "LayoutTag",
    "PageLayout",
    "PagePool",
    "PageTable",
    "Selection",
    "StepResult",
    "append",
    "build_k2i",
    "candidate_logits",
    "candidate_table",
    "copy_pages",
    "decode_row_ends",
    "fake_quant_fp4",
    "fork",
    "head_weights",
    "index_keys",
    "index_logits",
    "index_queries",
    "key_slots",
    "prefill_row_ends",
    "quantize_fp4",
    "query_scale_from_aiter",
    "query_scale_to_aiter",
    "read_keys",
    "reindex",
    "release",
    "repack",
    "rope_frequencies",
    "rope_rotations",
    "select_candidate_blocks",
    "select_topk",
    "source",
    "truncate",
    "verify_row_ends",
    "write_keys",
]
