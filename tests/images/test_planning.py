"""Stages of Dockerfiles and the steps they give over the config of a base image."""

import subprocess
from pathlib import Path

import pytest

from tbench2_env.server.images.dockerfile import parse
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.image import ImageConfig
from tbench2_env.server.images.planning import DEFAULT_ENV, Plan, plan
from tbench2_env.server.images.steps import Copy, Download, Run, Step, Workdir, identity

BASE = ImageConfig({"PATH": "/opt/bin:/bin", "PYTHON_VERSION": "3.13.1"}, "/srv", "www", ("/bin/bash", "-ec"))


def last(text: str, base: ImageConfig = BASE) -> Plan:
    """The plan of the last stage, over those it is built on."""
    whole = parse(text)
    plans: list[Plan] = []
    for index, stage in enumerate(whole.stages):
        plans.append(plan(whole, index, base if stage.base_stage is None else plans[stage.base_stage]))
    return plans[-1]


def only(text: str, base: ImageConfig = BASE) -> Step:
    (step,) = last(text, base).steps
    return step


def run(text: str, base: ImageConfig = BASE) -> Run:
    step = last(text, base).steps[-1]
    assert isinstance(step, Run)
    return step


def test_a_command_has_all_that_the_base_and_the_stage_set() -> None:
    step = run("ARG G=g\nFROM x\nENV A=$PYTHON_VERSION\nARG G B=b\nUSER app:staff\nWORKDIR sub\nRUN make  $A")
    assert step == Run(
        argv=("/bin/bash", "-ec", "make  $A"),
        env={**BASE.env, "A": "3.13.1", "G": "g", "B": "b"},
        workdir="/srv/sub",
        user="app:staff",
        line=7,
    )
    assert step.text == "RUN make  $A"
    bare = run("FROM scratch\nRUN make", ImageConfig())
    assert bare == Run(("/bin/sh", "-c", "make"), dict(DEFAULT_ENV), "/", None, 2)


def test_the_config_is_what_is_set_and_no_more() -> None:
    assert last("FROM scratch\nARG A=1\nRUN x", ImageConfig()).config == ImageConfig()
    left = last('FROM x\nENV A=1 PATH=/a:$PATH\nSHELL ["/bin/zsh", "-c"]\nUSER 7\nWORKDIR /w').config
    env = {"PATH": "/a:/opt/bin:/bin", "PYTHON_VERSION": "3.13.1", "A": "1"}
    assert left == ImageConfig(env, "/w", "7", ("/bin/zsh", "-c"))


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ("ARG A=arg", "arg"),
        ("ARG A=arg\nENV A=env", "env"),
        ("ENV A=env\nARG A", "env"),
        ("ARG A=arg\nENV A=${A}2", "arg2"),
        ("ARG PYTHON_VERSION=2\nARG A=$PYTHON_VERSION", "2"),
        ("ARG A=1 B=$A\nENV A=$B", "1"),
        ("ARG G\nENV A=$G", "global"),
        ("ENV A=$G", ""),
        ("ARG TARGETARCH\nENV A=${TARGETARCH:+known}", "known"),
        ("ARG http_proxy\nENV A=$http_proxy-", "-"),
        ("FROM z AS base\nARG A=inherited\nFROM base", "inherited"),
        ("FROM z AS base\nARG A=1\nENV A=2\nFROM base\nENV B=x", "2"),
    ],
)
def test_variables(lines: str, value: str) -> None:
    assert run(f"ARG G=global\nFROM x\n{lines}\nRUN x").env["A"] == value


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("echo $A '$A'", "1 $A\n"),
        ("echo a && \\\n  # why\n\n  echo b", "a\nb\n"),
        ("cat <<EOF\n$A \\$A 'x'\nEOF", "1 $A 'x'\n"),
        ("cat <<'EOF' | tr 1 2\n$A\n\t1\nEOF", "$A\n\t2\n"),
        ("cat <<-EOF && echo end\n\t\t$A\n\tEOF", "1\nend\n"),
        ("cat <<one - <<two\n1\none\n2\ntwo", "2\n"),
        ("<<EOF\necho $A\nif true; then\n  echo yes\nfi\nEOF", "1\nyes\n"),
        ("<<-'EOF'\n\techo $A\n\tEOF", "1\n"),
        ('<<"E O F"\necho $A\nE O F', "1\n"),
        ("<<EOF cat\n$A\nEOF", "1\n"),
        ('["sh", "-c", "echo $A; echo \\"$0\\"", "zero one"]', "1\nzero one\n"),
        ("[ 1 = 1 ] && echo yes", "yes\n"),
        ("--mount=type=cache,target=/c --network=none echo x", "x\n"),
    ],
)
def test_commands_do_what_docker_would_have_them_do(text: str, output: str) -> None:
    step = run(f"FROM x\nENV A=1\nRUN {text}\n", ImageConfig())
    done = subprocess.run(step.argv, env=dict(step.env), capture_output=True, check=True, timeout=10)
    assert done.stdout.decode() == output
    assert step.text.startswith("RUN ")
    assert len(step.text) >= len(text.replace("\\\n", "").replace("  # why\n\n", ""))


