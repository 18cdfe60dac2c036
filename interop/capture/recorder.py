"""When to record: arming, steps, budget, errors, and the status file. What is recorded is in ``step.py``."""

import contextlib
import json
import os
import pkgutil
import sys
import threading
from pathlib import Path
from typing import Any

from k2i_jax_capture.step import BudgetError, Step
from k2i_jax_capture.targets import FORMAT
from k2i_jax_capture.writer import Writer, replace_file

IDLE_SECONDS = 5.0  # a step whose last layer is not known is closed after this long without a call
_LINES = 50  # notes kept in the status file


class Recorder:
    """One of these per process. Nothing that goes wrong in here reaches SGLang.

    Args:
      folder: where ``arm`` is looked for, and bundles and the status file are written.

    Environment:
      K2I_JAX_CAPTURE_MIB: most MiB of one bundle, which is also what a step may take of pinned host memory (and, for
        gathered pages, of device memory for a moment); default 256.
      K2I_JAX_CAPTURE_ROWS: rows of logits kept of each call, default 8.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.budget = int(float(os.environ.get("K2I_JAX_CAPTURE_MIB", "256")) * 2**20)
        self.sampled_rows = int(os.environ.get("K2I_JAX_CAPTURE_ROWS", "8"))
        self.lock = threading.RLock()
        self.hooks: dict[str, str] = {}
        self.originals: dict[str, Any] = {}
        self.broken: str | None = None  # for good: the hooks do not fit this SGLang
        self.error: str | None = None  # until the arm file is renewed
        self.arm_token: tuple[int, int] | None = None
        self.steps_left = 0
        self.step: Step | None = None
        self.step_number = 0
        self.last: tuple[int, int, int] | None = None  # backend, batch and layer of the last call
        self.in_layer = False
        self.calls_seen = 0
        self.notes: list[str] = []
        self.bundles: list[str] = []
        self.facts: dict[str, Any] = {}
        self.writer = Writer(self)

    # What SGLang's hooks call. `recording` is all they look at while nothing is recorded.

    @property
    def recording(self) -> bool:
        return self.in_layer

    def begin_layer(self, backend, layer, pos, forward_batch) -> bool:
        """Whether this call is recorded; opens a step where one begins."""
        try:
            with self.lock:
                self.in_layer = False
                new = self._is_new_step(backend, layer, forward_batch)
                if self.broken or _capturing():
                    return False
                if not self.facts:
                    self._learn()
                    self.write_status()
                if new:
                    self._open_step(backend, layer, pos, forward_batch)
                if self.step is None:
                    return False
                self.step.begin_layer(backend, layer, pos, forward_batch)
                self.in_layer = True
                return True
        except Exception as error:
            self._fail(error)
            return False

    def see(self, what: str, *arguments) -> None:
        """Passes what a hook saw to the step."""
        try:
            with self.lock:
                self.calls_seen += what == "scored"
                if self.step is not None:
                    getattr(self.step, what)(*arguments)
        except Exception as error:
            self._fail(error)

    def end_layer(self) -> None:
        try:
            with self.lock:
                self.in_layer = False
                if self.step is not None:
                    self.step.end_layer()
                    if self.step.complete:
                        self._close_step()
        except Exception as error:
            self._fail(error)

    def drop_step(self, why: str) -> None:
        """Forgets the step that is being recorded."""
        with self.lock:
            self.in_layer = False
            if self.step is not None:
                self.note(f"step {self.step.number}: dropped, {why}")
            self.step = None

    def close_if_idle(self) -> None:
        """Called by the writer's thread after ``IDLE_SECONDS`` without work."""
        with self.lock:
            if self.step is not None and not self.in_layer and self.step.idle_for() > IDLE_SECONDS:
                self._close_step()

    # Arming and steps

    def _is_new_step(self, backend, layer, forward_batch) -> bool:
        key = (id(backend), id(forward_batch), layer.layer_id)
        last, self.last = self.last, key
        return last is None or key[:2] != last[:2] or key[2] <= last[2]

    def _armed(self) -> bool:
        """Whether the arm file asks for a step: it holds a number of steps (empty: 1), and counts once per renewal."""
        path = self.folder / "arm"
        try:
            stat = path.stat()
        except FileNotFoundError:
            self.arm_token, self.steps_left = None, 0
            return False
        token = (stat.st_mtime_ns, stat.st_ino)
        if token != self.arm_token:
            text = path.read_text().strip()
            if not text.isdigit() and text:
                raise ValueError(f"{path}: expected a number of steps, got {text[:40]!r}")
            self.arm_token, self.error, self.steps_left = token, None, int(text or "1")
        return self.error is None and self.steps_left > 0

    def _open_step(self, backend, layer, pos, forward_batch) -> None:
        if self.step is not None:
            self._close_step()
        self.step_number += 1
        if not self._armed():
            return
        if self.writer.pending() > 1:
            self.note(f"step {self.step_number}: skipped, two bundles are still being written")
            return
        self.steps_left -= 1
        self.step = Step(self.step_number, self.budget, self.sampled_rows)
        self.step.plan(backend, layer, pos, forward_batch)
        self.writer.start()  # it also closes a step that goes quiet
        self.write_status()

    def _close_step(self) -> None:
        step, self.step = self.step, None
        if step is not None:
            step.finish()
            self.writer.put(step, self._name(step), self._metadata(step))

    def _name(self, step: Step) -> str:
        ranks = "".join(f"-{name}{rank}" for name, rank in self.facts["ranks"].items())
        return f"step{step.number:06d}{ranks}-pid{os.getpid()}.safetensors"

    def _metadata(self, step: Step) -> dict[str, str]:
        facts = {**self.facts, "pid": os.getpid(), "step": step.number, **step.facts}
        return {"format": FORMAT, "facts": json.dumps(facts)}

    # Errors and the status file

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self.in_layer = False
            number = self.step.number if self.step else self.step_number
            self.step = None
            what = str(error) if isinstance(error, BudgetError) else f"{type(error).__name__}: {error}"
            self.error = f"step {number}: {what}"
            with contextlib.suppress(OSError):
                self.write_status()

    def written(self, name: str) -> None:
        """A bundle is there."""
        with self.lock:
            self.bundles.append(name)
            self.write_status()

    def write_failed(self, error: BaseException) -> None:
        self._fail(error)

    def note(self, line: str) -> None:
        with self.lock:
            self.notes = [*self.notes, line][-_LINES:]
            self.write_status()

    def hooks_found(self, originals: dict[str, Any], missing: dict[str, str]) -> None:
        """What there is to hook; a missing target switches recording off for good."""
        self.originals = originals
        self.hooks = {**dict.fromkeys(originals, "registered"), **missing}
        if missing:
            target, why = next(iter(missing.items()))
            self.broken = f"{target}: {why}; nothing is hooked (see `k2i-jax sglang check`)"
            print(f"k2i_jax capture: {self.broken}", file=sys.stderr)
            self._learn()
        self.write_status()

    def _learn(self) -> None:
        """Facts that are settled once a forward pass runs."""
        for target, original in self.originals.items():
            self.hooks[target] = "applied" if pkgutil.resolve_name(target) is not original else "registered"
        if not self.facts:
            self.facts = {"ranks": _ranks(), "sglang": _version()}

    def write_status(self) -> None:
        """Writes this process's status file, whole."""
        if self.broken or self.error:
            state = f"disarmed: {self.broken or self.error}"
        else:
            state = f"armed, {self.steps_left} steps to go" if self.steps_left else "waiting for the arm file"
        status = {
            "pid": os.getpid(), "state": state, **self.facts, "hooks": self.hooks, "bundles": self.bundles,
            "notes": self.notes,
        }  # fmt: skip
        replace_file(self.folder / f"status-pid{os.getpid()}.json", json.dumps(status, indent=1).encode())


def _capturing() -> bool:
    """Whether a graph is being captured or compiled, whose tensors hold no values."""
    import torch

    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    mode = sys.modules.get("sglang.srt.model_executor.runner_utils.capture_mode")
    return mode is not None and bool(mode.get_is_capture_mode())


def _ranks() -> dict[str, int]:
    """This process's place, as far as SGLang has published it."""
    ranks = {}
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        for short, name in (("tp", "tp_rank"), ("pp", "pp_rank"), ("dp", "attn_dp_rank")):
            ranks[short] = int(getattr(parallel, name))
    except Exception:  # not published: a host without a running server
        ranks = ranks or {"tp": 0}
    return ranks


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
