# Everything a user or CI runs. Each target does its own set-up, into .venv, once.
# A Python that was built without its optimizations (pyenv's default) takes a fifth longer: the distribution's is preferred.
OPTIMIZED := import ensurepip, sys, sysconfig, venv; \
  optimized = sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""); \
  sys.exit(sys.version_info < (3, 11) or not optimized)
PYTHON ?= $(shell for each in python3 /usr/bin/python3; do \
  $$each -c '$(OPTIMIZED)' 2>/dev/null && { echo $$each; exit; }; done; echo python3)
# The CPU build is enough here; on a GPU machine the same version with CUDA.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Every process that a test starts would compile all that it imports: half of a worker's start.
unexport PYTHONDONTWRITEBYTECODE
# Formatters change files; targets must not race.
.NOTPARALLEL:

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tandem needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "This Python has no venv module: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (once; a minute with a warm package cache, three or more without) ..."
	@# torch first and alone: a range that admits a newer one would bring another build.
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(TORCH) numpy
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# For one transport more; where it cannot be had its tests say so.
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt nixl || true
	@# Where there is no compiler the engine says so at start and runs on torch's own operators. What the processes of a
	@# cluster import is translated to bytecode here, once, rather than in all of them at the first start.
	@{ $(BIN)/python -m kv_transfer || true; } & { $(BIN)/python -m engine.kernels.cpu || true; } & \
	  $(BIN)/python -c "import cluster.cli.main, router.__main__" >/dev/null & \
	  $(BIN)/python -c "import decode_worker.__main__, prefill_worker.__main__" >/dev/null; wait
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Make .venv (skipped when nothing changed)

.PHONY: up
up: setup ## Start a cluster on this machine: one router, one prefill worker, one decode worker
	@exec $(BIN)/tandem up $(ARGS)

.PHONY: demo
demo: setup ## Start a cluster, send one request through the two pools, show the answer, stop
	@exec $(BIN)/tandem demo $(ARGS)

.PHONY: proto
proto: setup ## Regenerate the gRPC stubs
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto
	@rm -f tandem/v1/common_pb2_grpc.py

.PHONY: docs
docs: setup ## Write the pages that are made from the code: configuration and metrics
	@$(BIN)/python -m cluster.reference

.PHONY: fmt
fmt: setup ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: lint
lint: setup ## Style, types, import contracts, generated stubs and pages
	@# Types take as long as all the rest, on one core: both at once.
	@$(BIN)/mypy & types=$$!; rest=0; \
	  { $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-logo \
	    && $(BIN)/python -m tests.stubs && $(BIN)/python -m cluster.reference --check; } || rest=$$?; \
	  wait $$types && exit $$rest

.PHONY: browser
browser: ## A Chromium for the tests of the status page (skipped when there is one; else 40 s with apt-get, as root)
	@test -n "$${CHROMIUM:-}" || command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || { \
	  echo "Installing Chromium (once) ..."; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
	  || { echo "No Chromium, and it cannot be installed here: sudo make browser, or CHROMIUM=/path/to/one"; exit 1; }; }

.PHONY: screenshots
screenshots: setup browser ## Retake the pictures in docs/use: the status page and tandem top (three minutes)
	@$(BIN)/python -m tests.browser.screenshots $(ARGS)

.PHONY: promtool
promtool: ## Install promtool for the tests of alerts (skipped if there is one; else apt-get, as root)
	@test -n "$${PROMTOOL:-}" || command -v promtool >/dev/null || { \
	  echo "Installing promtool (once) ..."; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null \
	  || { echo "No promtool, and it cannot be installed here: sudo make promtool, or PROMTOOL=/path/to/one"; exit 1; }; }

CONTAINER_PACKAGES := podman buildah runc netavark aardvark-dns iptables catatonit debootstrap
.PHONY: container-engine
container-engine: ## A container engine for tests/containers (skipped when there is one; else apt-get, as root; without one those tests say so)
	@( for one in podman buildah runc iptables catatonit debootstrap /usr/lib/podman/netavark /usr/lib/podman/aardvark-dns; do \
	  command -v $$one >/dev/null || exit 1; done ) || { \
	  echo "Installing podman and buildah (once) ..."; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(CONTAINER_PACKAGES) >/dev/null; } \
	|| echo "No container engine, and it cannot be installed here: sudo make container-engine"

.PHONY: test
test: setup browser promtool ## All tests but the long proofs; failures are run once more, and reported as FLAKY if they pass
	@$(BIN)/python -m tests.suite.run $(ARGS)

