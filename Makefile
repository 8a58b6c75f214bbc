# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint bench format clean

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.user: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[report,data]'
	touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.user

demo: $(VENV)/.user
	$(BIN)/poprisk demo

# One process per core, each with one thread: the tests are many and small. Those of the integrations go file by file,
# because each file pays once for the import of a trainer.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
UNIT := --dist worksteal --ignore tests/integrations
INTEGRATIONS := --dist loadfile tests/integrations

test: $(VENV)/.dev
	$(PYTEST) $(UNIT) -m "not slow and not gpu"
	$(PYTEST) $(INTEGRATIONS) -m "not slow and not gpu"

test-all: $(VENV)/.dev
	$(PYTEST) $(UNIT)
	$(PYTEST) $(INTEGRATIONS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.user
	$(BIN)/python benchmarks/optimizer_step.py --device cpu

clean:
	rm -rf $(VENV)
