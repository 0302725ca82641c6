## make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (minutes, 5.5 GB)
##
NPROC ?= 2
STAGES := $(sort $(patsubst %/README.md,%,$(wildcard 0?_*/README.md)))
# Folders whose script torchrun starts, and those whose script starts its processes itself.
BY_TORCHRUN := 01_allreduce/slow_network 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed \
	05_bucketed/bucket_sweep 05_bucketed/compare 05_bucketed/predict 06_sharded_optimizer \
	06_sharded_optimizer/fsdp 07_resnet_ddp/compile_ddp 07_resnet_ddp/sweep
BY_ITSELF := 01_allreduce 01_allreduce/shared_memory 08_ddp_rpc

ifeq ($(shell expr "x$(NPROC)" : 'x[1-9][0-9]*$$'),0)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

# PYTHON=python3 uses an interpreter that has torch; without it a .venv is made.
ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
RUNTIME := .venv/.installed
READER := python3
else
override PYTHON := "$(PYTHON)"
READER := $(PYTHON)
RUNTIME := check-python
endif

# One host: a free port, chosen by torchrun. Several hosts: all meet at MASTER_ADDR:MASTER_PORT.
ifdef NNODES
MASTER_PORT ?= 29400
MEETING = --master-addr $(MASTER_ADDR) --master-port $(MASTER_PORT)
HOSTS = --nnodes $(NNODES) --node-rank $(NODE_RANK) $(MEETING)
ifeq ($(and $(NODE_RANK),$(MASTER_ADDR)),)
$(error NNODES=$(NNODES) needs NODE_RANK=0, 1, … and MASTER_ADDR=address of the host with 0 too)
endif
else
HOSTS = --standalone
endif
TORCHRUN = $(PYTHON) -m tools.torchrun $(HOSTS) --nproc-per-node $(NPROC)
ALONE = $(PYTHON) -m tools.alone
QUOTED = '$(subst ','\'',$(1))'
FLAGS = $(if $(BACKEND),--backend $(BACKEND) )$(if $(NETWORK),--network $(call QUOTED,$(NETWORK)) )$(ARGS)
FLAGS_GIVEN = $(if $(MINE),--mine $(call QUOTED,$(MINE)) )$(FLAGS)

.NOTPARALLEL:
.PHONY: help setup test test-full test-torch hosts lint all reference clean check compare \
	timeline read check-python 07_resnet_ddp $(BY_TORCHRUN) $(BY_ITSELF)
help:
	@sed -n 's/^## \{0,1\}//p' Makefile

# make 05 and make 05_bucketed/ are make 05_bucketed.
$(foreach stage,$(STAGES),$(eval $(firstword $(subst _, ,$(stage))) $(stage)/: $(stage)))

##   make 01_allreduce                       all-reduce, measured and opened up
##   make 01_allreduce/slow_network          a backend of your own: any rate and delay
##   make 01_allreduce/shared_memory         all-reduce through memory that the ranks share
##   make 02_naive_ddp                       one all-reduce per parameter, after backward
##   make 03_flat_ddp                        one all-reduce of one flat tensor, after backward
##   make 04_overlap_ddp                     one all-reduce per parameter, during backward
##   make 05_bucketed                        one all-reduce per bucket, during backward
##   make 05_bucketed/bucket_sweep           which bucket size is best, measured and predicted
##   make 05_bucketed/compare                02 to 05 beside each other: make compare
##   make 05_bucketed/predict                what a model of the step predicts, and what is measured
##   make 06_sharded_optimizer               optimizer state split over the ranks (ZeRO stage 1)
##   make 06_sharded_optimizer/fsdp          gradients and parameters split too (ZeRO stage 3)
##   make 07_resnet_ddp                      ResNet-18 on one device against torch DDP on NPROC
##   make 07_resnet_ddp/sweep                iteration time over models and numbers of ranks
##   make 07_resnet_ddp/compile_ddp          DDP and FSDP, eager and compiled
##   make 08_ddp_rpc                         DDP for the dense part, RPC servers for the embeddings
LESSON = $@/$(shell echo $(@F) | sed 's/^[0-9]*_//').py
$(BY_TORCHRUN): $(RUNTIME)
	$(TORCHRUN) $(LESSON) $(FLAGS_GIVEN)
$(BY_ITSELF): $(RUNTIME)
	$(ALONE) $(LESSON) $(if $(filter file,$(origin NPROC)),,--nproc $(NPROC) )$(FLAGS_GIVEN)

# DDP goes first, because it takes fewer flags. Each leaves a result, and compares all that are there.
RESNET_DDP = 07_resnet_ddp/resnet_ddp.py $(FLAGS_GIVEN)
07_resnet_ddp: $(RUNTIME)
	$(TORCHRUN) $(RESNET_DDP)
