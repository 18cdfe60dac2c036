# Two commands to know: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
PYTEST_ARGS ?=

.PHONY: demo test lint typecheck wheel clean

demo: .venv/ready
	.venv/bin/k2i-jax demo

test: .venv-test/ready
	.venv-test/bin/python -m pytest $(PYTEST_ARGS)

lint: .venv-dev/ready
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .

# mypy reads the installed package: kernels/ and interop/ are k2i_jax.kernels and k2i_jax.interop only there.
typecheck: .venv-dev/ready
	.venv-dev/bin/pip install -q --no-deps --force-reinstall .
	rm -rf build
	.venv-dev/bin/mypy --config-file pyproject.toml -p k2i_jax

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

clean:
	rm -rf .venv .venv-test .venv-dev build dist *.egg-info
