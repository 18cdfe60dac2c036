"""The names of SGLang's that are relied on, in one place: hooks, and what `k2i-jax sglang check` looks for."""

TESTED_VERSION = "0.5.23"
FORMAT = "k2i_jax capture 1"

_OPS = "sglang.kernels.ops.attention.dsv4"
_BACKEND = "sglang.srt.layers.attention"

# What is hooked, by the word that the hooks use.
HOOKS = {
    "layer": f"{_BACKEND}.deepseek_v4_backend_hip_radix.DeepseekV4HipRadixBackend._low_ratio_index_topk",
    "inputs": f"{_BACKEND}.dsv4.low_ratio_backend_hip._indexer_inputs",
    "rowgroup": f"{_OPS}.fp4_indexer_hip.rowgroup_paged_mqa_logits",
    "paged": f"{_OPS}.fp4_indexer_hip.aiter_fp4_paged_mqa_logits",
    "blocks": f"{_OPS}.candidate_blocks_hip.select_candidate_blocks_hip",
    "page8_table": f"{_OPS}.candidate_blocks_hip.candidate_page8_table",
}

# Parameters, positional or keyword, that are passed or read by name.
PARAMETERS = {
    HOOKS["layer"]: ["self", "layer", "x", "q_lora", "req", "pos", "forward_batch"],
    HOOKS["inputs"]: ["layer", "x", "q_lora", "pos"],
    HOOKS["rowgroup"]: [
        "q_fp4", "q_scale", "k_payload", "k_scale", "weights", "weight_scale", "block_tables", "query_start_loc",
        "row_ends", "max_query_len", "max_seq_len", "page8", "pages_per_block", "is_decode",
    ],
    HOOKS["paged"]: [
        "q_fp4", "q_scale", "k_payload", "k_scale", "weights", "weight_scale", "page_table", "c4_seq_lens",
    ],
    HOOKS["blocks"]: ["logits", "seq_lens", "topk_blocks", "block_size"],
    HOOKS["page8_table"]: ["ids", "seq_lens", "page_table", "block_size", "page_size"],
}  # fmt: skip

_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool"
POOL_METHODS = {
    f"{_POOL}.get_index_k_fp4_payload_buffer": ["self", "layer_id"],
    f"{_POOL}.get_index_k_fp4_scale_buffer": ["self", "layer_id"],
    f"{_POOL}.low_ratio_index_k_page8": ["self", "layer_id"],
    f"{_POOL}.low_ratio_index_k_is_split": ["self", "layer_id"],
    f"{_POOL}.get_index_k_with_scale_buffer": ["self", "layer_id"],
    f"{_POOL}.get_index_k_page_size": ["self", "compress_ratio"],
}

# Fields of SGLang's tuples, attributes of its objects and other functions that are read.
FIELDS = {
    f"{_OPS}.candidate_blocks_hip.CandidateBlocks": ["ids", "compact_lens", "block_size", "page8"],
    f"{_OPS}.candidate_blocks_hip.CandidatePage8Table": ["ids", "block_tables", "compact_lens", "query_start_loc"],
    f"{_BACKEND}.dsv4.metadata.PagedIndexerMetadata": ["page_table", "compressed_seq_lens"],
}
FUNCTIONS = {
    f"{_BACKEND}.dsv4.low_ratio_backend_hip.low_ratio_index_topk_hip_decode": [
        "backend",
        "layer",
        "x",
        "q_lora",
        "pos",
    ],
    f"{_OPS}.candidate_blocks_hip.topk_within_candidate_blocks_page8": ["candidates", "page_indices", "raw_indices"],
    f"{_OPS}.fp4_indexer_hip.pack_fp4_query_flydsl": ["q"],
    "sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache_hip.store_fp4_index_k_cache_split": ["page8", "rne"],
    "sglang.srt.model_executor.runner_utils.capture_mode.get_is_capture_mode": [],
    "sglang.srt.runtime_context.get_parallel": [],
    "sglang.srt.plugins.load_plugins": [],
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ["target", "hook", "hook_type"],
}
ENVIRONMENT = ["SGLANG_PLUGINS", "SGLANG_HIP_DSV41_INDEX_K_PAGE8", "SGLANG_HIP_FP4_INDEXER_ROWGROUP"]
