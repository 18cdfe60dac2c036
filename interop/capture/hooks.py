"""The hooks themselves: each calls SGLang's function as it was called, and lets the recorder look at it."""

import pkgutil
from typing import Any

from k2i_jax_capture.recorder import Recorder
from k2i_jax_capture.targets import HOOKS


def install(folder: str) -> Recorder:
    """Registers the hooks with SGLang's HookRegistry, all of them or none; SGLang applies them afterwards.

    A target that is missing is named in this process's status file, and nothing is hooked: half of the calls would
    make bundles that nobody can replay.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(folder)
    missing, originals = {}, {}
    for target in HOOKS.values():
        try:
            originals[target] = pkgutil.resolve_name(target)
        except Exception as error:  # a module that does not import here is as good as missing
            missing[target] = f"not found: {type(error).__name__}: {error}"
    recorder.hooks_found(originals, missing)
    if not missing:
        for word, hook in hooks(recorder).items():
            kind = HookType.AFTER if word in ("inputs", "blocks", "page8_table") else HookType.AROUND
            HookRegistry.register(HOOKS[word], hook, kind)
    return recorder


def hooks(recorder: Recorder) -> dict[str, Any]:
    """The hook of each target, AROUND ones with the original first, AFTER ones with its result."""

    def layer(original, backend, layer, x, q_lora, req, pos, forward_batch, **keywords):
        arguments = (backend, layer, x, q_lora, req, pos, forward_batch)
        if not recorder.begin_layer(backend, layer, pos, forward_batch):
            return original(*arguments, **keywords)
        try:
            result = original(*arguments, **keywords)
        except BaseException:
            recorder.drop_step("SGLang's own code raised")
            raise
        recorder.end_layer()
        return result

    def rowgroup(original, **keywords):
        logits = original(**keywords)
        if recorder.recording:
            recorder.see("scored", keywords, logits)
        return logits

    def paged(original, **keywords):
        if not recorder.recording:
            return original(**keywords)
        seen = recorder.calls_seen
        logits = original(**keywords)
        if recorder.calls_seen == seen:  # else it went through the row-group call, which was recorded
            tables = {"block_tables": keywords["page_table"], "row_ends": keywords["c4_seq_lens"]}
            recorder.see("scored", {**keywords, **tables, "page8": False, "pages_per_block": 1}, logits)
        return logits

    def inputs(result, *arguments, **keywords):
        if recorder.recording:
            recorder.see("inputs", *result)

    def blocks(result, logits, seq_lens, **keywords):
        if recorder.recording:
            recorder.see("blocks", result.ids, logits)

    def page8_table(result, *arguments, **keywords):
        if recorder.recording:
            recorder.see("page8_table", result)

    return {"layer": layer, "rowgroup": rowgroup, "paged": paged, "inputs": inputs, "blocks": blocks,
            "page8_table": page8_table}  # fmt: skip
