# Two commands to know: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
PYTEST_ARGS ?=

.PHONY: demo test test-long test-compile test-rocm-aot test-sglang lint typecheck wheel clean

demo: .venv/ready
	.venv/bin/k2i-jax demo

test: .venv-test/ready
	.venv-test/bin/python -m pytest -n 2 --dist worksteal -m "not long" $(PYTEST_ARGS)

# The tests of minutes each, which `make test` leaves out.
test-long: .venv-test/ready
	.venv-test/bin/python -m pytest -n 2 --dist worksteal -m long $(PYTEST_ARGS)

# What the Triton compiler makes of the kernels, with the version that the assertions were read off. Minutes.
test-compile: .venv-test/ready
	.venv-test/bin/pip install -q triton==3.9.0
	.venv-test/bin/python -m pytest -n 2 --dist worksteal -m long tests/test_pallas_compile.py \
	  tests/test_pallas_select.py $(PYTEST_ARGS)

lint: .venv-dev/ready
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .

# mypy reads the installed package: kernels/ and interop/ are k2i_jax.kernels and k2i_jax.interop only there.
typecheck: .venv-dev/ready
	.venv-dev/bin/pip install -q --no-deps --force-reinstall .
	rm -rf build
	cd .venv-dev && bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p k2i_jax -p k2i_jax_capture

wheel: .venv-dev/ready
	rm -rf build dist
	.venv-dev/bin/python -m build -q --wheel

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -e '.[cli]'
	touch $@

# torch only as a CPU build: the tests that need it skip without it.
.venv-test/ready: pyproject.toml tools/install_torch_cpu.py
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python tools/install_torch_cpu.py
	.venv-test/bin/pip install -q -e '.[test]'
	touch $@

.venv-dev/ready: pyproject.toml
	$(PYTHON) -m venv .venv-dev
	.venv-dev/bin/pip install -q '.[dev,cli]'
	touch $@

# Opt-in: whole steps compiled for gfx950 by XLA's own ROCm compiler, no GPU needed. Needs Python 3.12, gcc, binutils.
# `make test-rocm-aot ROCM=10 JAX=0.12.0` tries the ROCm 10 plugin.
ROCM ?= 7
JAX ?= 0.11.2
PYTHON_ROCM ?= python3.12
ROCM_VENV = .venv-rocm$(ROCM)

test-rocm-aot: $(ROCM_VENV)/ready
	LD_LIBRARY_PATH=$(CURDIR)/$(ROCM_VENV)/stubs K2I_JAX_ROCM_STUBS=1 JAX_PLATFORMS=cpu \
	  $(ROCM_VENV)/bin/python -m pytest tests/rocm_aot $(PYTEST_ARGS)

$(ROCM_VENV)/ready: pyproject.toml tools/rocm_stubs.py
	$(PYTHON_ROCM) -m venv $(ROCM_VENV)
	$(ROCM_VENV)/bin/pip install -q -e '.[test]' 'jax~=$(JAX)' 'jax-rocm$(ROCM)-pjrt~=$(JAX)' llvm-nanobind msgpack
	$(ROCM_VENV)/bin/python tools/rocm_stubs.py $(ROCM_VENV)/lib/python3*/site-packages/jax_plugins/xla_rocm$(ROCM)/xla_rocm_plugin.so $(ROCM_VENV)/stubs
	touch $@

# Opt-in: SGLang 0.5.23's own code on a CPU, its Triton kernels interpreted, in an environment with its unpacked wheel.
test-sglang: .venv-sglang/ready
	TRITON_INTERPRET=1 JAX_PLATFORMS=cpu .venv-sglang/bin/python -m pytest -n 2 --dist loadfile tests/with_sglang tests/test_sglang.py \
	  tests/test_capture.py tests/test_bundle.py $(PYTEST_ARGS)

.venv-sglang/ready: pyproject.toml tools/install_torch_cpu.py tools/setup_sglang.py
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python tools/install_torch_cpu.py
	.venv-sglang/bin/pip install -q -e '.[test]'
	.venv-sglang/bin/python tools/setup_sglang.py
	touch $@

clean:
	rm -rf .venv .venv-test .venv-dev .venv-sglang .venv-rocm* build dist *.egg-info
