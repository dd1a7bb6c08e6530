PYTHON ?= python3
VENV ?= .venv
STORE ?= seaweed
# Where pip finds torch's CPU wheels, if the configured index has only the CUDA ones (several GB).
TORCH_INDEX ?=
PYTEST_ARGS ?=
# How often each race is run; a few times, if it is not said.
ROUNDS ?=
BENCH_ARGS ?=
# What is fuzzed, and how long.
TARGET ?= manifest
SECONDS ?= 600

bin := $(VENV)/bin
installed := $(VENV)/.installed
torch := torch==2.13.0
pip := $(bin)/python -m pip install --quiet --disable-pip-version-check

races := $(if $(ROUNDS),REMOTE_CKPT_ROUNDS=$(ROUNDS))
minio := docker compose --project-name remote-ckpt-test
minio_access := TEST_S3_ENDPOINT_URL=http://127.0.0.1:9000 \
	TEST_S3_ACCESS_KEY=minioadmin TEST_S3_SECRET_KEY=minioadmin

.PHONY: help venv demo test test-servers test-minio check docs bench bench-full bench-memory fuzz clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(installed)  ## make the environment in .venv

$(installed): pyproject.toml requirements-dev.txt
	@echo "Installing into $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(pip) '$(torch)+cpu' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) || $(pip) '$(torch)'
	$(pip) --requirement requirements-dev.txt --editable .
	touch $@

demo: $(installed)  ## train, kill a rank inside a save, resume, compare; STORE=local or STORE=s3://bucket/prefix
	$(bin)/python scripts/demo.py $(STORE)

test: $(installed)  ## run the whole suite, with its servers; PYTEST_ARGS is passed on
	$(races) $(bin)/python -m pytest $(PYTEST_ARGS)

test-servers: $(installed)  ## run what needs a real server on Ceph; ROUNDS=200 repeats each race
	@{ command -v radosgw && command -v ceph-mon && command -v ceph-osd; } >/dev/null || { \
		echo "Ceph is missing. Debian and Ubuntu have it, as root:" \
		"apt-get install --no-install-recommends radosgw ceph-mon ceph-osd" >&2; exit 1; }
	$(races) $(bin)/python -m pytest -m server --s3 ceph $(PYTEST_ARGS)

test-minio: $(installed)  ## the same on MinIO, in Docker
	$(minio) up --detach --wait minio
	@status=0; $(races) $(minio_access) $(bin)/python -m pytest -m server $(PYTEST_ARGS) || status=$$?; \
		$(minio) down --volumes; exit $$status

check: $(installed)  ## lint, formatting, types
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy remote_ckpt tests scripts benchmarks examples

docs: $(installed)  ## run every code block of README and docs
	$(bin)/python -m pytest tests/test_docs.py

bench: $(installed)  ## compare our speed with others' on loopback; minutes. BENCH_ARGS is passed on
	$(pip) --requirement benchmarks/requirements.txt
	$(bin)/python -m benchmarks.bench $(BENCH_ARGS)

bench-full: $(installed)  ## the same over TLS, on a local disk, with two ranks and with 4 GiB; an hour
	$(pip) --requirement benchmarks/requirements.txt
	$(bin)/python -m benchmarks.bench --scenario plain tls shaped local --ranks 1 2 \
		--json benchmarks/results/full.json --chart benchmarks/results/full.png $(BENCH_ARGS)
	$(bin)/python -m benchmarks.bench --scenario plain local --mib 4096 --rounds 3 \
		--json benchmarks/results/large.json $(BENCH_ARGS)
	$(bin)/python benchmarks/memory.py

bench-memory: $(installed)  ## measure what a save and a load hold in memory
	$(bin)/python benchmarks/memory.py

fuzz: $(installed)  ## fuzz what parses stored bytes; TARGET=index SECONDS=60 says what and how long
	$(pip) --requirement tests/fuzz/requirements.txt
	$(bin)/python tests/fuzz/fuzz.py $(TARGET) --seconds $(SECONDS)

clean:  ## remove the environment, caches and the demonstration's files
	rm -rf $(VENV) .demo .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
