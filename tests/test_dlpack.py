"""torch <-> JAX without a copy, on the CPU: pointers, refused forms, lifetime, and logits from imported planes."""

import gc
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, bits, golden

import k2i_jax as k
from k2i_jax.interop import devices, dlpack

torch = pytest.importorskip("torch")

CROSSING = ["uint8", "int8", "int16", "int32", "bfloat16", "float16", "float32", "bool"]


def tensor_of(name, shape=(8, 64)):
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 2 if name == "bool" else 100, shape))
    return values.to(getattr(torch, name))


@pytest.mark.parametrize("name", CROSSING)
def test_both_ways_without_a_copy(name):
    tensor = tensor_of(name)
    array = dlpack.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.shape == tuple(tensor.shape)
    assert array.dtype.name == name
    np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), tensor.float().numpy())
    back = dlpack.to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("shape", [(0, 4), (), (1,)], ids=str)
def test_sizes_at_the_edge(shape):
    array = dlpack.to_jax(torch.ones(shape))
    assert array.shape == shape
    assert dlpack.to_torch(array).shape == shape


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float8_e8m0fnu"])
def test_codes_and_scales_arrive_as_their_bytes(name):
    tensor = tensor_of("uint8").view(getattr(torch, name))
    array = dlpack.to_jax(tensor)
    assert array.dtype == jnp.uint8
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.view(torch.uint8).numpy())


def torch_planes(case, layout):
    """The planes as SGLang's pool holds them, in torch's own (aligned) memory."""
    payload = torch.from_numpy(case[f"{layout}_payload"]).view(torch.uint8).clone()
    scale = torch.from_numpy(case[f"{layout}_scale"]).clone()
    return payload.reshape(-1, 1, 4, 64, 16), scale.reshape(-1, 1, 4, 64)


@pytest.mark.parametrize("name", CASES)
def test_logits_from_imported_planes_have_the_native_bits(name, layout):
    case = golden(name)
    payload, scale = torch_planes(case, layout)
    assert payload.shape[1:] == (1, 4, 64, 16)
    flat = payload.view(-1, 4096), scale.view(-1, 256)
    imported = k.IndexKPlane.from_arrays(dlpack.to_jax(flat[0]), dlpack.to_jax(flat[1]), layout)
    assert imported.payload.unsafe_buffer_pointer() == payload.data_ptr()
    assert imported.scale.unsafe_buffer_pointer() == scale.data_ptr()
    inputs = case.queries, case["weights"]
    np.testing.assert_array_equal(
        bits(k.index_logits(*inputs, imported, case.table)),
        bits(k.index_logits(*inputs, case.plane(layout), case.table)),
    )


def unaligned():
    return torch.zeros(1024, dtype=torch.uint8)[16 : 16 + 512]


REFUSED = {
    "unaligned": (unaligned, ValueError, "16 bytes past a 64-byte boundary"),
    "gaps": (lambda: torch.zeros(8, 68, dtype=torch.uint8)[:, :64], ValueError, r"strided, \[8, 64\] by \[68, 1\]"),
    "step": (lambda: torch.zeros(8, 64)[::2], ValueError, "strided"),
    "transposed": (lambda: torch.zeros(8, 64).T, ValueError, r"contiguous\(\)"),
    "gradient": (lambda: torch.zeros(8, requires_grad=True), ValueError, r"detach\(\)"),
    "negative bit": (lambda: torch._neg_view(torch.zeros(16)), ValueError, r"resolve_neg\(\)"),
    "int64": (lambda: torch.zeros(8, dtype=torch.int64), TypeError, r"\.int\(\)"),
    "float64": (lambda: torch.zeros(8, dtype=torch.float64), TypeError, r"\.float\(\)"),
    "complex": (lambda: torch.zeros(8, dtype=torch.complex64), TypeError, "expected one of uint8"),
    "meta": (lambda: torch.zeros(8, device="meta"), TypeError, "meta"),
    "sparse": (lambda: torch.eye(4).to_sparse(), TypeError, "dense"),
    "capsule": (lambda: torch.zeros(8).__dlpack__(), TypeError, "capsule"),
    "list": (lambda: [1, 2], TypeError, "got list"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused_forms_name_the_fix(form):
    make, error, message = REFUSED[form]
    with pytest.raises(error, match=message):
        dlpack.to_jax(make())


@pytest.mark.parametrize("form", ["unaligned", "gaps", "step", "transposed", "gradient", "negative bit", "int64"])
def test_a_copy_on_request_takes_them(form):
    tensor = REFUSED[form][0]()
    array = dlpack.to_jax(tensor, copy=True)
    np.testing.assert_array_equal(np.asarray(array), tensor.detach().resolve_neg().numpy())
    tensor.detach().add_(1)
    assert not np.asarray(array).any(), "the copy must be private"


def test_wide_integers_saturate():
    tensor = torch.tensor([2**32, -(2**40), 7])
    np.testing.assert_array_equal(np.asarray(dlpack.to_jax(tensor, copy=True)), [2**31 - 1, -(2**31) + 1, 7])


def test_an_aligned_tensor_is_copied_on_request():
    tensor = torch.zeros(64)
    array = dlpack.to_jax(tensor, copy=True)
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    tensor.fill_(5)
    assert not np.asarray(array).any()


class Producer:
    """A DLPack producer on a device of choice that records how it is asked."""

    def __init__(self, device):
        self.device, self.asked, self.tensor = device, [], torch.arange(16.0)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        return self.tensor.__dlpack__()


@pytest.mark.parametrize("device", [(2, 0), (10, 0), (3, 0), (11, 0)], ids=["cuda", "rocm", "cuda host", "rocm host"])
def test_devices_that_jax_lacks_are_refused_before_anything_is_exported(device):
    if devices.jax_device(device) is not None:
        pytest.skip("JAX has this device")
    producer = Producer(device)
    with pytest.raises(RuntimeError, match=rf"type {device[0]}, id 0.*does not have"):
        dlpack.to_jax(producer)
    assert not producer.asked


def test_another_producer_on_the_cpu():
    producer = Producer((1, 0))
    np.testing.assert_array_equal(np.asarray(dlpack.to_jax(producer)), np.arange(16.0))
    assert len(producer.asked) == 1


def test_the_import_keeps_the_memory_alive():
    tensor = torch.full((1 << 16,), 3.0)
    array = dlpack.to_jax(tensor)
    del tensor
    gc.collect()
    others = [torch.full((1 << 16,), 7.0) for _ in range(8)]
    assert (np.asarray(array) == 3).all()
    assert len(others) == 8


def test_torchs_writes_are_seen_by_the_next_import_alone_after_call():
    pages = torch.zeros(4, 4096, dtype=torch.uint8)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.int32))
    for value in (0, 1, 2):
        pages.fill_(value)
        result = dlpack.call(total, pages)
        pages.fill_(0xFF)  # at once: nothing may be pending
        assert int(result) == value * pages.numel()


