"""The one module of this project that touches ``jax._src``: Pallas-Triton primitives and offline lowering.

Checked on:

| jax      | interpret mode | lowers for rocm and cuda | offline Triton IR |
|----------|----------------|--------------------------|-------------------|
| 0.10.2   | yes            | yes                      | yes               |
| 0.11.2   | yes            | yes                      | yes               |
| 0.12.0.1 | yes            | yes                      | yes               |
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

CHECKED_VERSIONS = ("0.10.2", "0.11.2", "0.12.0.1")

try:
    from jax._src.lib.mlir import ir
    from jax._src.lib.triton import dialect as tt
    from jax._src.pallas.triton import lowering as triton_lowering
    from jax._src.state.discharge import register_discharge_rule
    from jax._src.state.types import ReadEffect, WriteEffect
    from jax.core import ShapedArray
    from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

    _add, _bcast_to, _ir_cast = triton_lowering._add, triton_lowering._bcast_to, triton_lowering._ir_cast
    _full, _load, _zeros = triton_lowering._full, triton_lowering._load, triton_lowering._zeros
    _store = triton_lowering._store
    _new_ir_context, lower_fun = triton_lowering._new_ir_context, triton_lowering.lower_fun
    _triton_rule = triton_lowering.register_lowering
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"k2i_jax's Pallas kernels need jax internals that jax {jax.__version__} lacks ({error}); they were checked "
        f"on jax {', '.join(CHECKED_VERSIONS)}. Install one of those, or use implementation='xla'."
    ) from error


def new_primitive(name: str, shape_rule: Callable, jnp_rule: Callable, triton_rule: Callable) -> Primitive:
    """A primitive of one array result for kernel bodies.

    Args:
      name: its name in jaxprs.
      shape_rule: abstract operands -> ``(shape, dtype)``.
      jnp_rule: the operation in jax.numpy, for interpret mode.
      triton_rule: the operation's Pallas-Triton lowering rule.
    """
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *avals: ShapedArray(*shape_rule(*avals)))
    primitive.def_impl(jax.jit(jnp_rule))
    mlir.register_lowering(primitive, mlir.lower_fun(jnp_rule, multiple_results=False))
    _triton_rule(primitive)(triton_rule)
    return primitive


def triton_rule_of(fun: Callable) -> Callable:
    """The Pallas-Triton lowering rule of a function written in jax.numpy and Pallas operations."""
    return lower_fun(fun, multiple_results=False)


def platform(ctx) -> str:
    """ "rocm" or "cuda": what a Pallas-Triton lowering rule is lowering for."""
    return ctx.context.platform


def gpu_kind() -> str:
    """Kind of the GPU a lowering rule lowers for: an abstract mesh's device, else the local one, else ""."""
    device = getattr(get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        return device.device_kind
    try:
        return str(jax.local_devices(backend="gpu")[0].compute_capability)
    except (RuntimeError, IndexError):
        return ""


def build_dot_scaled(ctx, a, a_scale, b, b_scale):
    """``tt.dot_scaled`` of e2m1 pairs with e8m0 scales into f32, as a lowering rule."""
    [out] = ctx.avals_out
    zero = _zeros(ir.RankedTensorType.get(out.shape, ir.F32Type.get()))
    e2m1 = tt.ScaleDotElemType.E2M1
    return tt.dot_scaled(
        zero.type, a, b, zero, e2m1, e2m1, False,
        a_scale=a_scale, b_scale=b_scale, lhs_k_pack=True, rhs_k_pack=True,
    )  # fmt: skip


def build_dot_decoded(ctx, low, high, q_low, q_high):
    """``low @ q_low + high @ q_high`` with one accumulator, as a lowering rule."""
    [out] = ctx.avals_out
    acc = _zeros(ir.RankedTensorType.get(out.shape, ir.F32Type.get()))
    for a, b in ((low, q_low), (high, q_high)):
        acc = tt.dot(a, b, acc, input_precision=tt.InputPrecision.IEEE, max_num_imprecise_acc=0)
    return acc


def build_uniform(x, platform: str):
    """A scalar that all lanes hold alike, said so that the compiler knows: AMD's scalar register, lane 0 on NVIDIA."""
    if platform == "rocm":
        asm, constraints = "v_readfirstlane_b32 $0, $1", "=s,v"
    else:
        asm, constraints = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r"
    return build_asm(asm, constraints, x)


def build_opaque(x, platform: str):
    """The same values, moved by inline assembly, which the compiler does not see through."""
    asm, constraints = ("v_mov_b32 $0, $1", "=v,v") if platform == "rocm" else ("mov.b32 $0, $1;", "=r,r")
    return build_asm(asm, constraints, x)


def build_asm(asm: str, constraints: str, x):
    """Inline assembly, element by element."""
    return tt.elementwise_inline_asm([x.type], asm, constraints=constraints, pure=True, packed_element=1, args=[x])


def set_max_registers(count: int) -> None:
    """From inside a lowering rule: caps the registers of the kernel that is being lowered (Triton's ``maxnreg``)."""
    op = ir.InsertionPoint.current.block.owner
    while op.operation.parent is not None:
        op = op.operation.parent
    op.operation.attributes["ttg.maxnreg"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)


# Pallas' own loads use signed 32-bit offsets for arrays of up to 2^32 bytes, so they wrap in a byte pool of 2 to
# 4 GiB. This load takes the row in 64 bits whatever the size, and only the offset inside the row in 32.
_load_bytes_p = Primitive("k2i_load_bytes")


def load_bytes(ref, row: jax.Array, offset: jax.Array, fixed: jax.Array) -> jax.Array:
    """``ref[row, offset + fixed]`` elementwise for a whole-array ref [rows, width]; indices must be in range.

    ``fixed`` is what differs between the elements of one thread alone: it becomes part of the load instruction, where
    each sum in 32 bits would be an address of its own.
    """
    return _load_bytes_p.bind(ref, *jnp.broadcast_arrays(row, offset, fixed))


@_load_bytes_p.def_effectful_abstract_eval
def _(ref, row, offset, fixed):
    return ShapedArray(offset.shape, ref.dtype), {ReadEffect(0)}


@register_discharge_rule(_load_bytes_p)
def _(*args):  # (in_avals, out_avals, ...) up to jax 0.11, (context, ...) from 0.12
    ref, row, offset, fixed = args[-4:]
    return (None,) * 4, ref[row, offset + fixed]


@_triton_rule(_load_bytes_p)
def _(ctx, pointer, row, offset, fixed):
    return _load(_place(_row_start(ctx, pointer, row), offset, fixed))


def _place(start, offset, fixed):
    # in 64 bits, or Triton would add the two offsets first
    return _add(_add(start, offset), _ir_cast(fixed, ir.IntegerType.get_signless(64), signed=True))


def _row_start(ctx, pointer, row):
    """Pointer(s) to the start of the first operand's row(s), in 64 bits."""
    ref, wide = ctx.avals_in[0], ir.IntegerType.get_signless(64)
    row = _add(_ir_cast(row, wide, signed=True), _bcast_to(_rows_before(ctx, wide), ctx.avals_in[1].shape))
    start = triton_lowering._mul(row, _full(row.type, math.prod(ref.shape[1:])))
    return _add(_bcast_to(pointer, ctx.avals_in[1].shape), start)


def _rows_before(ctx, kind):
    """Rows of the whole array that come before the ref's block: under ``vmap`` the kernel sees one entry of a batch."""
    info, rows = ctx.block_infos[0], ctx.avals_in[0].shape[0]
    sizes, before = info.full_shape_dtype.shape, _full(kind, 0)
    for i in range(len(sizes) - len(ctx.avals_in[0].shape)):
        index = info.start_indices[i]
        index = _full(kind, index) if isinstance(index, int) else _ir_cast(index, kind, signed=True)
        before = _add(triton_lowering._mul(before, _full(kind, sizes[i])), index)
    return triton_lowering._mul(before, _full(kind, rows))


_load_words_p = Primitive("k2i_load_words")


def load_words(ref, row: jax.Array, offset: jax.Array, fixed: jax.Array) -> jax.Array:
    """i32 of the four bytes from ``ref[row, 4 * (offset + fixed)]``, the first one lowest; rows start 4-byte aligned.

    A ref of more dims counts as one of rows: ``[rows, a, b]`` as ``[rows, a * b]``.
    Bytes that are held across a loop would each take a register, and instructions to part and to join them.
    """
    return _load_words_p.bind(ref, *jnp.broadcast_arrays(row, offset, fixed))


@_load_words_p.def_effectful_abstract_eval
def _(ref, row, offset, fixed):
    return ShapedArray(offset.shape, jnp.int32), {ReadEffect(0)}


@register_discharge_rule(_load_words_p)
def _(*args):
    ref, row, offset, fixed = args[-4:]
    four = ref.reshape(ref.shape[0], -1)[row[..., None], 4 * (offset + fixed)[..., None] + jnp.arange(4)]
    return (None,) * 4, jax.lax.bitcast_convert_type(four, jnp.int32)


@_triton_rule(_load_words_p)
def _(ctx, pointer, row, offset, fixed):
    start = _row_start(ctx, pointer, row)
    words = tt.PointerType.get(ir.IntegerType.get_signless(32), 1)
    kind = ir.RankedTensorType.get(ir.RankedTensorType(start.type).shape, words)
    return _load(_place(tt.bitcast(kind, start), offset, fixed))


_store_in_place_p = Primitive("k2i_store_in_place")
_store_in_place_p.multiple_results = True


def store_in_place(ref, row: jax.Array, column: jax.Array, fixed: jax.Array, value: jax.Array) -> None:
    """``ref[row, column + fixed] = value`` for a whole-array f32 ref, a scalar row and vectors of columns inside it.

    On NVIDIA GPUs each thread stores what it holds. An ordinary store first exchanges the values between threads,
    through shared memory and two barriers, so that neighbours store side by side. ``fixed`` is as for ``load_bytes``.
    """
    _store_in_place_p.bind(ref, row, column, fixed, value)


@_store_in_place_p.def_effectful_abstract_eval
def _(ref, row, column, fixed, value):
    return [], {WriteEffect(0)}


@register_discharge_rule(_store_in_place_p)
def _(*args):
    ref, row, column, fixed, value = args[-5:]
    return (ref.at[row, column + fixed].set(value), None, None, None, None), []


@_triton_rule(_store_in_place_p)
def _(ctx, pointer, row, column, fixed, value):
    columns, wide = ctx.avals_in[2], ir.IntegerType.get_signless(64)
    where = _place(_bcast_to(_row_start(ctx, pointer, row), columns.shape), column, fixed)
    if platform(ctx) != "cuda":
        _store(where, value)
        return []
    where = tt.ptr_to_int(ir.RankedTensorType.get(columns.shape, wide), where)
    asm = "st.global.b32 [$1], $2; mov.b32 $0, 0;"
    tt.elementwise_inline_asm(
        [column.type], asm, constraints="=r,l,f", pure=False, packed_element=1, args=[where, value]
    )
    return []


_prefetch_p = Primitive("k2i_prefetch")


def prefetch(ref, row: jax.Array, column: jax.Array) -> jax.Array:
    """Asks for the cache line of ``ref[row, column]`` of a whole-array ref, on NVIDIA GPUs; scalars, in range.

    Makes short work of a load whose address is only guessed so far. Returns a zero; unless used, nothing is asked for.
    """
    return _prefetch_p.bind(ref, row, column)


@_prefetch_p.def_effectful_abstract_eval
def _(ref, row, column):
    return ShapedArray((), jnp.int32), {ReadEffect(0)}


@register_discharge_rule(_prefetch_p)
def _(*args):
    return (None,) * 3, jnp.int32(0)


@_triton_rule(_prefetch_p)
def _(ctx, pointer, row, column):
    if platform(ctx) != "cuda":
        return _full(ir.IntegerType.get_signless(32), 0)
    column = triton_lowering._ensure_ir_value(column, ctx.avals_in[2])
    where = tt.ptr_to_int(ir.IntegerType.get_signless(64), _add(_row_start(ctx, pointer, row), column))
    asm = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    return tt.elementwise_inline_asm([column.type], asm, constraints="=r,l", pure=False, packed_element=1, args=[where])


def build_unpack(asm: str, constraints: str, words) -> list:
    """Four f16 tensors of an i32 tensor's shape, by inline PTX on two elements at a time."""
    kind = ir.RankedTensorType.get(ir.RankedTensorType(words.type).shape, ir.F16Type.get())
    op = tt.ElementwiseInlineAsmOp([kind] * 4, asm, constraints, pure=True, packed_element=2, args=[words])
    return list(op.operation.results)


def build_join(x, y):
    """Two tensors side by side along a new last dim: registers stay where they are."""
    kind = ir.RankedTensorType(x.type)
    return tt.join(ir.RankedTensorType.get([*kind.shape, 2], kind.element_type), x, y)


@contextlib.contextmanager
def _no_deprecation_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        yield


def lower_for(fun: Callable, *args, platform: str, kind: str):
    """Lowers ``jit(fun)(*args)`` for a GPU that need not be there.

    Args:
      fun: a jax function; ``args`` may be ``jax.ShapeDtypeStruct``.
      platform: "rocm" or "cuda".
      kind: jax's device kind, e.g. "gfx950" or "NVIDIA H200".
    """
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), _no_deprecation_warning():
        return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))


