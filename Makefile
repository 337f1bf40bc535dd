# `make demo` and `make test` work on a fresh machine with make, Python 3.11+ and a C compiler: all else goes into .venv.
PYTHON ?= python3
TORCH ?= 2.13.0
PYTEST_ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed-torch-$(TORCH)

.PHONY: demo test lint types clean

# One process per GPU, or four on the CPU; the example's default mesh follows their number.
demo: $(STAMP)
	n=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 4)") && \
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $$n \
		examples/train_gpt.py --zero 3

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/pyright

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	sed "s/^torch==.*/torch==$(TORCH)/" constraints.txt > .venv/constraints.txt
	$(BIN)/pip install -q -c .venv/constraints.txt -e ".[dev]"
	rm -f .venv/installed-torch-*
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