def test_call_returns_memory_of_its_own():
    tensor = torch.arange(64.0)
    same, doubled, number, text = dlpack.call(lambda x, y: (x, 2 * x, 5, y["y"]), tensor, {"y": "text"})
    tensor.fill_(-1)
    assert torch.equal(same, torch.arange(64.0))
    assert torch.equal(doubled, 2 * torch.arange(64.0))
    assert (number, text) == (5, "text")


def test_call_passes_keywords_and_pytrees():
    got = dlpack.call(
        lambda pair, *, shift: {"sum": pair[0] + pair[1] + shift}, (torch.ones(4), torch.ones(4)), shift=1
    )
    assert torch.equal(got["sum"], torch.full((4,), 3.0))


def test_a_result_outlives_its_array():
    tensor = dlpack.call(lambda x: x + 1, torch.zeros(1 << 16))
    gc.collect()
    jnp.full(1 << 16, 9.0).block_until_ready()
    assert (tensor == 1).all()


def test_what_torch_cannot_take():
    with pytest.raises(TypeError, match="got ndarray"):
        dlpack.to_torch(np.zeros(4))
    with pytest.raises(TypeError, match="float8_e8m0fnu does not cross"):
        dlpack.to_torch(jnp.zeros(4, jnp.float8_e8m0fnu))
    with pytest.raises(TypeError, match="concrete"):
        jax.jit(dlpack.to_torch)(jnp.zeros(4))


def test_writing_into_an_imported_plane_leaves_torchs_bytes_alone(layout):
    payload, scale = torch.zeros(4, 4096, dtype=torch.uint8), torch.zeros(4, 256, dtype=torch.uint8)
    plane = k.IndexKPlane.from_arrays(dlpack.to_jax(payload), dlpack.to_jax(scale), layout)
    keys = k.quantize_fp4(np.ones((3, 128), np.float32))
    written = k.write_keys(plane, np.array([1, 64, 130]), keys)
    assert np.asarray(written.payload).any()
    assert not payload.any()
    assert not scale.any()


MAPS = """7f00-7f10 r-xp 00000000 08:01 1 /opt/rocm/lib/libamdhip64.so.7
7f10-7f20 r--p 00000000 08:01 1 /opt/rocm/lib/libamdhip64.so.7
7f20-7f30 r-xp 00000000 08:01 2 /usr/lib/libc.so.6
"""


def test_two_hip_runtimes_are_refused(monkeypatch):
    assert devices.hip_runtimes(MAPS) == ["/opt/rocm/lib/libamdhip64.so.7"]
    two = MAPS + "7f30-7f40 r-xp 00000000 08:01 3 /venv/torch/lib/libamdhip64.so (deleted)\n"
    found = devices.hip_runtimes(two)
    assert len(found) == 2
    monkeypatch.setattr(devices, "hip_runtimes", lambda: found)
    with pytest.raises(RuntimeError, match=r"two HIP runtimes .*libamdhip64"):
        devices.check_hip_runtimes()


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, False),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}, False),
    ],
    ids=str,
)
def test_preallocation_warns_once(monkeypatch, recwarn, variables, warns):
    for name in ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices.warn_if_preallocating.cache_clear()
    if warns:
        with pytest.warns(UserWarning, match="XLA_PYTHON_CLIENT_PREALLOCATE=false"):
            devices.warn_if_preallocating()
    devices.warn_if_preallocating()
    assert not [w for w in recwarn.list if "PREALLOCATE" in str(w.message)]


def test_torch_is_imported_where_it_is_used():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import k2i_jax.interop.dlpack as dlpack, jax.numpy as jnp
try:
    dlpack.to_torch(jnp.zeros(4))
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "pip install 'k2i_jax[torch]'" in done.stdout
