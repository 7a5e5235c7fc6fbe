# Everything runs in .venv, made by the first call. It takes make and Python 3.11 or newer, and nothing else.
.DEFAULT_GOAL := help
.PHONY: app browser here gallery notebooks docs help env demo test dist versions audit lint warm lab soak kill accuracy bench bench-peers bench-check calibrate lookups calibrations surcharges scale scale-traces datasets outputs tables picture constraints

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
WORKERS ?= 2
DEVICE ?= cpu
SAMPLES ?= datasets/calibration-samples/$(DEVICE)
CALIBRATIONS ?= datasets/calibrations
CHROMIUM := DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium

# Empty, so that Python keeps what it compiles: otherwise each notebook kernel compiles its imports again.
export PYTHONDONTWRITEBYTECODE :=

# uv reads none of pip's settings; hand it those of the environment. A folder of wheels may hold a CPU build of torch.
comma := ,
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(subst $() ,$(comma),$(strip $(PIP_FIND_LINKS)))
endif
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: .venv/.installed ## the environment, in .venv

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lumos_nb needs Python 3.11 or newer; try make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt \
		--editable '.[cluster,notebook,pandas,torch]' --group dev --group docs
	@touch $@

demo: env ## the main job on a bundled run, printed
	@$(BIN)/lumos-nb demo

test: env lint warm browser ## all checks: linters, types, tests, notebooks
	$(if $(wildcard ../shared/traces),LUMOS_NB_REQUIRE_SHARED=1) $(BIN)/python -m pytest \
		-n $(WORKERS) --dist loadscope --nbval-lax --nbval-current-env tests $(NOTEBOOKS)