def triton_calls(lowered) -> list[dict]:
    """The Triton kernels of a lowered function: dicts of name, ir (text), num_warps, num_stages, grid_x/y/z."""
    calls: list[dict] = []

    def walk(operation):
        for region in operation.regions:
            for block in region.blocks:
                for op in block.operations:
                    op = op.operation
                    if op.name == "stablehlo.custom_call":
                        target = ir.StringAttr(op.attributes["call_target_name"]).value
                        if target == "__gpu$xla.gpu.triton":
                            calls.append(_backend_config(op))
                    walk(op)

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        walk(module.operation)
    for call in calls:
        with _new_ir_context(), ir.Location.unknown():
            call["ir"] = ir.Module.parse(call["ir"]).operation.get_asm(enable_debug_info=False)
    return calls


def _backend_config(op) -> dict:
    config = ir.DictAttr(op.attributes["mhlo.backend_config"])
    found: dict[str, object] = {
        "name": ir.StringAttr(config["name"]).value,
        "ir": ir.StringAttr(config["ir"]).value_bytes,
    }
    for name in ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z"):
        found[name] = ir.IntegerAttr(config[name]).value
    return found


# What XLA's ROCm compiler wants to know of an MI350X / MI355X (numbers of the device, as XLA's GpuTargetConfigProto).
_GFX950 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 64 threads_per_core_limit: 2048
  shared_memory_per_block: 163840 shared_memory_per_block_optin: 163840 shared_memory_per_core: 163840
  core_count: 256 fpus_per_core: 128 clock_rate_ghz: 2.2
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65536 block_dim_limit_z: 65536
  registers_per_core_limit: 131072 registers_per_block_limit: 131072
  memory_bandwidth: 7782000000000 l2_cache_size: 4194304 device_memory_size: 270566162432
  rocm_compute_capability { gcn_arch_name: "gfx950:sramecc+:xnack-" }
}
platform_name: "ROCM" device_description_str: "MI350X"
dnn_version_info { major: 3 minor: 5 } runtime_version { major: 7 minor: 0 patch: 0 }
"""


def gfx950_without_a_device(plugin: str):
    """A gfx950 device to compile for, from XLA's ROCm plugin alone; nothing can run on it.

    Args:
      plugin: path of ``xla_rocm_plugin.so`` (package jax-rocm7-pjrt or jax-rocm10-pjrt). The ROCm libraries that it
        links must be loadable, or stand-ins for them.
    """
    from jax._src import xla_bridge
    from jax.experimental import topologies

    xla_bridge.register_plugin("rocm", priority=500, library_path=plugin, options={"platform_name": "ROCM"})
    topology = topologies.get_topology_desc(
        topology_name="mi350", platform="rocm", target_config=_GFX950, topology="1x1x1"
    )
    return topology.devices[0]
