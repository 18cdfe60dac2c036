"""Run by test_capture_hooks.py in a process of its own: steps of SGLang's backend with the capture plugin loaded.

usage: captured_steps.py before|after DECODE|VERIFY|EXTEND... ; K2I_JAX_CAPTURE says where bundles go
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from cases import LAYOUTS, golden

from k2i_jax.interop.sglang_body import Backend, run_decode
from k2i_jax.interop.sglang_host import _stand_in_for_torchvision, import_sglang


def sets(ids):
    return [sorted(row[row >= 0].tolist()) for row in ids]


def batch_of(backend, mode):
    """The backend's batch in a mode; as VERIFY and EXTEND the case's rows are two requests of six rows each."""
    import torch

    batch = backend.batch()
    batch.forward_mode.name = mode
    if mode == "DECODE":
        return batch
    batch.forward_mode.is_decode = lambda: False
    batch.forward_mode.is_target_verify = lambda: mode == "VERIFY"
    batch.forward_mode.is_extend = lambda: mode == "EXTEND"
    batch.batch_size, batch.extend_seq_lens_cpu = 2, [6, 6]
    ends = backend.lengths[5::6]
    batch.seq_lens_cpu = ends - 6 if mode == "VERIFY" else ends
    if mode == "VERIFY":
        prepare = backend.sglang.indexer.prepare_fp4_rowgroup_decode_workspace
        workspace = prepare(backend.page_table, 6, min_grouped_seqs=1)
        assert workspace.rows_per_seq == 6
        backend.forward_metadata.fp4_low_ratio_decode_workspaces[1] = workspace
    else:  # what the prefill body asks of a device that is not here
        backend.forward_metadata.late_layer_tail = None
        backend.forward_metadata.fp4_low_ratio_prefill_workspaces = {}
        torch.cuda.is_current_stream_capturing = lambda: False
        backend.sglang.indexer._pinned_int32 = lambda values, device: torch.tensor(values, dtype=torch.int32)
    return batch


def main(order, modes):
    if order == "after":
        import_sglang()
    else:
        _stand_in_for_torchvision()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    sglang = import_sglang()
    import torch
    from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend as Real

    expected = 0
    for mode in modes:
        case = golden("two_level" if mode == "DECODE" else "verify")
        for layout in LAYOUTS:
            backend = Backend(sglang, case.arrays, layout)
            backend.speculative_num_draft_tokens = 6
            batch = batch_of(backend, mode)
            pos, hidden = backend.lengths.long() - 1, torch.empty(backend.rows, 1)

            def layer_call(backend, layer, _, __, batch=batch, pos=pos, hidden=hidden):
                Real._low_ratio_index_topk(backend, layer, hidden, None, None, pos, batch)

            outcome = run_decode(backend, layer_call)
            assert sets(outcome.positions) == sets(case["topk_positions"]), (mode, layout)
            assert sets(outcome.slots) == sets(case["topk_slots"]), (mode, layout)
            expected += 1
    if "K2I_JAX_CAPTURE" in os.environ:
        folder = Path(os.environ["K2I_JAX_CAPTURE"])
        end = time.monotonic() + 30
        while len(list(folder.glob("step*.safetensors"))) < expected and time.monotonic() < end:
            time.sleep(0.2)
    print("steps run as recorded:", expected)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main(sys.argv[1], sys.argv[2:])
