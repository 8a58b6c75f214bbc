# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-library test-lab test-more test-more-library test-more-lab test-all test-all-library test-all-lab lint docs results pages bench format lock sbom release clean

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.user: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) -e '.[report,data]'
	touch $@

# The library with everything its tests need, and the lab beside it.
$(VENV)/.dev: $(VENV)/.created pyproject.toml lab/pyproject.toml constraints.txt
	$(PIP) -e '.[dev]' -e lab
	touch $@ $(VENV)/.user

$(VENV)/.docs: $(VENV)/.created pyproject.toml lab/pyproject.toml constraints.txt
	$(PIP) -e '.[docs]' -e lab
	touch $@ $(VENV)/.user

demo: $(VENV)/.user
	$(BIN)/poprisk demo

# One process per core, each with one thread: the tests are many and small. A file, or a folder whose files share what is
# slow to make (tests/suite.py), belongs to one process.
PYTEST := OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not gpu"
# Tests that take long for what they show run in `make test-more`, not in `make test`: other trainers, process groups,
# compilers, killed workers, built wheels, and the studies of the lab. `make test` covers the lab's engine, its data and
# whether its pages are up to date.
MORE := tests/integrations tests/distributed tests/test_release.py tests/optim/test_compile.py \
        tests/jobs/test_killed_workers.py tests/jobs/test_memory_limit.py tests/docs/test_notebook_example.py
MORE_LAB := tests/paper tests/gates tests/costs tests/theory tests/recipes tests/test_reproduce_command.py

# Each target has a part for the library and one for the lab; `make -k` runs the second even if the first fails.
test: test-library test-lab

test-library: $(VENV)/.dev
	$(PYTEST) $(addprefix --ignore=,$(MORE)) $(QUICK)

test-lab: $(VENV)/.dev
	cd lab && $(PYTEST) $(addprefix --ignore=,$(MORE_LAB)) $(QUICK)

test-more: test-more-library test-more-lab

test-more-library: $(VENV)/.dev
	$(PYTEST) $(MORE) $(QUICK)

test-more-lab: $(VENV)/.dev
	cd lab && $(PYTEST) $(MORE_LAB) $(QUICK)

test-all: test-all-library test-all-lab

test-all-library: $(VENV)/.dev
	$(PYTEST)

test-all-lab: $(VENV)/.dev
	cd lab && $(PYTEST)

# Every stored result of the lab again (hours, some need data sets and a GPU: `--list` names them), and the pages from them.
results: $(VENV)/.dev
	cd lab && ../$(BIN)/python -m poprisk_lab.results $(NAMES)

pages: $(VENV)/.dev
	cd lab && ../$(BIN)/python -m poprisk_lab.pages
	$(BIN)/python tools/paper_table.py

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

$(VENV)/.release: $(VENV)/.created pyproject.toml
	$(PIP) build cyclonedx-bom twine uv
	touch $@

# Every package that development and the pages need, for all platforms, with its version and its hashes.
lock: $(VENV)/.release
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra docs --universal --python-version 3.11 -c constraints.txt \
		--generate-hashes --no-annotate --no-header --upgrade --quiet --output-file requirements.lock

# What the locked environment is made of, in the CycloneDX format.
sbom: $(VENV)/.release
	mkdir -p dist
	$(BIN)/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
		--output-file dist/sbom.cdx.json

# The source archive, the wheel made from it, and what an index would say about them; uploads nothing (CONTRIBUTING.md).
release: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(MAKE) sbom

clean:
	rm -rf $(VENV)
