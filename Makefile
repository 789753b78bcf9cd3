# Needs make, sh, Java 17 or newer, Python 3.11 or newer, and a network for the first run.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo bench bench-guard test test-slow test-long unit with-broker integration faults faults-short soak check docs format lock sbom clean

BIN := .venv/bin
LOCKS := requirements/build.txt requirements/setup.sh pyproject.toml
# Explicit, so that tests never meet the jars or the settings of somebody's own Spark. And some machines forbid Python
# to keep what it has compiled: each process that a test starts would compile our modules anew.
PYTEST := env -u SPARK_HOME -u SPARK_CONF_DIR -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
# Processes of the tiers that mostly wait: each has a broker of its own, and up to two of them a Spark session.
WORKERS := 6
# Each process collects all tests by itself; most of them are of the unit tier, which these never run.
SPREAD := -n $(WORKERS) --dist loadgroup --ignore=tests/unit
# Fewer: most of these start trackers and workers of their own.
SPREAD_SLOW := -n 3 --dist loadgroup --ignore=tests/unit

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup: .venv/.jars ## make .venv with the locked packages, fetch the locked jars

demo: setup ## show everything on a Kafka broker of its own
	@$(BIN)/kmq demo

test: unit with-broker ## run the tests, quickest first

test-slow: .venv/.dev .venv/.jars ## run those that take long by themselves, some minutes more
	@$(PYTEST) $(SPREAD_SLOW) -m "slow and not long"

test-long: .venv/.dev .venv/.jars ## run those that keep both cores busy for minutes each
	@$(PYTEST) $(SPREAD_SLOW) -m long

# A process that has collected the ledger's tests, which need Spark, ends with a page about what DuckDB "leaked".
unit: .venv/.dev ## run the tests that need no JVM
	@$(PYTEST) -n 2 --ignore=tests/spark/ledger -m "not spark and not kafka and not faults"

# Both at once, so that they share brokers and the Spark session.
with-broker: .venv/.dev .venv/.jars
	@$(PYTEST) $(SPREAD) -m "(spark or kafka or faults) and not slow"

integration: .venv/.dev .venv/.jars ## run the tests on a real Spark and a real Kafka broker
	@$(PYTEST) $(SPREAD) -m "(spark or kafka) and not faults and not slow"

bench: .venv/.dev .venv/.jars ## measure everything, about 45 minutes; writes bench/results.json
	@env -u SPARK_HOME -u SPARK_CONF_DIR $(BIN)/python -m bench.run

bench-guard: .venv/.dev .venv/.jars ## look that no ratio of the stored results has fallen
	@env -u SPARK_HOME -u SPARK_CONF_DIR $(BIN)/python -m bench.run --guard

faults: .venv/.dev .venv/.jars ## break things for more than an hour; writes faults/results.json and .md
	@env -u SPARK_HOME -u SPARK_CONF_DIR $(BIN)/python -m faults.run

faults-short: .venv/.dev .venv/.jars ## the short form of one fault, a minute or two
	@$(PYTEST) $(SPREAD_SLOW) -m "faults and not long"

soak: .venv/.dev .venv/.jars ## run a busy queue for half an hour and judge what grows; MINUTES=6 for less
	@env -u SPARK_HOME -u SPARK_CONF_DIR $(BIN)/python -m faults.soak $(if $(MINUTES),--minutes $(MINUTES))

docs: .venv/.dev ## write the pages of commands and settings from the code
	@$(BIN)/python docs/generate.py

check: .venv/.dev ## lint, format, types, imports, generated code: what CI asks first
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "kmq: some files are not formatted; run make format" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m kmq_spark.wire.generate --check

format: .venv/.dev ## format the code, and repair what the linter can
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

lock: ## resolve the dependencies anew, inside the bounds of pyproject.toml
	@requirements/lock.sh

sbom: .venv/.sbom ## list the packages, their licences, and the jars as CycloneDX: build/sbom.json
	@mkdir -p build
	@$(BIN)/cyclonedx-py requirements requirements/all.txt --pyproject pyproject.toml --output-reproducible -o build/sbom.json
	@$(BIN)/python requirements/sbom.py build/sbom.json

clean: ## remove .venv and what the tools left; the caches stay
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp a kind of installation: a second call compares dates and is done.
.venv/.all: requirements/all.txt $(LOCKS)
	@requirements/setup.sh all
	@touch $@

# After .all, since both install into .venv.
.venv/.dev: requirements/dev.txt .venv/.all
	@requirements/setup.sh dev
	@touch $@

.venv/.sbom: requirements/sbom.txt .venv/.all
	@requirements/setup.sh sbom
	@touch $@

.venv/.jars: kmq_spark/local/jars.lock .venv/.all
	@$(BIN)/python -m kmq_spark.local.jars fetch
	@touch $@
