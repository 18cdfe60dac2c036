"""One recorded forward step: which requests, and copies of what their index lookup read and wrote.

All sizes come from lengths that the host knows, so nothing here waits for the device: tensors are gathered on the
current stream and copied into pinned memory there, and one event marks the end.
"""

import time
from typing import Any

import torch

from k2i_jax_capture.batch import Request, index_layers, requests, row_offset, take

PAGE = 64  # keys a page
_PAGE_BYTES = 4096 + 256 + 4
_HEADS = 64  # most heads that SGLang's packed queries hold


class BudgetError(Exception):
    """The step does not fit; says by how much."""


class Step:
    """What is copied of one step. The methods are called in the order of SGLang's calls, on its thread."""

    def __init__(self, number: int, budget: int, sampled_rows: int):
        self.number, self.budget, self.sampled_rows = number, budget, sampled_rows
        self.facts: dict[str, Any] = {"layers": [], "keys": []}
        self.kept: dict[str, torch.Tensor] = {}
        self.bytes = 0
        self.chosen: list[int] = []
        self.last_layer: int | None = None
        self.complete = False
        self.event: Any = None
        self.touched = time.monotonic()
        self._keys: dict[int, str] = {}
        self._tables: list[Any] = []

    def idle_for(self) -> float:
        return time.monotonic() - self.touched

    # Which requests

    def plan(self, backend, layer, pos, forward_batch) -> None:
        """Chooses as many whole requests, in the batch's order, as the budget holds."""
        known = index_layers(backend)
        self.last_layer = max(known) if known else None
        layers = known or {layer.layer_id: (layer.compress_ratio, True)}
        found = requests(backend, layer, pos, forward_batch)
        mode = forward_batch.forward_mode
        self.facts |= {
            "mode": str(getattr(mode, "name", mode)),
            "requests": len(found),
            "layers known": bool(known),
        }
        topk, left = backend.index_topk, self.budget
        base = layer.compress_ratio
        needs = {
            index: sum(self._cost(r, r.keys * base // ratio, owns, topk) for ratio, owns in layers.values())
            for index, r in enumerate(found)
            if r.rows
        }
        for index, need in needs.items():
            if need <= left:
                self.chosen.append(index)
                left -= need
        if not self.chosen:
            raise BudgetError(
                f"a budget of {self.budget / 2**20:.3g} MiB is too small for any whole request (the smallest needs "
                f"{min(needs.values(), default=0) / 2**20:.3g} MiB); raise K2I_JAX_CAPTURE_MIB"
            )
        self.facts["requests kept"] = self.chosen

    def _cost(self, request: Request, keys: int, owns_keys: bool, topk: int) -> int:
        """Bytes of one layer's records of a request, at most."""
        pages = -(-keys // PAGE)
        row = _HEADS * 64 + 256 + 2 * _HEADS + 8 * topk + 4 * 2048 * 2 + 4
        sampled = min(request.rows, self.sampled_rows)
        return pages * (_PAGE_BYTES * owns_keys + 4) + request.rows * row + sampled * pages * PAGE * 4

    # What the hooks saw

    def begin_layer(self, backend, layer, pos, forward_batch) -> None:
        indexer = layer.indexer
        found = requests(backend, layer, pos, forward_batch)
        self.requests = [found[index] for index in self.chosen]
        self.all_requests = found
        self.rows = [row for r in self.requests for row in range(r.first, r.first + r.rows)]
        self.name = f"layer{layer.layer_id}"
        self.backend, self.layer = backend, layer
        self.q: Any = None
        self.page_table: Any = None
        self.out: Any = None
        pool = backend.token_to_kv_pool
        self.fact: dict[str, Any] = {
            "layer": layer.layer_id,
            "ratio": layer.compress_ratio,
            "source": bool(indexer.is_candidate_source),
            "reindex": bool(indexer.uses_candidates),
            "page8": bool(pool.low_ratio_index_k_page8(layer.layer_id)),
            "topk_blocks": getattr(indexer, "candidate_topk_blocks", 0),
            "block_size": getattr(indexer, "candidate_block_size", 0),
            "index_topk": backend.index_topk,
            "rows": self.rows,
            "calls": [],
            "candidates": [],
            "skips": [],
        }
        metadata = backend.forward_metadata.low_ratio_indexer_metadata(layer.compress_ratio)
        if metadata is not None:
            self.page_table = metadata.page_table

    def inputs(self, q_fp4, q_scale, weights) -> None:
        self.q = q_fp4
        self._keep(f"{self.name}.q_fp4", take(q_fp4.view(torch.uint8), self.rows))
        self._keep(f"{self.name}.q_scale", take(q_scale, self.rows))
        self._keep(f"{self.name}.weights", take(weights, self.rows))

    def scored(self, call: dict[str, Any], logits) -> None:
        """One scoring call, of all of the layer's rows or a run of them."""
        count = call["q_fp4"].shape[0]
        first = row_offset(call["q_fp4"], self.q)
        self.out = logits, first
        rows = [row for row in self.rows if first <= row < first + count]
        if not rows:
            return
        candidates = bool(call["page8"]) and call["pages_per_block"] == 1
        starts = call.get("query_start_loc")
        sequences = self._sequences(rows, first, count, starts, call.get("max_query_len", 1))
        used = sorted(set(sequences))
        bound = {row: self._bound(row) for row in rows}
        tables = take(call["block_tables"], used)
        if not candidates:
            tables = tables[:, : -(-max(bound.values()) // PAGE)]
        sampled = [rows[i * len(rows) // n] for n in [min(len(rows), self.sampled_rows)] for i in range(n)]
        width = tables.shape[1] * (8 if candidates else PAGE)
        name = f"{self.name}.call{len(self.fact['calls'])}"
        self._keep(f"{name}.tables", tables)
        self._keep(f"{name}.row_ends", take(call["row_ends"].reshape(-1), [row - first for row in rows]))
        self._keep(f"{name}.logits", take(logits, [row - first for row in sampled])[:, :width])
        if candidates:
            self._keep(f"{name}.ids", self._ids(call["block_tables"], used))
        self.fact["calls"].append({
            "rows": rows, "sequences": [used.index(s) for s in sequences], "sampled": sampled,
            "candidates": candidates, "page8": bool(call["page8"]), "keys": self._keep_keys(call),
            "weight_scale": float(call["weight_scale"]), "decode": bool(call["is_decode"]),
        })  # fmt: skip

    def blocks(self, ids, logits) -> None:
        """The SOURCE's choice of blocks, for the rows of the last scoring call or a part of them."""
        out, first = self.out or (logits, 0)
        first += (logits.data_ptr() - out.data_ptr()) // (out.stride(0) * out.element_size())
        rows = [row for row in self.rows if first <= row < first + ids.shape[0]]
        if rows:
            self._keep(f"{self.name}.candidates{len(self.fact['candidates'])}", take(ids, [r - first for r in rows]))
            self.fact["candidates"].append(rows)

    def page8_table(self, table) -> None:
        self._tables.append(table)

    def end_layer(self) -> None:
        core, ratio = self.backend.forward_metadata.core_metadata, self.layer.compress_ratio
        self._keep(f"{self.name}.slots", take(core.sparse_page_indices(ratio), self.rows))
        raw = core.sparse_raw_indices(ratio)
        if raw is not None:
            self._keep(f"{self.name}.positions", take(raw, self.rows))
        self._explain(raw)
        self.facts["layers"].append(self.fact)
        self.complete = self.layer.layer_id == self.last_layer
        self.touched = time.monotonic()
        self.q = self.out = self.page_table = None

    def finish(self) -> None:
        """Marks the point on the current stream after which the copies are whole."""
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()
        self._tables = []

    # Details

    def _explain(self, raw) -> None:
        """Records what this layer left out, and why."""
        fact = self.fact
        scored = {row for call in fact["calls"] for row in call["rows"]}
        if len(scored) < len(self.rows):
            fact["skips"].append(f"identity below {fact['index_topk']}")
        two_level = fact["topk_blocks"] * fact["block_size"]
        off = fact["source"] and not fact["candidates"]
        off = off or (fact["reindex"] and self.backend.candidate_masks is None)
        if scored and off:
            fact["skips"].append(f"two-level off below {two_level}")
        if fact["reindex"] and scored and not off and not any(call["candidates"] for call in fact["calls"]):
            masks = self.backend.candidate_masks  # PAGE64: everything is scored, and the choice is made among these
            parts = [(m, r) for m, r in self._masks(masks) if m is not None]
            for mask, rows in parts:
                name = f"{self.name}.candidates{len(fact['candidates'])}"
                self._keep(name, take(mask.ids, [row - rows[0] for row in rows] if isinstance(masks, list) else rows))
                fact["candidates"].append(rows)
        if raw is None:
            fact["skips"].append("positions were not asked for")

    def _masks(self, masks):
        if not isinstance(masks, list):
            return [(masks, self.rows)]
        pairs = zip(self.chosen, self.requests, strict=True)
        return [(masks[index], list(range(r.first, r.first + r.rows))) for index, r in pairs]

    def _bound(self, row: int) -> int:
        return next(r.keys for r in self.requests if r.first <= row < r.first + r.rows)

    def _sequences(self, rows, first, count, starts, max_query_len) -> list[int]:
        """Table row of each row, from what the host knows."""
        sequences = count if starts is None else starts.shape[0] - 1
        if sequences == count:
            return [row - first for row in rows]
        if sequences * max_query_len == count:
            return [(row - first) // max_query_len for row in rows]
        inside = [r for r in self.all_requests if r.rows and r.first < first + count and r.first + r.rows > first]
        if len(inside) != sequences:
            raise ValueError(f"{count} rows in {sequences} sequences: the batch has {len(inside)} requests there")
        return [next(i for i, r in enumerate(inside) if r.first <= row < r.first + r.rows) for row in rows]

    def _ids(self, tables, rows):
        """Block ids of a candidate table, by the memory that it lies in."""
        for table in reversed(self._tables):
            first = row_offset(tables, table.block_tables)
            if first >= 0 and first + tables.shape[0] <= table.block_tables.shape[0]:
                return take(table.ids, [first + row for row in rows])
        raise ValueError("a candidate table that candidate_page8_table did not make in this step")

    def _keep_keys(self, call) -> int:
        """Copies the live pages of a key source, once a step."""
        payload, scale = call["k_payload"].view(torch.uint8), call["k_scale"].view(torch.uint8)
        pointer = payload.data_ptr()
        if pointer not in self._keys:
            name = f"keys{len(self._keys)}"
            self._keys[pointer] = name
            live = [self.page_table[r.first + r.rows - 1, : -(-r.keys // PAGE)] for r in self.requests if r.rows]
            pages = torch.cat(live).clamp(0, payload.shape[0] - 1)  # a padded length must not fault the gather
            self._keep(f"{name}.pages", pages)
            self._keep(f"{name}.payload", payload.view(payload.shape[0], -1).index_select(0, pages.long()))
            self._keep(f"{name}.scale", scale.view(scale.shape[0], -1).index_select(0, pages.long()))
            self.facts["keys"].append({
                "page8": bool(call["page8"]), "ratio": self.layer.compress_ratio, "pool pages": payload.shape[0],
                "pool page8": self.fact["page8"],
            })  # fmt: skip
        return int(self._keys[pointer].removeprefix("keys"))

    def _keep(self, name: str, tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes > self.budget:
            raise BudgetError(
                f"more than the budget of {self.budget / 2**20:.3g} MiB at {name}: the step was dropped whole; raise "
                "K2I_JAX_CAPTURE_MIB"
            )
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.kept[name] = host.copy_(tensor, non_blocking=True)
        else:
            self.kept[name] = tensor.clone(memory_format=torch.contiguous_format)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies, waited for: logits cut at their rows' ends, each page once. Called on the writer's thread."""
        if self.event is not None:
            self.event.synchronize()
        out = {name: tensor.contiguous() for name, tensor in self.kept.items()}
        for fact in self.facts["layers"]:
            for index, call in enumerate(fact["calls"]):
                name = f"layer{fact['layer']}.call{index}"
                ends = dict(zip(call["rows"], out[f"{name}.row_ends"].tolist(), strict=True))
                logits = out.pop(f"{name}.logits")
                parts = [logits[i, : max(ends[row], 0)] for i, row in enumerate(call["sampled"])]
                out[f"{name}.logits"] = torch.cat(parts) if parts else logits[:0, 0]
        for index in range(len(self.facts["keys"])):
            name = f"keys{index}"
            first = {page: i for i, page in reversed(list(enumerate(out[f"{name}.pages"].tolist())))}
            order = torch.tensor([first[page] for page in sorted(first)], dtype=torch.long)
            for part in ("pages", "payload", "scale"):
                out[f"{name}.{part}"] = out[f"{name}.{part}"][order].contiguous()
        return out
