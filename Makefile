# `make demo` and `make test` work on a fresh machine with make, Python 3.11+ and a C compiler: all else goes into .venv.
PYTHON ?= python3
PINNED := $(shell sed -n "s/^torch==//p" constraints.txt)
TORCH ?= $(PINNED)
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed-torch-$(TORCH)

.PHONY: demo test lint types gpu clean

# One process per GPU, or four on the CPU; the example's default mesh follows their number.
demo: $(STAMP)
	n=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 4)") && \
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $$n \
		examples/train_gpt.py --zero 3

# On a machine with a GPU, under eight minutes: kernels' numbers and bandwidth, a train step's share of the peak. Where
# $(PYTHON) has all that the library needs nothing is installed.
gpu:
	if $(PYTHON) -c "import torch, triton, optree, einops, numpy, rich" 2>/dev/null; \
	then $(PYTHON) -m benchmarks.gpu --json; \
	else $(MAKE) $(STAMP) && $(BIN)/python -m benchmarks.gpu --json; fi

# Types are those of the pinned torch: stubs differ from version to version.
test: lint $(if $(filter $(PINNED),$(TORCH)),types)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/pyright

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	sed -e "s/^torch==.*/torch==$(TORCH)/" $(if $(filter $(PINNED),$(TORCH)),,-e "/^setuptools==/d") \
		constraints.txt > .venv/constraints.txt
	$(BIN)/pip install -q -c .venv/constraints.txt -e ".[dev]"
	rm -f .venv/installed-torch-*
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