COMPONENTS := tandem engine worker kv router cluster bench
.PHONY: $(COMPONENTS:%=test-%)
$(COMPONENTS:%=test-%): test-%: setup  # the unit tests of one component, without the long ones that take turns
	@# A third process computes while others wait for sockets and processes.
	@OMP_NUM_THREADS=1 TEST_TURN=none $(BIN)/pytest -q -n 3 --dist worksteal -m "$* and not slow and not gpu and not alone" tests/unit $(ARGS)

.PHONY: flaky
flaky: setup ## Run the tests of a folder twenty times next to two busy loops: make flaky ARGS=tests/unit/router
	@$(BIN)/python -m tests.suite.flaky $(ARGS)

.PHONY: check
check: ## What CI runs
	@# Chromium and promtool are installed while Python's packages are and the code is read.
	@log=$$(mktemp); $(MAKE) --no-print-directory browser promtool >$$log 2>&1 & tools=$$!; rest=0; \
	  $(MAKE) --no-print-directory lint || rest=$$?; \
	  wait $$tools || rest=$$?; cat $$log; rm -f $$log; exit $$rest
	@$(MAKE) --no-print-directory test

.PHONY: nightly
nightly: setup browser promtool container-engine ## The full counts of the long proofs, in parts, with logs: make nightly ARGS="router kv"
	@$(BIN)/python -m tests.suite.nightly $(ARGS)

.PHONY: bench
bench: setup ## Every done-when figure of the spine, as tables and JSON
	$(BIN)/tandem bench spine --json bench-spine.json $(ARGS)

.PHONY: chart
chart: setup promtool ## The Helm chart: every value set rendered, linted, checked against Kubernetes 1.31-1.33 and by meaning
	$(BIN)/python -m cluster.chart.schema --check
	$(BIN)/pytest -q tests/chart $(ARGS)

.PHONY: images
images: setup ## The images' files linted, built by their own steps in a folder and run, without an engine (as root; minutes)
	$(BIN)/pytest -q tests/images --timeout 3600 -s $(ARGS)

.PHONY: containers
containers: setup container-engine ## Real containers: images built, compose, the chart's pods, a cluster whose network is cut (as root; half an hour)
	$(BIN)/pytest -q tests/containers --timeout 3600 -s -rs $(ARGS)

# One tag everywhere: the project's version, which the chart and compose name too.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CONTAINER ?= docker
DEVICE ?= cpu
ROUTER_IMAGE := $(REGISTRY:%=%/)tandem-router:$(VERSION)
WORKER_IMAGE := $(REGISTRY:%=%/)tandem-worker$(if $(filter cuda,$(DEVICE)),-cuda):$(VERSION)

.PHONY: image-build
image-build: ## The images tandem-router and tandem-worker (TORCH_INDEX=ADDRESS; DEVICE=cuda; REGISTRY=REGISTRY; BUILD_ARGS=MORE)
	@test -n "$${TORCH_INDEX:-}" || { echo "Set TORCH_INDEX: PyTorch's package index for this device, see docs/operate/images.md"; exit 1; }
	$(CONTAINER) build -f deploy/docker/router.Dockerfile --build-arg VERSION=$(VERSION) $(BUILD_ARGS) -t $(ROUTER_IMAGE) .
	$(CONTAINER) build -f deploy/docker/worker.Dockerfile --target $(DEVICE) --build-arg TORCH_INDEX="$$TORCH_INDEX" \
	  --build-arg EXTRAS="$(EXTRAS)" --build-arg VERSION=$(VERSION) $(BUILD_ARGS) -t $(WORKER_IMAGE) .

.PHONY: image-load
image-load: ## Load them into a local Kubernetes: kind, k3d or minikube (CLUSTER=, CLUSTER_NAME= where kubectl's context does not say)
	CLUSTER="$(CLUSTER)" CLUSTER_NAME="$(CLUSTER_NAME)" deploy/docker/load.sh $(ROUTER_IMAGE) $(WORKER_IMAGE)

.PHONY: image-push
image-push: ## Push them to REGISTRY
	@test -n "$(REGISTRY)" || { echo "Set REGISTRY, such as registry.example.com/team"; exit 1; }
	$(CONTAINER) push $(ROUTER_IMAGE)
	$(CONTAINER) push $(WORKER_IMAGE)

TOOLS := $(VENV)/image-tools
$(TOOLS)/.installed: deploy/docker/locks/tools.txt
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

.PHONY: sbom
sbom: setup $(TOOLS)/.installed ## What is installed in .venv, as a CycloneDX bill of materials: sbom.cdx.json (images bring theirs)
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json $(BIN)/python

.PHONY: locks
locks: ## The images' locks anew, after a change of pyproject.toml or constraints.txt (needs `uv`)
	./deploy/docker/lock.sh $${UV:-uv}

.PHONY: clean
clean: ## Remove what the targets above made
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
