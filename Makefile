# make demo   the main job: a server, the sample tasks, 32 concurrent episodes, a table
# make test   style, types, layering and the whole test suite
# make hosts  the isolation, concurrency, attack and build suites on imitations of other nodes; as root, wants debootstrap
# All set up .venv themselves; a second run is fast.
PYTHON ?= python3
# A strict editable install links file by file: a new or renamed module needs a new install.
STAMP := .venv/installed-$(shell (cat pyproject.toml constraints.txt; ls client/*.py server/*.py server/*/*.py isolation/*.py) | cksum | cut -d' ' -f1)

.PHONY: demo test hosts lint clean
demo: $(STAMP)
	.venv/bin/python tests/demo.py

# The isolation tests are file by file in one worker: tests of one file look at the same folders of the host, and at
# every process and descriptor of their worker. The others look only at what is below servers of their own, and wait
# more than they compute: three workers keep two cores busy.
ISOLATION := tests/isolation --numprocesses 2 --dist loadfile
ELSEWHERE := $(addprefix --ignore=tests/,isolation attacks hosts)
test: lint
	.venv/bin/python -m pytest $(ISOLATION)
	.venv/bin/python -m pytest tests/attacks
	.venv/bin/python -m pytest $(ELSEWHERE) --numprocesses 3 --dist worksteal

SPREAD := --numprocesses 2 --dist worksteal
# Other pool nodes, imitated, and other rungs of the ladder.
hosts: $(STAMP)
	.venv/bin/python -m pytest tests/hosts
	TB2_TEST_RUNGS=2,4 .venv/bin/python -m pytest tests/attacks
	set -e; for node in nobody enroot-ext4 enroot-overlay no-userns; do \
	    for suite in "$(ISOLATION)" "tests/concurrency $(SPREAD)" "tests/images/test_build.py $(SPREAD)"; do \
	        .venv/bin/python tests/on_host.py $$node -- .venv/bin/python -m pytest $$suite -p no:cacheprovider; \
	    done; \
	done

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	MYPYPATH=tests .venv/bin/mypy --explicit-package-bases --exclude tests/tasks tests
	.venv/bin/lint-imports

$(STAMP):
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=strict --editable '.[server,dev]'
	rm -f .venv/installed-*
	touch $@

clean:
	rm -rf .venv build *.egg-info
