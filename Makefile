# `make demo` and `make test` set everything up by themselves (setup.sh) and then do their job.
.DEFAULT_GOAL := help
.PHONY: help demo test slow lint format setup clean

python := .venv/bin/python
# The tree is checked as it stands, and each test process keeps to one core: two of them run at once.
# Bytecode is kept also where the machine says otherwise: tests start many Pythons, and each would compile everything.
# Neighbours stay in one process (worksteal): what the tests of a module share is computed once.
test_env := DEEPWELL_FULL_TESTS=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1  /p' $(firstword $(MAKEFILE_LIST)) | awk -F'  ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: ## make .venv with the pinned packages (PYTHON=python3.12 chooses the Python)
	@PYTHON="$(PYTHON)" ./setup.sh

demo: setup ## run the demonstration
	@$(python) recipes/demo.py

test: lint ## lint, types and tests; the GPU tests too where a GPU is present
	@marks=$$($(python) -c 'import torch; print("" if torch.cuda.is_available() else "not gpu and ", end="")') && \
	echo "test: pytest -n 2 --dist worksteal -m \"$${marks}not slow\"" && \
	$(test_env) $(python) -m pytest -n 2 --dist worksteal -m "$${marks}not slow" --durations=10 $(ARGS)

slow: setup ## the tests that `make test` leaves out for their length: the other architectures, long proofs
	@# Where there is a CUDA compiler, csrc is compiled: that needs CUTLASS's headers, 6 MB and nothing else of the package.
	@if PATH="$$PATH:/usr/local/cuda/bin" command -v nvcc >/dev/null && ! $(python) -c 'import cutlass_library' 2>/dev/null; then \
	  $(python) -m pip install -q --no-deps "$$(sed -n 's/^cutlass = \["\(.*\)"\]/\1/p' pyproject.toml)"; fi
	@$(test_env) $(python) -m pytest -n 2 --dist worksteal -o faulthandler_timeout=3600 -m "slow" --durations=10 $(ARGS)

lint: setup ## ruff (rules and format) and mypy
	@echo "lint: ruff check, ruff format --check, mypy"
	@$(python) -m ruff check
	@$(python) -m ruff format --check
	@$(python) -m mypy

format: setup ## let ruff format and fix the tree
	@$(python) -m ruff check --fix
	@$(python) -m ruff format

clean: ## remove .venv, caches and build outputs
	@rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
	@echo "clean: removed .venv, caches and build outputs"
