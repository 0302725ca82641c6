## make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (minutes, 5.5 GB)
##
##   make 01_allreduce                       all-reduce, measured and opened up
##   make 01_allreduce/slow_network          is an emulated network as slow as requested?
##   make 02_naive_ddp                       one all-reduce per parameter, after backward
##   make 03_flat_ddp                        one all-reduce of one flat tensor, after backward
##   make 04_overlap_ddp                     one all-reduce per parameter, during backward
##   make 05_bucketed                        one all-reduce per bucket, during backward
##   make 05_bucketed/bucket_sweep           which bucket size is best, measured and predicted
##   make 05_bucketed/compare                02 to 05 beside each other: make compare
##   make 05_bucketed/predict                predict a step, and measure it: make predict
##   make 05_bucketed/send_less              what sending less buys: bfloat16, local SGD, DiLoCo
##   make 06_sharded_optimizer               optimizer state split over the ranks (ZeRO stage 1)
##   make 06_sharded_optimizer/zero2         gradients split too, and as fast as DDP (ZeRO stage 2)
##   make 06_sharded_optimizer/fsdp          gradients and parameters split too (ZeRO stage 3)
##   make 07_resnet_ddp                      ResNet-18 on one device against torch DDP on NPROC
##   make 07_resnet_ddp/sweep                iteration time over models and numbers of ranks
##   make 07_resnet_ddp/compile_ddp          DDP and FSDP, eager and compiled
##   make 08_ddp_rpc                         DDP for the dense part, RPC servers for the embeddings
##
##   make timeline                           a step of 02 to 05: results/*.png
##   make hosts [RATE=1gbit] [DELAY=1ms]     make compare between two hosts that Linux plays here
##   make read                               02 to 05 side by side: results/read.html
##   make step                               open the page that simulates a step, in a browser
##   make check MINE=my_ddp.py:MyDDP         is your own class right? (see tools/check)
##   make all                                every stage with its defaults
##   make setup, make lint                   .venv with what the tests need; ruff
##   make test, make test-full               the fast tests; all of them
##   make reference [ONLY=05_bucketed]       record every reference_output*.txt and picture again
##   make clean                              remove caches; results/ too with RESULTS=1
##
## PYTHON=python3         an interpreter that has torch, instead of .venv
## NPROC=4                ranks on this host: 01 to 08, compare, predict, timeline, check
## NETWORK=1gbit,1ms      an emulated network: 02 to 07, compare, predict, timeline, slow_network
## BACKEND=gloo or nccl   what carries the bytes: 01 to 07, compare, predict, timeline
## MINE=my_ddp.py:MyDDP   a class of your own: compare, hosts, predict, check, 06, and its fsdp
RUNTIME := $(if $(PYTHON),check-python,.venv/.installed)
TESTING := $(if $(PYTHON),check-python,.venv/.installed-dev)
READER := $(or $(PYTHON),python3)
PYTHON ?= .venv/bin/python

# A text as one word of the shell, and --size 'VALUE' of $(call option,size,SIZE), if SIZE has one.
quoted = '$(subst ','\'',$(1))'
option = $(if $($(2)),--$(1) $(call quoted,$($(2))))
NPROC_FLAG = $(call option,nproc,NPROC)
MINE_FLAG = $(call option,mine,MINE)
FLAGS = $(call option,backend,BACKEND) $(ARGS)
RANKS = $(or $(NPROC),2)
TORCHRUN = "$(PYTHON)" -m tools.torchrun --standalone --nproc-per-node $(RANKS)
SLOW = 01_allreduce/slow_network/slow_network.py $(call quoted,$(NETWORK))
ON_RANKS = $(TORCHRUN)$(if $(NETWORK), $(SLOW))
NO_RANK = env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE "$(PYTHON)"
unexport OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY  # with them importing torch leaves one core

# $(call only,NAME,GOALS) refuses a variable for all other goals, because they do not use it.
GOALS := $(patsubst %/,%,$(MAKECMDGOALS))
only = $(if $(and $($(1)),$(filter-out $(2),$(GOALS))),$(error $(1)='$($(1))' does nothing in \
	make $(filter-out $(2),$(GOALS)): see make help))
$(call only,NPROC,0% compare predict timeline check all)
$(call only,NETWORK,01_allreduce/% 02% 03% 04% 05% 06% 07% compare predict timeline)
$(call only,BACKEND,01 01_allreduce 02% 03% 04% 05% 06% 07% compare predict timeline)
$(call only,MINE,06 06_sharded_optimizer %/fsdp %compare %predict hosts check)
$(call only,RATE,hosts)
$(call only,DELAY,hosts)
ifeq ($(shell test $(call quoted,$(RANKS)) -ge 1 2> /dev/null && echo yes),)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

