"""What is read from the text of a test.sh."""

import pytest

from tbench2_env.server.toolchain.pins import Environment, Pins, read

COMMON = r"""
apt-get install -y curl
curl -LsSf https://astral.invalid/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx \
  -p 3.13 \
  -w pytest==8.4.1 \
  -w numpy==2.3.1 \
  pytest --ctrf /logs/verifier/ctrf.json -p no:cacheprovider
"""


def uv(python: str | None, *requirements: str, indexes: tuple[str, ...] = ()) -> Environment:
    return Environment("uv", python, requirements, indexes)


def pip(python: str | None, *requirements: str) -> Environment:
    return Environment("pip", python, requirements)


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("uvx -p 3.13 -w a==1 -w b==2 a --opt -w c==3", uv("3.13", "a==1", "b==2")),
        ("uvx --python=3.12 --with a==1,b tool", uv("3.12", "tool", "a==1", "b")),
        ("uvx -p3.12 tool@1.2", uv("3.12", "tool==1.2")),
        ("uvx --from 'kit[x]==1' tool", uv(None, "kit[x]==1")),
        ("uv tool run -q tool", uv(None, "tool")),
        ("uvx --index https://x.invalid/cpu --index-strategy unsafe-best-match a==1",
         uv(None, "a==1", indexes=("https://x.invalid/cpu",))),
        ("V=2.0; uvx -w a==$V -w b==${V} a", uv(None, "a==2.0", "b==2.0")),
        ("cd /app && uvx -w a==1 a | tee log", uv(None, "a==1")),
        ("if ! DEBUG=1 uvx -w a==1 a; then exit 1; fi", uv(None, "a==1")),
        ("uv venv -p 3.12 .tb\nsource .tb/bin/activate\nuv pip install a==1", uv("3.12", "a==1")),
        ("uv init\nuv add a==1\nuv run a", uv(None, "a==1")),
        ("uv run --with a==1 -p 3.11 python x.py", uv("3.11", "a==1")),
        ("pip install a==1 b --break-system-packages", pip(None, "a==1", "b")),
        ("pip3 install --no-cache-dir -q 'a>=1,<2'", pip(None, "a>=1,<2")),
        ("python3.12 -m pip install a==1", pip("3.12", "a==1")),
        ("python -m pip install a==1  # why", pip(None, "a==1")),
    ],
)  # fmt: skip
def test_commands(line: str, environment: Environment) -> None:
    found = read(line)
    assert (found.environments, found.unclear) == ((environment,), ())


def test_the_common_script() -> None:
    assert read(COMMON) == Pins("0.9.5", True, ("3.13",), (uv("3.13", "pytest==8.4.1", "numpy==2.3.1"),))
    assert not read(COMMON).uses_pip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("true\nuvx -w git+https://x.invalid/y@1 -w a==1 a", "line 2: git+https://x.invalid/y@1: not a requirement"),
        ("uvx -w a==$(cat v) a", "line 1: uvx runs no tool"),
        ("uvx -w $LATER a", "$LATER"),
        ("uvx --brand-new x a", "--brand-new: this option is not known here"),
        ("uvx -p pypy3.10 a", "pypy3.10: not the version of a Python"),
        ("uvx -w", "no value follows"),
        ("pip install -r requirements.txt", "-r: this option names a file"),
        ("pip install .", ".: not a requirement"),
        ("uv sync", "uv sync: what that installs is not in the script"),
        ("pip install 'a", "No closing quotation"),
    ],
)
def test_what_is_not_understood_is_said(line: str, says: str) -> None:
    (sentence,) = read(line).unclear
    assert says in sentence


def test_of_a_command_that_wants_more_than_can_be_had_the_rest_is_read() -> None:
    assert read("uvx -p 3.11 -w ./here -w a==1 a").environments == (uv("3.11", "a==1"),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# uvx -w a==1 a",
        "echo pip install",
        "cat <<'END'\npip install a==1\nEND\n",
        "grep 'it is",
        "ls uv",
        "echo \\",
    ],
)
def test_scripts_that_install_nothing(text: str) -> None:
    assert read(text) == Pins()


def test_an_installer_of_any_version() -> None:
    assert read("curl -L https://astral.invalid/uv/install.sh | sh").uv == ""
