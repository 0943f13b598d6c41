# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_JOBS ?= 2

# What the tests on real hosts need: sshd and tmux on loopback, machines made by systemd-nspawn; and a browser for the report page.
HOST_PACKAGES := openssh-server openssh-client systemd systemd-container libpam-systemd dbus dbus-user-session tmux \
	iproute2 nftables sudo procps util-linux python3-minimal chromium

.PHONY: install demo test test-quick check docs golden host-packages clean

install: $(STAMP)

$(STAMP): setup.cfg setup.py pyproject.toml requirements-dev.lock
	@.ci/make-venv $(VENV)
	@touch $@

# The whole story on this machine: baseline, MTP, benchmark, comparison, report; nothing is left running.
demo: $(STAMP)
	@$(BIN)/mtpdeploy demo

# A file's tests stay in one worker: those on real hosts share the machines.
test: $(STAMP) host-packages
	$(BIN)/pytest -n $(PYTEST_JOBS) --dist loadfile -q

# Without real hosts and without what takes longer than two seconds.
test-quick: $(STAMP)
	$(BIN)/pytest -n $(PYTEST_JOBS) -q -m "not hosts and not slow"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The generated pages of docs/, the table of verbs in README.md, and the tables of the case study.
docs: $(STAMP)
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/case_study.py

# Accept what the golden tests produce now; look at the difference before committing it.
golden: $(STAMP)
	$(BIN)/pytest -q -m "not hosts" --update-golden

host-packages:
	@.ci/host-packages $(HOST_PACKAGES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
