# Everything runs in .venv, which the first target that needs it makes. PYTHON and TORCH choose what
# goes in: `make test TORCH=torch==2.13.0 EXTRAS=test VENV=.venv-2.13` is the core alone.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
EXTRAS ?= examples,test,bench,docs
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst =,-,$(TORCH))-$(subst $(comma),-,$(EXTRAS))
comma := ,

.PHONY: demo test test-long install lint types docs bench clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' '$(TORCH)'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: install
	$(BIN)/python -m examples.cartpole

test: install
	$(BIN)/python -m pytest

test-long: install
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/test_batcher.py --timeout 3000

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	$(BIN)/basedpyright

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.batching

clean:
	rm -rf $(VENV) .venv-* build dist site out
