# DDP, rung by rung. `make` prints what there is; every target sets up what it needs.

NPROC ?= 2
ARGS ?=
N ?= 20
STAGES := 01_allreduce 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed 06_sharded_optimizer 07_resnet_ddp 08_ddp_rpc
LADDER := 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed

ifeq ($(shell expr "x$(NPROC)" : 'x[1-9][0-9]*$$'),0)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

# PYTHON=python3 uses an interpreter that has torch already; without it a .venv is made from requirements.txt.
ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
RUNTIME := .venv/.installed
DEVELOPMENT := .venv/.installed-dev
endif

# One host: a free port, chosen by torchrun. Several hosts: all meet at MASTER_ADDR:MASTER_PORT.
ifdef NNODES
MASTER_PORT ?= 29400
HOSTS = --nnodes $(NNODES) --node-rank $(NODE_RANK) --master-addr $(MASTER_ADDR) --master-port $(MASTER_PORT)
ifeq ($(and $(NODE_RANK),$(MASTER_ADDR)),)
$(error NNODES=$(NNODES) needs NODE_RANK=0, 1, … and MASTER_ADDR=address of the host with NODE_RANK=0 too)
endif
else
HOSTS = --standalone
endif
CORES := $(shell getconf _NPROCESSORS_ONLN)
TORCHRUN = OMP_NUM_THREADS=$$(( $(CORES) > $(NPROC) ? $(CORES) / $(NPROC) : 1 )) \
	$(PYTHON) -m torch.distributed.run $(HOSTS) --nproc-per-node $(NPROC)

.PHONY: help setup test lint all reference clean compare timeline 05_bucketed/bucket_sweep $(STAGES)

help:
	@echo 'make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (some minutes, 5.5 GB)'
	@echo
	@echo '  make 02_naive_ddp          one all-reduce per parameter, after backward'
	@echo '  make 03_flat_ddp           one all-reduce of one flat tensor, after backward'
	@echo '  make 04_overlap_ddp        one all-reduce per parameter, during backward'
	@echo '  make 05_bucketed           one all-reduce per bucket, during backward'
	@echo
	@echo '  make 05_bucketed/bucket_sweep      which bucket size is best, measured and predicted'
	@echo '  make compare               02 to 05 with the same settings: one table, results/compare.png'
	@echo '  make timeline              a step of 02 to 05 on one time axis: results/timeline.png'
	@echo '  make all                   every stage with its defaults'
	@echo '  make setup                 make .venv from requirements.txt'
	@echo '  make test                  the test suite          make lint    ruff'
	@echo '  make reference             record every reference_output.txt again'
	@echo '  make clean                 remove results/ and caches'
	@echo
	@echo 'NPROC: ranks on this host; PYTHON=python3: an interpreter that has torch, instead of .venv; several hosts:'
	@echo 'make 05_bucketed NPROC=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 [MASTER_PORT=29400]   (on each host)'

setup: $(RUNTIME)

.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'error: python3 must be 3.10 or newer'; exit 2; }
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

02_naive_ddp: SCRIPT = 02_naive_ddp/naive_ddp.py
03_flat_ddp: SCRIPT = 03_flat_ddp/flat_ddp.py
04_overlap_ddp: SCRIPT = 04_overlap_ddp/overlap_ddp.py
05_bucketed: SCRIPT = 05_bucketed/bucketed.py
$(LADDER): $(RUNTIME)
	@$(TORCHRUN) $(SCRIPT) $(ARGS)

05_bucketed/bucket_sweep: $(RUNTIME) | results
	@$(TORCHRUN) 05_bucketed/bucket_sweep.py --plot results/bucket_sweep.png --json results/bucket_sweep.json $(ARGS)

# The ladder with the same settings, one table, one picture.
compare: $(RUNTIME) | results
	@for script in 02_naive_ddp/naive_ddp 03_flat_ddp/flat_ddp 04_overlap_ddp/overlap_ddp 05_bucketed/bucketed; do \
	  echo "$$script.py"; \
	  $(TORCHRUN) $$script.py --no-verify --json results/compare_$${script%%_*}.json $(ARGS) > results/compare.log || exit 1; \
	done
	@$(PYTHON) -m common.compare results/compare_0[2-5].json --plot results/compare.png

# One step of 02 to 05 on one time axis, from traces of real runs.
timeline: $(RUNTIME) | results
	@for script in 02_naive_ddp/naive_ddp 03_flat_ddp/flat_ddp 04_overlap_ddp/overlap_ddp 05_bucketed/bucketed; do \
	  $(TORCHRUN) $$script.py --no-verify --no-baseline --steps 1 --trace results/$${script%%/*}.json $(ARGS) \
	    > results/timeline.log || exit 1; \
	done
	@$(PYTHON) -m common.timeline --plot results/timeline.png results/0[2-5]_*_ddp.json results/05_bucketed.json

all: $(LADDER)

test: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m pytest $(ARGS)

lint: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m ruff check .

reference: $(LADDER:%=%/reference_output.txt)

%/reference_output.txt: FORCE | results
	$(MAKE) --no-print-directory $* > results/$*.txt
	mv results/$*.txt $@
FORCE:

results:
	mkdir -p results

clean:
	rm -rf results .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