ifeq ($(filter -h --help,$(ARGS)),)
	@echo
	$(ALONE) $(RESNET_DDP)
endif

##
##   make compare                            02 to 05 in turn: results/compare.png
##   make timeline                           a step of 02 to 05 on one axis: results/timeline.png
COMPARE := 05_bucketed/compare
compare: $(COMPARE)
timeline: $(RUNTIME)
	$(TORCHRUN) $(COMPARE)/timeline.py $(FLAGS_GIVEN)

##   make check MINE=my_ddp.py:MyDDP         your own wrapper, sharded optimizer or FSDP: is it
##                                           right? (KIND=wrapper, function, optimizer or fsdp)
##   make check MINE=tests/adapters.py       all that a course asks for, in its repository
##                                           (LEVEL=course, LAYERS=a_course.model: see its page)
CHOSEN = $(if $(KIND),--kind $(KIND) )$(if $(LEVEL),--level $(LEVEL) )$(if $(LAYERS),--layers $(LAYERS) )
check: $(RUNTIME)
	$(ALONE) tools/check/check.py $(if $(MINE),$(call QUOTED,$(MINE)) )$(CHOSEN)--nproc $(NPROC) $(FLAGS)

##   make read                               02 to 05 side by side in a browser; needs Python alone
read:
	@$(READER) -c '$(NEW_ENOUGH)' || exit 2
	$(READER) -m tools.read

##   make hosts [RATE=1gbit DELAY=0.2ms]     make compare on a network between two hosts, which
##                                           Linux plays here (SCRIPT=… runs another script)
CABLE = $(call QUOTED,$(or $(RATE),1gbit)) $(call QUOTED,$(or $(DELAY),0.2ms))
hosts: SCRIPT ?= $(COMPARE)/compare.py
hosts: $(RUNTIME)
	$(if $(filter file,$(origin NPROC)),,$(error NPROC='$(NPROC)': make hosts starts one rank on each of two hosts))
	exec bash tools/hosts.sh $(PYTHON) $(CABLE) $(SCRIPT) $(FLAGS_GIVEN)

##   make all                                every stage with its defaults
all: $(STAGES)

##   make setup                              make .venv from requirements-dev.txt
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10) and "error: needs Python 3.10")
HAS_TORCH := import sys, importlib.util; sys.exit(importlib.util.find_spec("torch") is None)
check-python:
	@$(PYTHON) -c '$(HAS_TORCH)' || \
	  { echo 'error: PYTHON=$(PYTHON) cannot import torch: pip install -r requirements.txt'; exit 2; }
setup: $(RUNTIME)
.venv/.installed: requirements.txt requirements-dev.txt
	@python3 -c '$(NEW_ENOUGH)' || exit 2
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

##   make test                               the test suite, the fast part
##   make test-full                          all of it: real models, every fault, every wrong flag
##   make test-torch [TORCH="2.9.0 2.15.0"]  make test with each version that the Makefile lists, or
##                                           with these; an environment of 5.5 GB stays for each
# ARGS="-n 0": one by one, as --pdb and -s need it.
test: $(RUNTIME)
	$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not full" $(ARGS)
test-full: $(RUNTIME)
	$(PYTHON) -m pytest $(ARGS)
TORCH := 2.9.0 2.10.0 2.12.1 2.13.0 2.14.1 2.15.0
ENVIRONMENTS = "$${XDG_CACHE_HOME:-$$HOME/.cache}"/ddp-rung-by-rung
# === allows no other build; a constraint of this machine does not count.
test-torch:
	@failed=; for version in $(TORCH); do \
	  folder=$(ENVIRONMENTS)/torch-$$version; echo; echo "torch $$version: $$folder"; \
	  [ -x "$$folder/bin/python" ] || python3 -m venv "$$folder" || exit; \
	  PIP_CONSTRAINT= "$$folder/bin/python" -m pip install --quiet "torch===$$version" \
	    -r requirements-dev.txt && make test PYTHON="$$folder/bin/python" \
	    || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "error: failed with torch$$failed"; exit 1; }

##   make lint                               ruff: rules and format
lint: $(RUNTIME)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

##   make reference [ONLY=05_bucketed]       record every reference_output*.txt and picture again
reference: $(RUNTIME)
	$(PYTHON) -m tools.record $(ONLY)

##   make clean                              remove results/ and caches
clean:
	rm -rf results .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
##
## NPROC: ranks on this host. PYTHON=python3: an interpreter that has torch, instead of .venv.
## MINE=my_ddp.py:MyDDP: a row of 02 to 06 and compare for a class of your own.
## BACKEND=gloo or nccl: what carries the bytes.
## NETWORK=1gbit,1ms: an emulated network of this rate and delay (01_allreduce/slow_network)
## Several hosts, on each:
## make 05_bucketed NPROC=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 [MASTER_PORT=29400]