# Folders are there and are run all the same, also with the slash that Tab puts at their end.
FOLDERS := $(wildcard 0?_* 0?_*/*)
.NOTPARALLEL:
.PHONY: $(FOLDERS) $(FOLDERS:%=%/) help compare predict timeline hosts read step check all setup \
	check-python test test-full lint reference clean

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

01 01_allreduce 01_allreduce/: $(RUNTIME)
	$(NO_RANK) 01_allreduce/allreduce.py $(NPROC_FLAG) $(FLAGS)
01_allreduce/slow_network 01_allreduce/slow_network/ timeline: NETWORK ?= 1gbit,1ms
01_allreduce/slow_network 01_allreduce/slow_network/: $(RUNTIME)
	$(TORCHRUN) $(SLOW) $(ARGS)
02 02_naive_ddp 02_naive_ddp/: $(RUNTIME)
	$(ON_RANKS) 02_naive_ddp/naive_ddp.py $(FLAGS)
03 03_flat_ddp 03_flat_ddp/: $(RUNTIME)
	$(ON_RANKS) 03_flat_ddp/flat_ddp.py $(FLAGS)
04 04_overlap_ddp 04_overlap_ddp/: $(RUNTIME)
	$(ON_RANKS) 04_overlap_ddp/overlap_ddp.py $(FLAGS)
05 05_bucketed 05_bucketed/: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/bucketed.py $(FLAGS)
05_bucketed/bucket_sweep 05_bucketed/bucket_sweep/: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/bucket_sweep/bucket_sweep.py $(FLAGS)
compare 05_bucketed/compare 05_bucketed/compare/: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/compare/compare.py $(MINE_FLAG) $(FLAGS)
predict 05_bucketed/predict 05_bucketed/predict/: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/predict/predict.py $(MINE_FLAG) $(FLAGS)
05_bucketed/send_less 05_bucketed/send_less/: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/send_less/send_less.py $(FLAGS)
06 06_sharded_optimizer 06_sharded_optimizer/: $(RUNTIME)
	$(ON_RANKS) 06_sharded_optimizer/sharded_optimizer.py $(MINE_FLAG) $(FLAGS)
06_sharded_optimizer/zero2 06_sharded_optimizer/zero2/: $(RUNTIME)
	$(ON_RANKS) 06_sharded_optimizer/zero2/zero2.py $(FLAGS)
06_sharded_optimizer/fsdp 06_sharded_optimizer/fsdp/: $(RUNTIME)
	$(ON_RANKS) 06_sharded_optimizer/fsdp/fsdp.py $(MINE_FLAG) $(FLAGS)
07 07_resnet_ddp 07_resnet_ddp/: $(RUNTIME)
	$(if $(filter -h --help,$(ARGS)),,$(NO_RANK) 07_resnet_ddp/resnet_ddp.py $(FLAGS))
	$(ON_RANKS) 07_resnet_ddp/resnet_ddp.py $(FLAGS)
07_resnet_ddp/sweep 07_resnet_ddp/sweep/: $(RUNTIME)
	$(ON_RANKS) 07_resnet_ddp/sweep/sweep.py $(FLAGS)
07_resnet_ddp/compile_ddp 07_resnet_ddp/compile_ddp/: $(RUNTIME)
	$(ON_RANKS) 07_resnet_ddp/compile_ddp/compile_ddp.py $(FLAGS)
08 08_ddp_rpc 08_ddp_rpc/: $(RUNTIME)
	$(NO_RANK) 08_ddp_rpc/ddp_rpc.py $(NPROC_FLAG) $(ARGS)
all: 01_allreduce 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed 06_sharded_optimizer \
	07_resnet_ddp 08_ddp_rpc

timeline: $(RUNTIME)
	$(ON_RANKS) 05_bucketed/compare/timeline.py $(FLAGS)
hosts: RATE ?= 1gbit
hosts: $(RUNTIME)
	exec bash tools/hosts.sh "$(PYTHON)" $(call quoted,$(RATE)) $(call quoted,$(DELAY)) \
	  05_bucketed/compare/compare.py --label TCP --plot results/hosts.png \
	  --json results/hosts.json $(MINE_FLAG) $(ARGS)
CHECKED = $(if $(MINE),$(call quoted,$(MINE))) $(call option,kind,KIND) \
	$(call option,level,LEVEL) $(call option,layers,LAYERS)
check: $(RUNTIME)
	$(NO_RANK) tools/check/check.py $(CHECKED) $(NPROC_FLAG) $(ARGS)
read:
	"$(READER)" -m tools.read
STEP = $(lastword $(wildcard 05_bucketed/predict/step.html results/step.html))
step:
	"$(READER)" -m webbrowser "file://$(CURDIR)/$(STEP)"

setup: $(TESTING)
check-python:
	@"$(PYTHON)" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' || \
	  { echo 'error: no torch in PYTHON=$(PYTHON): pip install -r requirements.txt'; exit 2; }
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3,10) and "error: needs Python 3.10")'
	python3 -m venv .venv
	$(PIP) -r $< && touch $@
.venv/.installed-dev: requirements-dev.txt .venv/.installed
	$(PIP) -r $< && touch $@

PYTEST = "$(PYTHON)" -m pytest -n auto --maxprocesses 4 --dist worksteal
test: $(TESTING)
	$(PYTEST) -m "not full" $(ARGS)
test-full: $(TESTING)
	$(PYTEST) $(ARGS)
lint: $(TESTING)
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
reference: $(RUNTIME)
	"$(PYTHON)" -m tools.record $(ONLY)
clean:
	rm -rf $(if $(RESULTS),results) .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
