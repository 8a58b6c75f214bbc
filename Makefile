# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint docs bench format release clean

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.user: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[report,data]'
	touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.user

$(VENV)/.docs: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	touch $@ $(VENV)/.user

demo: $(VENV)/.user
	$(BIN)/poprisk demo

# One process per core, each with one thread: the tests are many and small. A file, or a folder whose files share what is
# slow to make (tests/conftest.py), is one process's. What imports trainers goes apart, so that the rest need not.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
TRAINERS := tests/integrations lab/tests/paper/test_learning_rate_guide.py
UNIT := $(addprefix --ignore=,$(TRAINERS))

test: $(VENV)/.dev
	$(PYTEST) $(UNIT) -m "not slow and not gpu"
	$(PYTEST) $(TRAINERS) -m "not slow and not gpu"

test-all: $(VENV)/.dev
	$(PYTEST) $(UNIT)
	$(PYTEST) $(TRAINERS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Guide, gallery (run) and API reference as HTML; a warning is an error, and nothing is fetched: open build/docs/index.html
docs: $(VENV)/.docs
	$(BIN)/python -m doctest docs/_ext/mathml.py
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -j 2 -b html docs build/docs

bench: $(VENV)/.user
	$(BIN)/python benchmarks/optimizer_step.py --device cpu

# The source archive, the wheel made from it, and what an index would say about them; uploads nothing (CONTRIBUTING.md).
release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV)
