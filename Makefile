# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Each of the hundreds of processes that tests start would compile all of hadelay for itself.
export PYTHONDONTWRITEBYTECODE :=
READY := $(VENV)/.ready
SPARK := $(VENV)/.spark
# What is imported is compiled then: compiling everything took a third of the set-up.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: help setup demo test long browser frameworks bridge spark-cluster check format shards bench chaos soak overload sim lock docs site clean

help:
	@echo 'make demo    three nodes, producers, consumers; the leader is killed; a table counts what was lost, doubled, early, late'
	@echo 'make test    all tests, with few examples and seeds'
	@echo 'make long    all tests with all examples, seeds and deliberate bugs'
	@echo 'make browser  Chromium and its driver, for the tests of the console in a real browser; they are skipped without'
	@echo 'make frameworks  workers of Celery and other frameworks, killed and restarted, at full size'
	@echo 'make bridge  bridges of RabbitMQ, the broker and the leader, killed in a loop; needs rabbitmq-server of Debian'
	@echo 'make check   format, lint, types'
	@echo 'make spark-cluster   the pipeline on a Spark cluster of a master and two workers on this machine'
	@echo 'make shards  20,000 random changes of the shard map over the real apply'
	@echo 'make bench   the numbers, beside those of others (bench/README.md); ROWS="single batch" for some of them'
	@echo 'make chaos   one hour of faults of every kind that works here, against real processes (docs/howto/chaos.md)'
	@echo 'make soak    one hour of moderate load: memory, descriptors, journal and lateness stay flat, with plots'
	@echo 'make overload  storms, topics, consumers, slow nodes and disks, at full size (docs/howto/overload.md)'
	@echo 'make sim     100,000 seeds of the simulator, a day or so; run it again to go on (docs/explanation/simulation.md)'
	@echo 'make docs    the generated reference pages, and the dashboard'
	@echo 'make site    the docs as pages of HTML in site-out/html, every link checked'
	@echo 'make lock    requirements*.lock from the newest versions that pyproject.toml allows'

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hadelay needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv; \
	  else echo "this Python has no venv module: install the package python3-venv, then run make again" >&2; exit 1; fi; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) $(INSTALL) --require-hashes -r requirements.lock
	$(PY) $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# Spark and a Java, for the tests. PySpark is a source archive of 450 MB of jars: pip makes a wheel of it, which would
# compress them once more.
$(SPARK): $(READY) requirements-spark.lock
	$(PY) $(INSTALL) --no-build-isolation --config-settings=--build-option=--compression=stored \
	  --require-hashes -r requirements-spark.lock
	@touch $@

# Celery, Django and the others, for tests/frameworks.
FRAMEWORKS := $(VENV)/.frameworks
$(FRAMEWORKS): $(READY) requirements-frameworks.lock
	$(PY) $(INSTALL) --require-hashes -r requirements-frameworks.lock
	@touch $@

# The same at full size, and what takes too long for `make test`.
frameworks: $(READY) $(FRAMEWORKS)
	@HADELAY_FRAMEWORKS=1 $(PY) -m pytest tests/frameworks

# RabbitMQ takes half a minute to start.
bridge: $(READY) $(FRAMEWORKS)
	@HADELAY_BRIDGE=1 $(PY) -m pytest -s tests/bridge

# Chromium's shell without windows is Debian's; elsewhere HADELAY_CHROMIUM names one. Its fonts are those of the
# screenshots.
BROWSER := $(VENV)/.browser
browser: $(BROWSER)
$(BROWSER): $(READY) requirements-browser.lock
	$(PY) $(INSTALL) --require-hashes -r requirements-browser.lock
	@command -v "$${HADELAY_CHROMIUM:-chromium-headless-shell}" >/dev/null || command -v chromium >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -q && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
	    chromium-headless-shell fonts-dejavu-core; \
	  else echo 'install Chromium, or name one in HADELAY_CHROMIUM' >&2; exit 1; fi; }
	@touch $@

demo: $(READY)
	@$(PY) cluster/local/demo.py

# Side by side: some of the tests wait for processes and disks while the simulators compute. Each part takes as long as
# the others.
SIM := tests/sim tests/tasks tests/webhooks tests/handout tests/storage
SIDE := tests/raft tests/chaos tests/cli tests/ledger tests/overload tests/frameworks tests/security
REAL := tests/console tests/docs tests/http tests/system
test: $(READY) $(SPARK) $(FRAMEWORKS)
	@$(PY) -m pytest $(SIM) >$(VENV)/sim.log 2>&1 & sim=$$!; \
	$(PY) -m pytest $(SIDE) >$(VENV)/side.log 2>&1 & side=$$!; \
	$(PY) -m pytest $(REAL) >$(VENV)/real.log 2>&1 & real=$$!; \
	$(PY) -m pytest $(addprefix --ignore=,$(SIM) $(SIDE) $(REAL)); others=$$?; \
	wait $$sim; sim=$$?; wait $$side; side=$$?; wait $$real; real=$$?; \
	cat $(VENV)/sim.log $(VENV)/side.log $(VENV)/real.log; exit $$((others ? others : sim ? sim : side ? side : real))

long:
	@HADELAY_LONG=1 $(MAKE) test

# docs/howto/spark-cluster.md is what it runs.
spark-cluster: $(READY) $(SPARK)
	@HADELAY_SPARK_CLUSTER=1 $(PY) -m pytest tests/pipeline/test_standalone.py

check: $(READY)
	$(PY) -m ruff format --check src tests bench chaos cluster tools
	$(PY) -m ruff check src tests bench chaos cluster tools
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff format src tests bench chaos cluster tools
	$(PY) -m ruff check --fix src tests bench chaos cluster tools

bench: $(READY)
	@$(PY) -m bench $(ROWS)

# One hour, and a minute to start and to drain. Shorter: .venv/bin/python -m chaos run hour --seconds 180
chaos: $(READY)
	@$(PY) -m chaos run hour

# Nothing is broken for one hour, and nothing grows. Shorter: .venv/bin/python -m chaos run soak --seconds 600
soak: $(READY)
	@$(PY) -m chaos run soak

# Some of them: .venv/bin/python -m tests.overload storm consumers
overload: $(READY)
	@$(PY) -m tests.overload

# Fewer: make sim SEEDS=1000
SEEDS := 100000
shards: $(READY)
	HADELAY_SHARD_SEEDS=20000 $(PY) -m pytest tests/ledger/test_shards_model.py

sim: $(READY)
	@$(PY) -m chaos sim --seed 1 --count $(SEEDS) --log sim-out/seeds.jsonl

docs: $(READY)
	$(PY) tools/reference.py
	$(PY) tools/dashboard.py

SITE := $(VENV)/.site
$(SITE): $(READY) requirements-site.lock
	$(PY) $(INSTALL) --require-hashes -r requirements-site.lock
	@touch $@

site: $(SITE)
	@$(PY) tools/website.py

lock: $(READY)
	$(PY) tools/lock.py

clean:
	rm -rf $(VENV) bench/out chaos-out sim-out site-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
