# penstock: `make demo` runs the main job, `make check` proves the tree. Both set up all they need.
SHELL := bash
BIN := .venv/bin

.PHONY: demo check check-services lint types test faults mutants bench clean

demo: .venv/.dev
	$(BIN)/python examples/demo.py

check: .venv/.dev lint types test

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

test: .venv/.dev
	scripts/tools
	$(BIN)/pytest -m "not faults and not services" -n 2 --dist loadgroup

faults: .venv/.dev
	scripts/tools
	$(BIN)/pytest -m faults -n 2 --dist loadgroup

# Plants the bugs of tests/mutants.toml, one at a time, and runs the tests beside each.
mutants: .venv/.dev
	scripts/tools
	$(BIN)/python scripts/mutants.py

bench: .venv/.bench
	$(BIN)/python benchmarks/bench_shard.py
	$(BIN)/python benchmarks/bench_tokenizer.py
	$(BIN)/python benchmarks/bench_prepare.py
	$(BIN)/python benchmarks/bench_plan.py
	$(BIN)/python benchmarks/bench_pool.py
	scripts/rivals
	$(BIN)/python benchmarks/bench_loader.py
	$(BIN)/python benchmarks/bench_sync.py

.venv/.dev: pyproject.toml constraints.txt scripts/setup scripts/warm.py
	scripts/setup dev
	touch $@

.venv/.bench: .venv/.dev
	scripts/setup dev,bench
	touch $@

clean:
	rm -rf .venv .services build .mypy_cache .ruff_cache .pytest_cache