lint: env ## ruff, mypy, the order of imports, notebooks without outputs
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/nbstripout --keep-count --verify $(NOTEBOOKS) $(wildcard notebooks/app/*.ipynb)

warm: env # compile the kernels once, before test workers would each do it
	@$(BIN)/python -m lumos_nb._jit

browser: # the browser of tests/test_browser.py, where it is missing and apt may be used
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { $(CHROMIUM) || { apt-get update -qq && $(CHROMIUM); }; } \
	} >/dev/null || echo "no Chromium, and apt installs none here: the tests of panels in a browser will be skipped"

lab: env ## JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

app: env ## panels of what-ifs as a page of their own, by Voila; of your own run with RUN=folder
	JUPYTER_PATH=notebooks/app RUN=$(abspath $(RUN)) $(BIN)/voila --template=offline notebooks/app/what_if.ipynb

dist: env ## the wheel and the source archive, each installed into a fresh environment: runs, type checks
	$(BIN)/python -m pytest -q tests/installed.py

# One module or more for each package that lumos_nb builds on.
VERSIONED := kineto run graph graph_files critical_path engine plan fitting embeddings sharding estimates \
	chakra_messages chakra_conversion recorder dry_run executors charts widgets cli report table_rows public_names
RESOLUTIONS := build/versions/lowest-direct build/versions/highest

versions: $(RESOLUTIONS) ## tests with the oldest and with the newest versions that pyproject.toml takes; torch stays

.PHONY: $(RESOLUTIONS)
$(RESOLUTIONS): env
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $@
	$(BIN)/uv pip install --quiet --python $@/bin/python $(shell grep ^torch== constraints.txt)
	$(BIN)/uv pip install --quiet --python $@/bin/python --resolution $(@F) \
		--editable '.[cluster,notebook,pandas]' --group dev
	NUMBA_CACHE_DIR=$(abspath $@)/numba PYTHONPYCACHEPREFIX=$(abspath $@)/compiled \
		$@/bin/python -m pytest -x -q -n 1 -p no:cacheprovider $(VERSIONED:%=tests/test_%.py)

audit: env ## known weaknesses of the versions in constraints.txt, asked of PyPI
	$(BIN)/uv tool run pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

soak: env warm ## 100,000 damaged files before every reader, an hour or two: docs/robustness.md
	$(BIN)/python -m tests.soak --record
	$(BIN)/python -m benchmarks.rows

kill: env warm ## programs killed 220 times while they parse, calibrate, search, cut into jobs and export: docs/robustness.md
	$(BIN)/python -m tests.kill_soak
	$(BIN)/python -m benchmarks.rows

here: env ## what this machine does, in 10 minutes, for predictions of steps that are then measured on it
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.here

build/this-machine/gpt-single:
	$(MAKE) here

accuracy: env build/this-machine/gpt-single ## predicted against measured, of what ../shared has too: benchmarks/accuracy.json and its tables
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.benchmark_programs
	$(BIN)/python -m benchmarks.rows

bench: env ## speed, on the largest run at hand: benchmarks/results.json and its tables
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.benchmark_programs --speed
	$(BIN)/python -m benchmarks.rows

scale: env ## jobs of 1 to 512 ranks, replayed on this machine, in 12 minutes; takes 8 GB of disk and 16 GiB of memory
	$(BIN)/python -m benchmarks.bench_scale
	$(BIN)/python -m benchmarks.rows

scale-traces: env ## traces of 8 and 64 ranks read rank by rank, and all in one memory, in 6 minutes; RANKS="8 64 512" for more
	$(BIN)/python -m benchmarks.bench_rankwise $(if $(RANKS),--ranks $(RANKS))
	$(BIN)/python -m benchmarks.rows

bench-peers: build/peers-venv/.installed ## speed beside other programs, in 8 minutes: benchmarks/README.md
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.rows

# It sees what .venv has, torch above all; so peers come without what they depend on, bar what .venv lacks.
build/peers-venv/.installed: .venv/.installed Makefile
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/peers-venv
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(build/peers-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	@for peer in \
		"traceinsight==0.6.1 orjson==3.13.0 plotly==7.1.0 narwhals==2.29.0 pydot==4.0.1 kaleido==1.5.0" \
		"llm-analysis==0.2.2 fire==0.7.1 termcolor==3.3.0" \
		"torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 pyre-extensions==0.0.32 typing-inspect==0.9.0 iopath==0.1.10 \
			tensordict==0.15.3 pyvers==0.2.3 torchmetrics==1.0.3"; \
	do $(BIN)/uv pip install --quiet --no-deps --python build/peers-venv/bin/python $$peer || echo "left out: $$peer"; done
	@touch $@

bench-check: env ## ratios of speed against the recorded ones, in 3 minutes: fails where one has grown
	$(BIN)/python -m benchmarks.bench_check

lookups: env ## samples of lookups in embedding tables alone, in 3 minutes; of a GPU with DEVICE=cuda
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.machine.record --device $(DEVICE) --out $(SAMPLES) \
		--only lookups --budget 300

calibrate: env ## samples of this machine, in 9 minutes, and a calibration of it; of its GPU with DEVICE=cuda
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.machine.record --device $(DEVICE) --out $(SAMPLES) \
		--calibration $(CALIBRATIONS) --budget 300

calibrations: env ## fit the bundled calibrations again, in two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m datasets.make_calibrations

surcharges: env ## fit what a step costs beyond its kernels again, on ../shared/measured, in ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fit_surcharges

outputs: env ## the outputs that 01 and 05 keep, which make test compares
	$(BIN)/python -m benchmarks.notebook_outputs notebooks/01_*.ipynb notebooks/05_*.ipynb

tables: env ## the tables of README.md and docs, from the JSON files
	$(BIN)/python -m benchmarks.rows

gallery: env ## every chart in light and dark: build/gallery
	$(BIN)/python -m benchmarks.gallery

notebooks: env $(NOTEBOOKS:%.ipynb=build/%.html) ## every notebook executed and rendered: build/notebooks

build/notebooks/%.html: notebooks/%.ipynb | env
	$(BIN)/python -m benchmarks.site $<

docs: notebooks gallery ## the documentation site, with notebooks, gallery and reference: build/site
	$(BIN)/python -m benchmarks.site

picture: env ## docs/picture.png, which README.md shows
	$(BIN)/python -m benchmarks.picture

datasets: env ## record the bundled runs again, on this machine
	$(BIN)/python datasets/make_datasets.py

constraints: env ## pin what is installed now
	$(BIN)/uv pip freeze --quiet --python $(BIN)/python --exclude-editable \
		| sed -E 's/\+cpu$$//; /^(cuda-|nvidia-|pip=|triton)/d' > constraints.txt
	@touch .venv/.installed
