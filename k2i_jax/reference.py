"""The oracle: what this package computes, in float64 NumPy, slowly and obviously. It is also the documentation.

Nothing here shares code with the implementations, save for the address arithmetic of ``k2i_jax.layout``.
"""

import numpy as np

from k2i_jax.layout import payload_offset, scale_offset

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # values of e2m1 codes 0..7; bit 3 is the sign


def dequantize(payload: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``u8[..., D/2], u8[..., D/32] -> f64[..., D]``: even dims are low nibbles, scale byte 255 is NaN."""
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(*payload.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7]
    factors = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
    return values * np.repeat(factors, 32, axis=-1)


def read_key(plane, slot: int) -> np.ndarray:
    """The 128 dims of the key in ``slot``, byte by byte."""
    payload_plane = np.asarray(plane.payload).reshape(-1)
    scale_plane = payload_plane if plane.scale is None else np.asarray(plane.scale).reshape(-1)
    payload = [payload_plane[payload_offset(plane.layout, slot, byte)] for byte in range(64)]
    scale = [scale_plane[scale_offset(plane.layout, slot, group)] for group in range(4)]
    return dequantize(np.array(payload, np.uint8), np.array(scale, np.uint8))


def row_slots(table, row: int) -> list[int]:
    """Slot of every position that ``row`` sees; -1 where a page id is negative."""
    pages, starts = np.asarray(table.pages), np.asarray(table.query_start_loc)
    sequences = [s for s in range(len(pages)) if starts[s] <= row < starts[s + 1]]
    end = int(np.clip(np.asarray(table.row_ends)[row], 0, pages.shape[1] * 64)) if sequences else 0
    pages_of_row = pages[sequences[0]] if sequences else []
    return [int(pages_of_row[j // 64]) * 64 + j % 64 if pages_of_row[j // 64] >= 0 else -1 for j in range(end)]


def index_logits(queries, weights, plane, table, weight_scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """``f64[rows, 64 P]`` logits, and the same sum of absolute terms: what rounding errors are measured against."""
    q = dequantize(np.asarray(queries.payload), np.asarray(queries.scale))
    w = np.asarray(weights, np.float64) * weight_scale
    logits = np.full((q.shape[0], np.asarray(table.pages).shape[1] * 64), -np.inf)
    magnitude = np.zeros_like(logits)
    keys: dict[int, np.ndarray] = {}
    for row in range(q.shape[0]):
        for position, slot in enumerate(row_slots(table, row)):
            if not 0 <= slot < plane.payload.shape[0] * 64:
                continue
            key = keys[slot] if slot in keys else keys.setdefault(slot, read_key(plane, slot))
            dots = np.maximum(q[row] @ key, 0.0)
            logits[row, position] = w[row] @ dots
            magnitude[row, position] = np.abs(w[row]) @ dots
    return logits, magnitude


def select_candidate_blocks(logits, row_ends, topk_blocks: int = 2048, block_size: int = 8) -> list[list[int]]:
    """The block ids of each row, ascending."""
    chosen = []
    for row, end in zip(np.asarray(logits), np.asarray(row_ends), strict=True):
        end = int(np.clip(end, 0, len(row)))
        scores = []
        for first in range(0, end, block_size):
            block = row[first : min(first + block_size, end)]
            newest = first + block_size >= end
            scores.append(np.inf if newest else np.max(np.where(np.isnan(block), -np.inf, block)))
        order = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
        if order and (last := len(scores) - 1) in order:  # an inf elsewhere must not push the newest out
            order = [last, *(b for b in order if b != last)]
        chosen.append(sorted(order[:topk_blocks]))
    return chosen


def select_topk(logits, row_ends, k: int = 512, allowed: list[set[int]] | None = None) -> list[list[int]]:
    """The positions of each row, ascending; with ``allowed``, only positions of those blocks of 8."""
    chosen = []
    for index, (row, end) in enumerate(zip(np.asarray(logits), np.asarray(row_ends), strict=True)):
        end = int(np.clip(end, 0, len(row)))
        positions = [j for j in range(end) if not np.isnan(row[j]) and row[j] != -np.inf]
        if allowed is not None:
            positions = [j for j in positions if j // 8 in allowed[index]]
        positions.sort(key=lambda j: (-row[j], j))  # -0.0 == 0.0
        chosen.append(sorted(positions[:k]))
    return chosen


def relative_error(ours, reference, magnitude) -> np.ndarray:
    """``norm(ours - reference) / norm(magnitude)`` per row over finite columns: the contract's bound is 1e-6.

    Rows whose finite columns are all zero in ``magnitude`` have error 0 if they agree and inf otherwise.
    """
    errors = []
    for a, b, m in zip(np.asarray(ours, np.float64), reference, magnitude, strict=True):
        live = np.isfinite(b)
        difference, size = np.linalg.norm(a[live] - b[live]), np.linalg.norm(m[live])
        errors.append(difference / size if size else (0.0 if difference == 0 else np.inf))
    return np.array(errors)
