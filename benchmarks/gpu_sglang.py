"""Checks of the SGLang bridge that only a GPU can make: its Triton scorer on a FUSED pool, and the capture's copies.

    python benchmarks/gpu_sglang.py --sglang FOLDER

FOLDER holds the unpacked SGLang wheel (see ``benchmarks/peers/sglang_triton.py``). Exit code 1 if a check fails.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the rest of the memory

import jax.numpy as jnp
import numpy as np
import torch

import k2i_jax as k2i
from k2i_jax.interop import bundle
from k2i_jax.interop import sglang as bridge
from k2i_jax.interop.crosscheck import crosscheck
from k2i_jax.interop.dlpack import to_torch
from k2i_jax.interop.replay import replay
from k2i_jax.layout import query_scale_to_aiter
from k2i_jax.parity import random_problem

ROOT = Path(__file__).parent.parent
BF16_NOISE = 1e-2  # SGLang's Triton scorer rounds dots and products to bfloat16
sys.path.insert(0, str(Path(__file__).parent / "peers"))


def on_gpu(x):
    return torch.tensor(np.ascontiguousarray(x), device="cuda")


def check_fused(wheel: str, name: str) -> bool:
    """SGLang's compiled Triton scorer on a golden FUSED pool, against ours on the same memory and on PAGE8."""
    import sglang_triton

    score = sglang_triton.load(wheel).fp4_index_logits_paged
    case = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    rows, heads, _ = case["q_fp4"].shape
    scale = k2i.query_scale_from_aiter(jnp.asarray(case["q_scale"]), heads)
    queries = k2i.FP4Array(jnp.asarray(case["q_fp4"]), scale)
    pool = on_gpu(case["fused_pool"])
    holder = SimpleNamespace(low_ratio_index_k_is_split=lambda i: False, get_index_k_with_scale_buffer=lambda i: pool)
    plane = bridge.plane_from_pool(holder, 20)
    assert plane.payload.unsafe_buffer_pointer() == pool.data_ptr()
    pages = case["page_table"][case["row_to_seq"]]
    slots = (pages[:, :, None] * 64 + np.arange(64)).reshape(rows, -1).astype(np.int32)
    theirs = score(
        to_torch(queries.dequantize(jnp.bfloat16)), on_gpu(case["weights"]).bfloat16(),
        torch.arange(rows, device="cuda"), on_gpu(slots), on_gpu(case["lengths"]).long(), pool, 64, slots.shape[1], 1,
    )  # fmt: skip
    table = bridge.table_from_sglang(on_gpu(pages), on_gpu(case["lengths"]))
    args = {"queries": queries, "weights": jnp.asarray(case["weights"]), "table": table}
    report = crosscheck(None, theirs, case["lengths"], plane=plane, tolerance=BF16_NOISE, **args)
    page8 = k2i.IndexKPlane.from_arrays(case["page8_payload"], case["page8_scale"], "page8")
    same = crosscheck(None, theirs, case["lengths"], plane=page8, tolerance=BF16_NOISE, **args)
    strict = crosscheck(None, theirs, case["lengths"], plane=plane, tolerance=1e-6, **args)
    print(f"{name}: SGLang's Triton scorer on FUSED, compiled: {report.verdict}; against PAGE8: {same.verdict}")
    return report.ok and same.ok and not strict.ok  # that it is no float32 scorer must be seen


def check_capture() -> bool:
    """The recorder on CUDA tensors: everything is overwritten right after the layer, the bundle holds the old bytes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_capture import fake_step, record

    from k2i_jax_capture.recorder import Recorder

    good = True
    for layout in ("page64", "page8"):
        folder = Path(tempfile.mkdtemp())
        recorder = Recorder(str(folder))
        lengths = (200, 70, 1, 640)
        queries, weights, plane, table = random_problem(1, 32, lengths)
        plane = k2i.repack(plane, layout)
        logits = k2i.index_logits(queries, weights, plane, table)
        chosen = k2i.select_topk(logits, table, k=16)
        backend, layer, batch, call = fake_step(lengths, page8=layout == "page8")
        shape = (plane.num_pages, 1, 4, 64)
        metadata = backend.forward_metadata.low_ratio_indexer_metadata(1)
        metadata.page_table = on_gpu(table.pages)
        call = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in call.items()} | {
            "q_fp4": on_gpu(queries.payload).view(torch.int8),
            "q_scale": on_gpu(query_scale_to_aiter(jnp.asarray(queries.scale))), "weights": on_gpu(weights),
            "k_payload": on_gpu(plane.payload).view(*shape, 16), "k_scale": on_gpu(plane.scale).view(shape),
            "block_tables": metadata.page_table,
        }  # fmt: skip
        core = backend.forward_metadata.core_metadata
        core.slots, core.positions = on_gpu(chosen.slots), on_gpu(chosen.positions)
        (folder / "arm").touch()
        out = on_gpu(logits)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)  # the copies are queued behind it, and so is what overwrites their sources
            record(recorder, backend, layer, batch, call, out)
            for x in (*call.values(), out, core.slots, core.positions):
                if isinstance(x, torch.Tensor):
                    x.view(torch.uint8).fill_(0xFF)
            recorder._close_step()
        recorder.writer.join()
        if recorder.error:
            print(f"capture on the GPU, {layout}: {recorder.error}")
            return False
        [path] = folder.glob("step*")
        [finding] = replay(bundle.read(path))
        verdict = finding.report.verdict if finding.report else "nothing scored"
        print(f"capture on the GPU, {layout}: replayed from the bundle: {verdict}")
        good &= finding.ok and finding.report is not None and finding.report.same_bits
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", help="folder of the unpacked SGLang wheel")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    good = check_capture()
    if args.sglang:
        good &= all([check_fused(args.sglang, name) for name in ("verify", "two_level", "heads64")])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
