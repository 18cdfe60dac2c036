"""torch tensors to JAX and back without a copy, and what is needed to trust that: order, lifetime, alignment, devices.

``to_jax`` never copies unless asked; where a copy would be needed it says so. An import *is* torch's memory: import
again in every step, never keep or donate one (this package donates nothing unless told to), and let ``call`` run
whatever torch may overwrite right afterwards.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k2i_jax.interop.devices import check_hip_runtimes, jax_device, torch, warn_if_preallocating, warn_on_import

ALIGNMENT = 64  # bytes: XLA assumes as much of every buffer, and copies silently what has less

_BYTE_VIEWS = ("float4_e2m1fn_x2", "float8_e8m0fnu")  # cross as uint8: DLPack has no one-lane name for the first
_DTYPES = ("uint8", "int8", "int16", "int32", "bfloat16", "float16", "float32", "bool")
_CASTS = {"int64": ".int()", "float64": ".float()"}

warn_on_import()


def to_jax(tensor: Any, *, copy: bool = False) -> jax.Array:
    """Imports a torch tensor (or another DLPack producer) as a JAX array over the same memory.

    JAX's reads are ordered after what torch has queued on its current stream of the tensor's device. The array keeps
    the tensor's storage alive. Writes of torch are visible through it, so it is good for the current step alone.

    Args:
      tensor: uint8, int8, int16, int32, bfloat16, float16, float32 or bool, contiguous, 64-byte aligned, on a device
        that JAX has too. ``float4_e2m1fn_x2`` and ``float8_e8m0fnu`` arrive as their uint8 bytes. Other producers
        need ``__dlpack__`` and ``__dlpack_device__``.
      copy: make a private copy instead; then strided, unaligned, int64 (saturated to int32), gradient-carrying tensors
        and those on another device are taken too. The copy is queued after torch's work, before ``to_jax`` returns.

    Returns:
      The array, of the tensor's shape, on the JAX device of the tensor's memory.

    Raises:
      TypeError: no DLPack producer, or a dtype that does not cross.
      ValueError: a tensor that only a copy could bring over; the message names the fix.
      RuntimeError: two HIP runtimes in this process, a device that JAX does not have, or an import that turned out
        to be a copy.
    """
    if not hasattr(tensor, "__dlpack_device__"):
        hint = "; a capsule has lost its device, pass the tensor" if type(tensor).__name__ == "PyCapsule" else ""
        raise TypeError(f"tensor: expected a torch.Tensor or a DLPack producer, got {type(tensor).__name__}{hint}")
    if not _is_torch(tensor):
        return _import(tensor, tuple(tensor.__dlpack_device__()), copy)
    tensor = _prepare(tensor, copy)
    device = tuple(tensor.__dlpack_device__())
    if tensor.device.type == "cpu":
        return _import(tensor, device, copy)
    with torch().cuda.device(tensor.device):  # its current stream is the one that torch orders us after
        array = _import(tensor, device, copy)
    warn_if_preallocating()
    return array


def _is_torch(x: Any) -> bool:
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def _prepare(tensor, copy: bool):
    """The tensor as it can cross; raises with the fix where it cannot and no copy was asked for."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch().strided or tensor.device.type not in ("cpu", "cuda"):
        what = f"{tensor.layout} on {tensor.device}"
        raise TypeError(f"tensor: expected a dense tensor on the CPU or a CUDA or ROCm device, got {what}")
    if name not in (*_DTYPES, *_BYTE_VIEWS) and not (copy and name == "int64"):
        fix = f"convert it with {_CASTS[name]}" if name in _CASTS else f"expected one of {', '.join(_DTYPES)}"
        raise TypeError(f"tensor: {name} does not cross without a conversion: {fix}")
    problems = {
        "it requires a gradient (pass tensor.detach())": tensor.requires_grad,
        "its negative bit is set (pass tensor.resolve_neg())": tensor.is_neg(),
        f"it is strided, {list(tensor.shape)} by {list(tensor.stride())} (pass tensor.contiguous(), or import the "
        "whole slab and slice it in JAX)": not tensor.is_contiguous(),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if not found and tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        found = [f"its base is {tensor.data_ptr() % ALIGNMENT} bytes past a {ALIGNMENT}-byte boundary (pass "
                 "tensor.clone(), or import the whole slab and slice it in JAX)"]  # fmt: skip
    if copy:
        tensor = tensor.detach().resolve_neg()
        if name == "int64":  # wider values saturate, so that none can wrap into a valid index
            tensor = tensor.clamp(-(2**31) + 1, 2**31 - 1).to(torch().int32)
        if jax_device(tuple(tensor.__dlpack_device__())) is None:
            tensor = tensor.cpu()
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            tensor = tensor.clone(memory_format=torch().contiguous_format)
    elif found:
        raise ValueError(f"tensor: no zero-copy import: {'; '.join(found)}; or pass copy=True")
    return tensor.view(torch().uint8) if name in _BYTE_VIEWS else tensor


def _import(producer, device: tuple[int, int], copy: bool) -> jax.Array:
    target = jax_device(device)
    if target is None:
        have = ", ".join(f"{d.platform}:{d.local_hardware_id}" for d in jax.local_devices())
        raise RuntimeError(
            f"tensor: its memory is on DLPack device (type {int(device[0])}, id {device[1]}), which JAX does not have "
            f"here (it has {have}); install the jax plugin of that platform, give both libraries the same "
            "HIP_VISIBLE_DEVICES/CUDA_VISIBLE_DEVICES, or pass copy=True"
        )
    if target.platform == "rocm":
        check_hip_runtimes()
    array = jax.dlpack.from_dlpack(producer, copy=None if copy else False)
    pointer = getattr(producer, "data_ptr", None)
    if not copy and pointer and array.size and array.unsafe_buffer_pointer() != pointer():
        raise RuntimeError("tensor: JAX copied it on import although it was told not to; pass copy=True to accept that")
    if copy:
        array = jnp.array(array, copy=True)
        # torch may overwrite its memory as soon as we return
        array.block_until_ready()
    return array


def to_torch(array: jax.Array) -> Any:
    """Hands a JAX array to torch without a copy; waits until its values are there.

    The tensor keeps the buffer alive. JAX takes its arrays for immutable: write into the tensor only if no JAX code
    uses the array any more.

    Args:
      array: on one device; uint8, int8, int16, int32, bfloat16, float16, float32 or bool.

    Raises:
      TypeError: not a concrete ``jax.Array``, or a dtype that torch does not have.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(f"array: expected a concrete jax.Array, got {type(array).__name__}")
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"array: {array.dtype} does not cross; expected one of {', '.join(_DTYPES)}")
    return torch().from_dlpack(array.block_until_ready())


def call(fn: Callable[..., Any], *tensors: Any, **keywords: Any) -> Any:
    """Calls ``fn`` on zero-copy imports of torch tensors and returns its results as torch tensors, when they are ready.

    As nothing is pending on return, torch may overwrite or free the arguments at once.

    Args:
      fn: a function of JAX arrays, jitted or not.
      *tensors: pytrees; each torch tensor in them becomes a JAX array (``to_jax``), anything else passes as it is.
      **keywords: likewise.

    Returns:
      ``fn``'s result with each JAX array as a torch tensor, in memory of its own: an argument that ``fn`` hands back
      is copied.
    """
    borrowed: set[int] = set()

    def bring(x):
        if not _is_torch(x):
            return x
        array = to_jax(x)
        borrowed.add(_address(array))
        return array

    arguments, keywords = jax.tree.map(bring, (tensors, keywords))
    results = jax.block_until_ready(fn(*arguments, **keywords))

    def hand_back(x):
        if not isinstance(x, jax.Array):
            return x
        return to_torch(jnp.array(x, copy=True) if x.size and _address(x) in borrowed else x)

    return jax.tree.map(hand_back, results)


def _address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer() if array.size else 0
