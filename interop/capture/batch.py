"""A batch as the host knows it: its requests, the model's index layers, and rows of tensors. Nothing here waits."""

from typing import NamedTuple

import torch


class Request(NamedTuple):
    """Rows ``first .. first + rows - 1`` of a batch, which see at most ``keys`` keys."""

    first: int
    rows: int
    keys: int


def row_offset(part, whole) -> int:
    """Which row of ``whole`` the tensor ``part`` begins at, both over one memory."""
    return (part.data_ptr() - whole.data_ptr()) // (whole.stride(0) * whole.element_size())


def take(tensor, rows: list[int]):
    """Rows of a tensor; a run of them as a view."""
    if not rows:
        return tensor[:0]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    index = torch.tensor(rows)
    if tensor.is_cuda:  # from pinned memory: a plain copy would wait for the stream
        index = index.pin_memory().to(tensor.device, non_blocking=True)
    return tensor.index_select(0, index)


def requests(backend, layer, pos, forward_batch) -> list[Request]:
    """The batch's requests in this layer's keys, by host lengths."""
    lengths, mode, ratio = _ints(forward_batch.seq_lens_cpu), forward_batch.forward_mode, layer.compress_ratio
    if mode.is_decode():
        rows = [1] * len(lengths)
    elif mode.is_target_verify():
        rows = [pos.shape[0] // len(lengths)] * len(lengths)
        lengths = [length + rows[0] for length in lengths]
    else:
        tail = getattr(backend.forward_metadata, "late_layer_tail", None)
        rows = _ints(forward_batch.extend_seq_lens_cpu if tail is None else tail.extend_seq_lens_cpu)
    first, out = 0, []
    for length, count in zip(lengths, rows, strict=True):
        out.append(Request(first, count, length // ratio))
        first += count
    return out


def _ints(values) -> list[int]:
    if values is None:
        raise ValueError("the batch has no lengths on the host")
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def index_layers(backend) -> dict[int, tuple[int, bool]]:
    """``(ratio, owns keys)`` of each layer of the model that looks keys up; empty where the model cannot be seen."""
    model = getattr(getattr(backend, "model_runner", None), "model", None)
    if model is None:
        return {}
    found = [m for m in model.modules() if getattr(m, "indexer", None) is not None and hasattr(m, "layer_id")]
    return {
        m.layer_id: (m.compress_ratio, getattr(m, "compressor", None) is not None)
        for m in found
        if getattr(m, "compress_ratio", 0) in (1, 2)
    }
