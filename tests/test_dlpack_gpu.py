"""torch's GPU tensors in JAX without a copy: pointers, streams, memory that torch uses again. Needs a GPU for both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, golden

import k2i_jax as k
from k2i_jax.implementations import device_platform
from k2i_jax.interop import dlpack

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(
        device_platform() not in ("cuda", "rocm") or not torch.cuda.is_available(),
        reason="torch and JAX need a GPU",
    ),
    pytest.mark.filterwarnings("ignore:JAX takes 75 %"),
]
SLEEP = 200_000_000  # cycles, about 0.1 s: long after the host has gone on


@pytest.mark.parametrize("name", ["uint8", "int8", "int32", "bfloat16", "float16", "float32", "bool"])
def test_both_ways_without_a_copy(name):
    tensor = torch.arange(512, device="cuda").remainder(2).to(getattr(torch, name)).reshape(8, 64)
    array = dlpack.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert next(iter(array.devices())).platform == device_platform() or device_platform() == "cuda"
    back = dlpack.to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("name", ["verify", "two_level"])
def test_logits_from_imported_planes_have_the_native_bits(name, layout, implementation):
    case = golden(name)
    payload = torch.from_numpy(case[f"{layout}_payload"]).view(torch.uint8).cuda().reshape(-1, 1, 4, 64, 16)
    scale = torch.from_numpy(case[f"{layout}_scale"]).cuda().reshape(-1, 1, 4, 64)
    flat = payload.view(-1, 4096), scale.view(-1, 256)
    plane = k.IndexKPlane.from_arrays(*(dlpack.to_jax(x) for x in flat), layout)
    assert plane.payload.unsafe_buffer_pointer() == payload.data_ptr()
    inputs = case.queries, case["weights"]
    np.testing.assert_array_equal(
        bits(k.index_logits(*inputs, plane, case.table, implementation=implementation)),
        bits(k.index_logits(*inputs, case.plane(layout), case.table, implementation=implementation)),
    )


def test_reads_wait_for_torchs_stream():
    tensor = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    total = jax.jit(jnp.sum)
    dlpack.call(total, tensor)  # compiled before
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        tensor.fill_(1)
        assert float(dlpack.call(total, tensor)) == tensor.numel()


def test_memory_may_be_used_again_when_call_returns():
    total = jax.jit(lambda x: jnp.sum(jnp.sort(x)))  # long enough to be caught half way
    tensor = torch.ones(1 << 22, device="cuda")
    for _ in range(5):
        tensor.fill_(1)
        result = dlpack.call(total, tensor)
        tensor.fill_(7)
        assert float(result) == tensor.numel()


def test_freed_memory_is_not_read():
    total = jax.jit(lambda x: jnp.sum(jnp.sort(x)))
    for _ in range(3):
        result = dlpack.call(total, torch.ones(1 << 22, device="cuda"))
        torch.full((1 << 22,), 9.0, device="cuda")
        assert float(result) == 1 << 22


def test_results_are_ready_for_torch():
    x = torch.ones(1024, 1024, device="cuda")
    product = dlpack.call(jax.jit(lambda a: a @ a), x)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(product, torch.full_like(product, 1024))


def test_unaligned_and_strided_tensors_are_refused():
    slab = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="16 bytes past"):
        dlpack.to_jax(slab[16:80])
    with pytest.raises(ValueError, match="strided"):
        dlpack.to_jax(slab.reshape(64, 64)[:, :32])
    copied = dlpack.to_jax(slab[16:80], copy=True)
    slab.fill_(3)
    assert not np.asarray(copied).any()


def test_a_tensor_on_the_host_stays_there():
    array = dlpack.to_jax(torch.ones(64))
    assert next(iter(array.devices())).platform == "cpu"
