# Both commands of the README set everything up by themselves: only Python and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-fast test-browser lint sweep sweep-all fuzz-networks fuzz promises mutants docs images \
	release compat clean

quickstart: $(READY)
	$(BIN)/timm-knapsack quickstart

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Every room, without what takes long (tests/slow_tests.txt): at most 90 s on two cores.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not browser and not slow"

# The report in headless Chromium: Debian's is installed where this user may.
test-browser: $(READY)
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) || true
	$(BIN)/python -m pytest -m browser tests/reports

lint: $(READY)
	$(BIN)/ruff check .

# Every timm family through trace, prune, oracle, round trip: writes benchmarks/coverage.csv and docs/coverage.md.
sweep: $(READY)
	$(BIN)/python benchmarks/coverage.py $(if $(MODELS),--models $(MODELS))

# Every name of timm (1351): benchmarks/coverage_all.csv, docs/coverage_all.md. Hours; goes on where the last run stopped.
sweep-all: $(READY)
	$(BIN)/python benchmarks/coverage_all.py $(if $(NAMES),--names $(NAMES))

# Random networks from a grammar of tricks, pruned and compared with the masked ones: 2000, or COUNT.
fuzz-networks: $(READY)
	$(BIN)/python benchmarks/fuzz_networks.py $(if $(COUNT),--count $(COUNT))

# Damaged files of every kind against the promise of SECURITY.md, 20 000 of each; a run goes on where the last one stopped.
fuzz: $(READY)
	$(BIN)/python tests/fuzz/attack.py --log .fuzz.jsonl $(if $(MUTATIONS),--mutations $(MUTATIONS))

# Each promise of SECURITY.md and docs/reliability.md, tried by hand: minutes.
promises: $(READY)
	$(BIN)/python benchmarks/attack_promises.py

# Small changes of the code that the tests must notice; a run goes on where the last one stopped. SAMPLE=40 tries so many.
mutants: $(READY)
	$(BIN)/python benchmarks/mutants.py $(if $(SAMPLE),--sample $(SAMPLE))

# The pages in site/, from docs/ and the docstrings; a link that leads nowhere is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search at http://localhost:8000: $(BIN)/python -m http.server -d site"

# The pictures of README and docs: a quickstart's chart, and pages in headless Chromium.
images: quickstart docs
	$(BIN)/python docs/images/make_images.py quickstart/model site

# sdist and wheel in dist/, checked; the wheel installed and used, beside this environment and in an empty one (minutes).
release: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_release.py
	$(BIN)/python tests/fresh_wheel.py dist

# The oldest versions that pyproject.toml admits, beside the pinned torch, in an environment of their own.
compat:
	$(PYTHON) tests/compat.py .venv-compat

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing what is needed into $(VENV): minutes, the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/timm-knapsack doctor --fix
	touch $@

clean:
	rm -rf $(VENV) .venv-compat site dist .pytest_cache .ruff_cache .hypothesis
