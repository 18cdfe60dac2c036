"""Writes bundles from a thread of its own: waits for the copies, then one file, under its name only when whole."""

import contextlib
import os
import queue
import threading
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes ``path`` so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Writer:
    """A queue and the thread that empties it, started with the first bundle."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.queue: queue.Queue = queue.Queue()
        self.thread: threading.Thread | None = None

    def put(self, step, name: str, metadata: dict[str, str]) -> None:
        self.queue.put((step, name, metadata))
        self.start()

    def start(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="k2i_jax capture", daemon=True)
            self.thread.start()

    def pending(self) -> int:
        return self.queue.unfinished_tasks

    def join(self) -> None:
        """Waits until all that was put is written."""
        self.queue.join()

    def _run(self) -> None:
        while True:
            try:
                step, name, metadata = self.queue.get(timeout=1.0)
            except queue.Empty:
                self.recorder.close_if_idle()
                continue
            try:
                from safetensors.torch import save

                tensors = step.tensors()
                replace_file(self.recorder.folder / name, save(tensors, metadata))
                self.recorder.written(name)
            except Exception as error:
                self.recorder.write_failed(error)
            finally:
                self.queue.task_done()
