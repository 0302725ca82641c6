## make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (minutes, 5.5 GB)
##
##   make 01_allreduce                       all-reduce, measured and opened up
##   make 01_allreduce/slow_network          is an emulated network as slow as was asked for?
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
##
##   make compare                            02 to 05 in turn: results/compare.png
##   make timeline                           a step of 02 to 05 on one axis: results/timeline.png
##   make hosts [RATE=1gbit DELAY=1ms]       make compare between two hosts that Linux plays here
##   make read                               02 to 05 side by side: results/read.html
##   make check MINE=my_ddp.py:MyDDP         is your own wrapper, optimizer or FSDP right? (see
##                                           tools/check for KIND=, LEVEL= and LAYERS=)
##   make all                                every stage with its defaults
##   make setup, make lint                   .venv from requirements-dev.txt; ruff
##   make test, make test-full               the fast tests; all of them
##   make reference [ONLY=05_bucketed]       record every reference_output*.txt and picture again
##   make clean                              remove caches; results/ too with RESULTS=1
##
## PYTHON=python3         an interpreter that has torch, instead of .venv
## NPROC=4                ranks on this host
## NETWORK=1gbit,1ms      an emulated network of this rate and delay (01_allreduce/slow_network)
## BACKEND=gloo or nccl   what carries the bytes
## MINE=my_ddp.py:MyDDP   a row of 02 to 06 and compare for a class of your own
NPROC ?= 2
STAGES := $(sort $(patsubst %/README.md,%,$(wildcard 0?_*/README.md)))
BY_ITSELF := 01_allreduce 08_ddp_rpc
BY_TORCHRUN := $(filter-out $(BY_ITSELF) 07_resnet_ddp,$(STAGES) \
	$(patsubst %/README.md,%,$(wildcard 0?_*/*/README.md)))
COMPARE := 05_bucketed/compare
READER := python3
ifdef PYTHON
READER := $(PYTHON)
RUNTIME := check-python
else
PYTHON := .venv/bin/python
RUNTIME := .venv/.installed
endif
ifneq ($(shell expr "x$(NPROC)" : 'x[1-9][0-9]*$$' '>' 0),1)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

QUOTED = '$(subst ','\'',$(1))'
OPTION = $(if $($(2)), --$(1) $(call QUOTED,$($(2))))
FLAGS = $(call OPTION,mine,MINE)$(call OPTION,backend,BACKEND)$(call OPTION,network,NETWORK) $(ARGS)
NPROC_GIVEN = $(if $(filter file,$(origin NPROC)),, --nproc $(NPROC))
TORCHRUN = "$(PYTHON)" -m tools.torchrun --standalone --nproc-per-node $(NPROC)
ALONE = env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE "$(PYTHON)"
LESSON = $@/$(shell echo $(@F) | sed 's/^[0-9]*_//').py

.NOTPARALLEL:
.PHONY: help setup test test-full hosts lint all reference clean check compare timeline read \
	check-python 07_resnet_ddp $(BY_TORCHRUN) $(BY_ITSELF)
help:
	@sed -n 's/^## \{0,1\}//p' Makefile
# make 05 and make 05_bucketed/ are make 05_bucketed.
$(foreach stage,$(STAGES),$(eval $(firstword $(subst _, ,$(stage))) $(stage)/: $(stage)))
$(BY_TORCHRUN): $(RUNTIME)
	$(TORCHRUN) $(LESSON)$(FLAGS)
$(BY_ITSELF): $(RUNTIME)
	$(ALONE) $(LESSON)$(NPROC_GIVEN)$(FLAGS)
07_resnet_ddp: $(RUNTIME)
	$(TORCHRUN) $(LESSON)$(FLAGS)
	$(if $(filter -h --help,$(ARGS)),,$(ALONE) $(LESSON)$(FLAGS))
compare: $(COMPARE)
timeline: $(RUNTIME)
	$(TORCHRUN) $(COMPARE)/timeline.py$(FLAGS)
hosts: CABLE = $(call QUOTED,$(or $(RATE),1gbit)) $(call QUOTED,$(DELAY))
hosts: $(RUNTIME)
	exec bash tools/hosts.sh "$(PYTHON)" $(CABLE) $(COMPARE)/compare.py$(FLAGS)
check: MINE_FLAGS = $(call OPTION,kind,KIND)$(call OPTION,level,LEVEL)$(call OPTION,layers,LAYERS)
check: $(RUNTIME)
	$(ALONE) tools/check/check.py $(if $(MINE),$(call QUOTED,$(MINE)))$(MINE_FLAGS) --nproc $(NPROC) $(ARGS)
read:
	"$(READER)" -m tools.read
all: $(STAGES)

setup: $(RUNTIME)
check-python:
	@"$(PYTHON)" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' || \
	  { echo 'error: PYTHON=$(PYTHON) cannot import torch: pip install -r requirements.txt'; exit 2; }
.venv/.installed: requirements.txt requirements-dev.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: needs Python 3.10")'
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
test: $(RUNTIME)
	"$(PYTHON)" -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not full" $(ARGS)
test-full: $(RUNTIME)
	"$(PYTHON)" -m pytest $(ARGS)
lint: $(RUNTIME)
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
reference: $(RUNTIME)
	"$(PYTHON)" -m tools.record $(ONLY)
clean:
	rm -rf $(if $(RESULTS),results) .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
