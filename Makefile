# make demo   the main job: a server, the sample tasks, 32 concurrent episodes, a table
# make test   style, types, layering and the whole test suite
# make bench  what operations cost, beside bash, bwrap, unshare and upstream; takes minutes on an otherwise idle machine
# make bench-smoke  the same in a minute, with fewer rounds; BENCH='--json FILE --plot FILE --label TEXT' for both
# make load   128 clients at once; LOAD=--short or --neighbour
# make hosts  the ratios of speed that must hold; the isolation, concurrency, attack and build suites on imitations of
#             other nodes; as root, wants debootstrap
# All set up .venv themselves; a second run is fast.
PYTHON ?= python3
# A strict editable install links file by file: a new or renamed module needs a new install.
STAMP := .venv/installed-$(shell (cat pyproject.toml constraints.txt; ls client/*.py server/*.py server/*/*.py isolation/*.py) | cksum | cut -d' ' -f1)

.PHONY: demo test bench bench-smoke load hosts lint clean
demo: $(STAMP)
	.venv/bin/python tests/demo.py

# The isolation tests are file by file in one worker: tests of one file look at the same folders of the host, and at
# every process and descriptor of their worker. All attacks are one file, as they go on at the same time. The others look
# only at what is below servers of their own, and wait more than they compute: three workers keep two cores busy.
BY_FILE := --numprocesses 2 --dist loadfile
ISOLATION := tests/isolation $(BY_FILE)
ELSEWHERE := $(addprefix --ignore=tests/,isolation attacks hosts bench)
test: lint
	.venv/bin/python -m pytest tests/isolation tests/attacks $(BY_FILE)
	.venv/bin/python -m pytest $(ELSEWHERE) --numprocesses 3 --dist worksteal

SPREAD := --numprocesses 2 --dist worksteal
# Other pool nodes, imitated, and other rungs of the ladder.
hosts: $(STAMP)
	.venv/bin/python -m pytest tests/bench
	.venv/bin/python -m pytest tests/hosts
	TB2_TEST_RUNGS=2,4 .venv/bin/python -m pytest tests/attacks
	set -e; for node in nobody enroot-ext4 enroot-overlay no-userns; do \
	    for suite in "$(ISOLATION)" "tests/concurrency $(SPREAD)" "tests/images/test_build.py $(SPREAD)"; do \
	        .venv/bin/python tests/on_host.py $$node -- .venv/bin/python -m pytest $$suite -p no:cacheprovider; \
	    done; \
	done

BENCH_STAMP := $(STAMP)-bench
RUN_BENCH := PYTHONPATH=tests .venv/bin/python -m bench run
bench: $(BENCH_STAMP)
	$(RUN_BENCH) $(BENCH)
bench-smoke: $(BENCH_STAMP)
	$(RUN_BENCH) --smoke $(BENCH)
load: $(STAMP)
	PYTHONPATH=tests .venv/bin/python tests/bench/load.py $(LOAD)

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	MYPYPATH=tests .venv/bin/mypy --explicit-package-bases --exclude tests/tasks tests
	.venv/bin/lint-imports

INSTALL := .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=strict --editable
$(STAMP):
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[server,dev]'
	rm -f .venv/installed-*
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(INSTALL) '.[server,dev,bench]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
