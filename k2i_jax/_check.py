"""Checks of static facts, shared by the public ops: each names the argument, what came and what was expected."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jaxtyping import Array, Int32

INT32_MAX = 2**31 - 1
MAX_HEADS = 128

AnyArray = jax.Array | np.ndarray  # what public ops take wherever values come in
FLOATS = (jnp.float32, jnp.bfloat16)  # of head weights, projections and norms


def check_array(name: str, x: Any, dtypes: tuple, shape: tuple[int | str, ...]) -> None:
    """Raises unless ``x`` has one of ``dtypes`` and ``shape``, where a string stands for any size."""
    dtype, got = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is None or got is None:
        raise TypeError(f"{name}: expected an array {_spell(shape)}, got {type(x).__name__}")
    if dtype not in [jnp.dtype(d) for d in dtypes]:
        wanted = " or ".join(jnp.dtype(d).name for d in dtypes)
        raise TypeError(f"{name}: expected {wanted} {_spell(shape)}, got {dtype} {list(got)}{_cure(dtype, dtypes)}")
    if len(got) != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, got, strict=True)):
        raise ValueError(f"{name}: expected shape {_spell(shape)}, got {list(got)}")


def _cure(dtype, dtypes) -> str:
    if str(dtype).startswith("torch."):
        return "; k2i_jax.interop.dlpack.to_jax(tensor) takes it without a copy"
    return "; pass x.astype(jnp.float32)" if dtype == np.float64 and jnp.float32 in dtypes else ""


def check_heads(name: str, heads: int) -> None:
    """Raises unless the lookup takes so many index heads."""
    if heads % 16 or not 0 < heads <= MAX_HEADS:
        raise ValueError(f"{name}: expected a multiple of 16 heads up to {MAX_HEADS}, got {heads}")


def _spell(shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def as_int32(name: str, x: Any, shape: tuple[int | str, ...] | None = None) -> Int32[Array, "*n"]:
    """An integer array as int32; wider values saturate, so that none can wrap into a valid index.

    Raises:
      TypeError: ``x`` holds no integers.
      ValueError: it has not the ``shape`` that is asked for, where a string stands for any size.
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x, np.int32 if isinstance(x, list | tuple) and not x else None)  # else [] were float64
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer array, got {x.dtype} {list(x.shape)}")
    if x.dtype != jnp.int32 and jnp.iinfo(x.dtype).max > INT32_MAX:
        x = x.clip(None if jnp.iinfo(x.dtype).min == 0 else -INT32_MAX, INT32_MAX)
    x = jnp.asarray(x, jnp.int32)
    if shape is not None:
        check_array(name, x, (jnp.int32,), shape)
    return x


class Jitted:
    """``jax.jit`` for functions that take index arrays: 64-bit NumPy integers saturate, which jit alone would wrap."""

    def __init__(self, function: Callable, **options):
        self._jitted = jax.jit(function, **options)

    def __call__(self, *args, **kwargs):
        args, kwargs = jax.tree.map(_narrow, (args, kwargs))
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # lower, trace, eval_shape, clear_cache
        return getattr(self._jitted, name)


def _narrow(x):
    return as_int32("", x) if isinstance(x, np.ndarray) and x.dtype in (np.int64, np.uint64) else x


def as_size(name: str, value: Any, least: int = 1) -> int:
    """A number that shapes depend on, as an int.

    Raises:
      TypeError: no integer, or one that is traced.
      ValueError: below ``least``.
    """
    if is_traced(value):
        raise TypeError(f"{name}: expected a static integer, got a traced value; close over it or name it static")
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer of at least {least}, got {value!r}") from None
    if size < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {size}")
    return size


def is_traced(*arrays: Any) -> bool:
    """Whether any of ``arrays`` is a tracer, i.e. has no values to look at."""
    return any(isinstance(x, core.Tracer) for x in arrays)
