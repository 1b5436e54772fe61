# Everything runs in .venv, which the first target that needs it makes. PYTHON and TORCH choose what
# goes in: `make test TORCH=torch==2.13.0 EXTRAS=test VENV=.venv-2.13` is the core alone, and
# `make test PYTHON=python3.14` runs in .venv-python3.14.
PYTHON ?= python3
VENV ?= .venv$(patsubst %,-%,$(notdir $(filter-out python3,$(PYTHON))))
TORCH ?= torch
EXTRAS ?= examples,test,bench,check,docs
BIN := $(VENV)/bin
comma := ,
PARALLEL = .ci/tests $(BIN)/python
STAMP := $(VENV)/.installed-$(subst =,-,$(TORCH))-$(subst $(comma),-,$(EXTRAS))

# Hundreds of processes start in the tests: none of them compiles the library anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-rest test-all test-cluster test-long fuzz mutation package promises install lint types docs bench soak faults figures gpu gpu-carry gpu-sanitize clean

install: $(STAMP)

# The demo waits for no more than it needs; the rest is added when something asks for it.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	@touch $@

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' '$(TORCH)'
	@rm -f $(VENV)/.installed-*
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python -m examples.cartpole

# Before each commit: some minutes on two cores. `make test PYTEST='-k calls'` runs some of them.
test: install
	HYPOTHESIS_PROFILE=brief $(PARALLEL) -m "not slow and not cluster" $(PYTEST)

# What `make test` leaves out: slow tests, a sample of the large matrices, and the properties with many more examples.
# (tests/README.md)
test-rest: install
	$(PARALLEL) -m "slow and not exhaustive"
	HYPOTHESIS_PROFILE=thorough $(PARALLEL) -m "hypothesis and not slow" --timeout 900 -o faulthandler_timeout=0

test-all: test test-rest mutation package

# Real launchers: Slurm, torchrun with etcd, podman. What is missing comes from Debian where that is allowed; the tests of
# what is still missing are skipped. `make test-cluster PYTEST='-k slurm'` runs some of them.
test-cluster: install
	$(BIN)/python -m pip install --quiet --editable '.[cluster]' '$(TORCH)'
	tests/cluster/install
	$(BIN)/python -m pytest -m cluster --durations 0 tests/cluster $(PYTEST)

# The cells of the matrices that `make test-rest` leaves out, an hour; then 20,000 examples of some properties, without
# the dump of stacks, which reads frames while they run.
test-long: install
	$(PARALLEL) -m exhaustive
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/unit/batching/test_scheduler.py tests/unit/batching/test_policies.py tests/loopback/test_fuzz.py \
		--timeout 3000 -o faulthandler_timeout=0

# Coverage-guided, for an hour: what reads the bytes of a peer. Finds are kept in tests/fuzz/corpus.
fuzz: install
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz

# The page of the promises, from tests/promises.toml and the marks of the tests.
promises: install
	$(BIN)/python -m tests.support.promises --write

# A fixed sample of the mutants of the state machines and codecs; `make mutation MUTANTS='*'` runs all. Survivors are
# printed; too many of them are an error.
MUTANTS ?=
mutation: install
	$(BIN)/python -m tests.support.mutation $(if $(MUTANTS),'$(MUTANTS)')

# Wheel and sdist: built, installed into a fresh environment, and tested there without the source.
package: install
	PYTHON=$(BIN)/python .ci/package

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy
	$(BIN)/basedpyright

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks.calls
	$(BIN)/python -m benchmarks.batching
	$(BIN)/python -m benchmarks.streams
	$(BIN)/python -m benchmarks.groups
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.threshold

# A million mixed calls, in about five minutes, and a million tensors in shared memory, in about ten.
soak: install
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.shared_memory_soak
	$(BIN)/python -m benchmarks.membership_soak
	$(BIN)/python -m benchmarks.successions
	$(BIN)/python -m benchmarks.weights_soak
	$(BIN)/python -m benchmarks.between_hosts_soak
	$(BIN)/python -m benchmarks.chaos

# Every fault in every state of a world, in about two minutes.
faults: install
	$(BIN)/python -m benchmarks.faults

# Every benchmark with its figure: docs/figures/, and the tables in docs/benchmarks.md. Some 55 minutes, on a machine
# that does nothing else.
figures: install
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.timeline --plot docs/figures/timeline.svg
	$(BIN)/python -m benchmarks.observe --trace docs/figures/trace.svg
	$(BIN)/python -m benchmarks.top --plot docs/figures/top.svg
	$(BIN)/python -m benchmarks.waiting --plot docs/figures/waiting.svg
	$(BIN)/python -m benchmarks.pipeline --plot docs/figures/pipeline.svg
	$(BIN)/python -m benchmarks.rnn --plot docs/figures/rnn.svg
	$(BIN)/python -m benchmarks.inference --plot docs/figures/inference.svg
	$(BIN)/python -m examples.selfplay --plot docs/figures/selfplay.svg

# Everything that needs a CUDA device, in at most eight minutes, with the Python that has torch with CUDA: no .venv is made.
# The page of results is $OUT/gpu.md, else out/gpu.md. Without a device it is an error.
gpu:
	$(PYTHON) -m tests.gpu

# The wheels that such a machine may lack, for one without a network: out/gpu-wheels.
gpu-carry:
	$(PYTHON) -m tests.gpu.carry

# The order tests under compute-sanitizer's memcheck and racecheck: some minutes, half an hour at most.
gpu-sanitize:
	$(PYTHON) -m tests.gpu --sanitize

clean:
	rm -rf $(VENV) .venv-* build dist mutants site out
