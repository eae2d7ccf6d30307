# penstock: `make demo` runs the main job, `make check` proves the tree. Both set up all they need.
SHELL := bash
BIN := .venv/bin

PYTHONS := 3.13 3.14

# Some machines forbid compiled modules, and uv compiles none: then each process that a test starts
# compiles all that it imports, torch in 2.7 s instead of 1.3.
unexport PYTHONDONTWRITEBYTECODE

SLICES := $(PYTHONS:%=slice-%)

.PHONY: demo check check-services lint types warm test pythons pythons-slice $(SLICES) faults mutants oracles bench wheel docs clean

demo: .venv/.dev
	$(BIN)/python examples/demo.py

# What keeps one core busy goes side by side.
check: .venv/.dev
	$(MAKE) -j 2 lint types warm pythons-slice
	$(MAKE) test

# Azurite comes by npm. Where it does not install, Azure is left out, and that is said.
check-services: .venv/.dev
	scripts/services || echo "Azurite does not install here: Azure is left out" >&2
	[ -f .services/azurite ] && chosen= || chosen=" and not azurite"; \
	$(BIN)/pytest -m "services and not faults" -k "not nothing$$chosen"

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

# Before the tests, so that no test waits for a compiler.
warm: .venv/.dev
	$(BIN)/penstock warm

# Files of tests are in memory where 8 GB of it are free for files: an fsync takes 3 ms on a disk and
# 4 microseconds there. After a failure they stay.
test: .venv/.dev warm
	scripts/tools
	free=$$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1); \
	[ "$${free:-0}" -gt 8000000 ] && place=/dev/shm || place=$${TMPDIR:-/tmp}; \
	memory=$$(mktemp -d $$place/penstock-tests.XXXXXX); \
	$(BIN)/pytest -m "not faults and not services" -n 2 --dist loadgroup --basetemp=$$memory/tests && \
	rm -rf $$memory

# The loader and the kernels on newer Pythons, without torch. A Python that cannot be had is named;
# `make pythons` fails for it, `make check` goes on with the others. The slice compiles the kernels
# that it calls, 98 s of CPU less than all, and leaves the test out whose child process needs them.
NEWER := tests/supply tests/stream tests/test_kernels.py tests/test_simd.py
NEEDS_TORCH := tests/supply/test_mixed.py tests/supply/test_passes.py \
  tests/supply/test_shared_examples.py
pythons: .venv/.dev
	scripts/pythons $(PYTHONS)
	for version in $(PYTHONS); do \
	  .pythons/$$version/venv/bin/python -m pytest $(NEWER) $(NEEDS_TORCH:%=--ignore %) \
	    -m "not faults and not services and not torch" || exit; \
	done

pythons-slice: $(SLICES)

$(SLICES): slice-%: .venv/.dev
	if scripts/pythons $*; then \
	  .pythons/$*/venv/bin/python -m pytest --few-kernels tests/supply/test_held_batches.py \
	    "tests/supply/test_journeys.py::test_500_journeys[0]" tests/test_kernels.py \
	    --deselect tests/test_kernels.py::test_a_command_does_not_import_numba_or_pandas; \
	else echo "make check goes on without Python $*" >&2; fi

faults: .venv/.dev
	scripts/tools
	$(BIN)/pytest -m faults -n 2 --dist loadgroup

# Plants the bugs of tests/mutants.toml, one at a time, and runs the tests beside each.
mutants: .venv/.dev
	scripts/tools
	$(BIN)/python scripts/mutants.py

# Trained tokens against the real transformers and TRL, and every chat record of two packages; then
# advantages beside those that TRL, verl and OpenRLHF compute, on 1,000 batches of each kind.
oracles: .venv/.dev
	scripts/oracles
	scripts/rivals rl
	scripts/oracles_rl

# Every code block that names no extra, on the wheel alone in an empty environment.
wheel: .venv/.dev
	scripts/wheel
	PENSTOCK_DOCS_PYTHON=$(CURDIR)/build/wheel/venv/bin/python \
	  $(BIN)/pytest tests/house/test_docs.py -k test_block

# Pages of docs/ and the API reference as a static site; a link that leads nowhere fails it.
docs: .venv/.docs
	$(BIN)/mkdocs build --strict  # --quiet would let warnings pass
	@echo build/docs/index.html

bench: .venv/.bench
	$(BIN)/python benchmarks/bench_shard.py
	$(BIN)/python benchmarks/bench_tokenizer.py
	$(BIN)/python benchmarks/bench_prepare.py
	$(BIN)/python benchmarks/bench_scale.py
	$(BIN)/python benchmarks/bench_filters.py
	$(BIN)/python benchmarks/bench_plan.py
	$(BIN)/python benchmarks/bench_pool.py
	scripts/rivals
	$(BIN)/python benchmarks/bench_loader.py
	$(BIN)/python benchmarks/bench_sft.py
	$(BIN)/python benchmarks/bench_rollout.py --keep
	$(BIN)/python benchmarks/bench_sync.py
	$(BIN)/python benchmarks/bench_pipeline.py --keep
	$(BIN)/python benchmarks/plots.py

.venv/.dev: pyproject.toml constraints.txt scripts/setup
	scripts/setup dev
	touch $@

.venv/.bench: .venv/.dev
	scripts/setup dev,bench
	touch $@

.venv/.docs: .venv/.dev
	scripts/setup dev,docs
	touch $@

clean:
	rm -rf .venv .oracles .services .pythons build .mypy_cache .ruff_cache .pytest_cache