def test_a_script_with_an_interpreter_of_its_own(tmp_path: Path) -> None:
    step = run("FROM x\nRUN <<-EOF\n\t#!/usr/bin/env python3\n\tprint('$A')\n\tEOF")
    assert step.script == ("/dev/pipes/EOF", "#!/usr/bin/env python3\nprint('$A')\n")
    assert step.argv == ("/bin/bash", "-ec", "/dev/pipes/EOF")
    assert run("FROM x\nRUN cat <<EOF\n#!/bin/sh\nEOF").script is None


def test_mounts_and_network() -> None:
    step = run(
        "FROM x\nENV D=/var/cache\nRUN --mount=type=cache,id=a,target=$D/apt,sharing=locked "
        "--mount=target=tmp,type=tmpfs --network=none --security=sandbox make"
    )
    assert (step.scratch, step.network, step.argv[-1]) == (("/var/cache/apt", "/srv/tmp"), "none", "make")
    assert run("FROM x\nRUN --network=default make").network == "default"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ONBUILD RUN make", "ONBUILD remove"),
        ("RUN --mount=type=secret,id=x make", "RUN --mount=type=secret"),
        ("RUN --mount=type=ssh make", "RUN --mount=type=ssh"),
        ("RUN --mount=source=a,target=/b make", "RUN --mount=type=bind COPY"),
        ("RUN --network=host make", "RUN --network=host"),
        ("RUN --security=insecure make", "RUN --security=insecure"),
        ("RUN --device=gpu make", "RUN --device=gpu"),
        ("ADD git@github.com:a/b.git /b", "ADD git clone"),
        ("ADD https://host/a/b.git#v1 /b", "ADD git clone"),
        ("ADD ftp://host/a /b", "ADD http(s)"),
    ],
)
def test_what_no_build_can_do_is_refused(line: str, words: str) -> None:
    with pytest.raises(DockerfileError, match=r"^Dockerfile line 3: ") as caught:
        last(f"FROM x\nRUN true\n{line}")
    assert [word for word in words.split() if word not in str(caught.value)] == []


def test_copies() -> None:
    steps = last("FROM a AS one\nFROM b\nCOPY --from=ONE /x /y\nCOPY --from=img:1 --exclude=*.c --parents x y/").steps
    assert steps == (
        Copy(("/x",), "/y", None, None, "/srv", False, 3, from_stage=0),
        Copy(("x",), "y/", None, None, "/srv", False, 4, from_image="img:1", exclude=("*.c",), parents=True),
    )
    assert isinstance(steps[1], Copy)
    assert steps[1].text == "COPY --from=img:1 --exclude=*.c --parents x y/"
    inline = only("FROM x\nENV A=1\nCOPY --chmod=u+x --chown=$A <<a <<'b' /\n$A\na\n$A\nb")
    assert inline == Copy((), "/", "1", "u+x", "/srv", False, 3, inline=(("a", "1\n"), ("b", "$A\n")))
    assert isinstance(inline, Copy)
    assert inline.text == "COPY --chmod=u+x --chown=1 <<a <<b /\n1\na\n$A\nb"


def test_downloads() -> None:
    digest = f"sha256:{'0' * 64}"
    step = only(f"FROM x\nENV V=1\nADD --checksum={digest} --chown=7 https://host/d/x-$V%20a?q=/y /opt/")
    assert step == Download("https://host/d/x-1%20a?q=/y", "/opt/", digest, "7", None, "/srv", 3)
    assert isinstance(step, Download)
    assert step.name == "x-1 a"
    assert step.copy == Copy(("x-1 a",), "/opt/", "7", None, "/srv", False, 3)
    local, remote = last("FROM x\nADD a.tar http://host /opt").steps
    assert local == Copy(("a.tar",), "/opt/", None, None, "/srv", True, 2)
    assert isinstance(remote, Download)
    assert (remote.name, remote.dest) == ("__unnamed__", "/opt/")
    odd = only("FROM x\nADD --unpack http://host/%2e%2e/a%5B1%5D /opt")
    assert isinstance(odd, Download)
    assert (odd.name, odd.copy.sources, odd.copy.is_add) == ("a[1]", ("a\\[1]",), True)


def test_workdirs_belong_to_the_user() -> None:
    assert only("FROM x\nUSER 5:6\nWORKDIR a") == Workdir("/srv/a", 3, user="5:6")


def test_the_identity_is_of_all_but_the_line() -> None:
    steps = [
        run(f"FROM x\n{lines}")
        for lines in ("RUN a", "\nRUN a", "RUN b", "ENV A=1\nRUN a", "WORKDIR /\nRUN a", "USER 1\nRUN a")
    ]
    first, moved, *others = map(identity, [*steps, only("FROM x\nCOPY a b"), only("FROM x\nADD a b")])
    assert first == moved
    assert len({first, *others}) == 7
