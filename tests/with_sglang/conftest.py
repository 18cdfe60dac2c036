"""Tests against SGLang 0.5.23's own code, on a CPU (`make test-sglang`); elsewhere they skip."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # cases.py, whichever folder pytest was told to run


@pytest.fixture(scope="session")
def sglang():
    """SGLang's modules."""
    from k2i_jax.interop.sglang_host import find_sglang, import_sglang

    if find_sglang() is None:
        pytest.skip("needs SGLang 0.5.23's source: make test-sglang")
    return import_sglang()


@pytest.fixture
def make_pool(sglang, monkeypatch):
    """Makes SGLang's own pool of three layers: 19 (ratio 2, its own keys), 20 (ratio 1, SOURCE) and 24 (REINDEX)."""

    def make(*, page8: bool = False, fused: bool = False, pages: int = 31, page_size: int = 64):
        import torch

        monkeypatch.setattr(sglang.pool, "_is_hip", not fused)
        pool = object.__new__(sglang.pool.DeepSeekV4TokenToKVPool)
        pool.layer_transfer_counter, pool.start_layer = None, 0
        pool._stage_start, pool._stage_end = 0, 25
        pool.compression_ratios = [0] * 19 + [2, 1, 0, 0, 0, 1]
        pool.sources_by_ratio = {1: [20], 2: [19]}
        pool.kv_pools = {1: None, 2: None}
        pool._init_compressed_layer_mapping()
        size = (pages - 1) * page_size
        pool.index_pools = {
            ratio: pool._make_indexer_pool(size, page_size, torch.uint8, 128, 1, "cpu", False, force_fp4=True,
                                           global_page_size=page_size, index_k_page8=page8 and ratio == 1)
            for ratio in (1, 2)
        }  # fmt: skip
        return pool

    return make
