# On a fresh machine, nothing before it: `make test`, or `make reproduce`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
WORKERS ?= 2
PYTEST_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help install reproduce test check notebooks pytest readme docs quarto export clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: $(STAMP) ## create .venv and install repq with everything its tests need

$(STAMP): settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { v=$$($(PYTHON) --version 2>/dev/null) || v=missing; echo "repq needs Python 3.10 or newer, $(PYTHON) is $$v. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

PROFILE ?= smoke
reproduce: install ## make all tables of the paper, small (PROFILE=cpu: real data from REPQ_DATA, hours; gpu: a day on one)
	$(BIN)/repq reproduce --profile $(PROFILE)

test: check notebooks pytest ## everything CI runs: notebooks = modules, the notebooks' own tests, tests/

check: install ## fail if notebooks and modules disagree, a notebook is not clean, or an import goes the wrong way
	$(BIN)/python -m pytest -q tests/test_package.py tests/test_house.py

notebooks: install ## run every notebook outside experiments/
	cd nbs && OMP_NUM_THREADS=1 ../$(BIN)/nbdev_test --n_workers $(WORKERS) --skip_folder_re '^([_.]|experiments$$)'

pytest: install ## run tests/ (PYTEST_FLAGS=--slow for the long ones)
	$(BIN)/python -m pytest -q -n $(WORKERS) --durations=10 tests --ignore tests/test_package.py --ignore tests/test_house.py $(PYTEST_FLAGS)

export: install ## write the modules from the notebooks
	$(BIN)/nbdev_clean && $(BIN)/nbdev_export

readme: install ## write README.md from nbs/index.ipynb, with the tables as they are now
	$(BIN)/python -m repq.cli.readme

KATEX := 0.19.1
docs: quarto install ## render the notebooks into a site, _docs (needs Quarto and npm)
	npm install --silent --no-save --no-audit --no-fund --prefix build/npm katex@$(KATEX)
	$(BIN)/python -m repq.cli.site build build/npm/node_modules/katex/dist
	cd _proc && quarto render
	$(BIN)/python -m repq.cli.site finish

quarto:
	@command -v quarto >/dev/null || { echo "make docs needs Quarto 1.4 or newer, and quarto is not on the PATH. Get it from https://quarto.org/docs/get-started/ and run make docs again. Nothing else here needs it."; exit 1; }
	@command -v npm >/dev/null || { echo "make docs needs npm, to put KaTeX beside the pages, and npm is not on the PATH. It comes with Node.js: https://nodejs.org. Nothing else here needs it."; exit 1; }

clean: ## remove the environment and caches
	rm -rf $(VENV) *.egg-info .pytest_cache .hypothesis _docs _proc build/npm
