"""Dockerfile texts and the plans they give."""

import pickle
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbench2_env.server.images.dockerfile import parse
from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.emulation import BuildPlan, emulate, load
from tbench2_env.server.images.image import ImageConfig
from tbench2_env.server.images.planning import DEFAULT_ENV, Plan
from tbench2_env.server.images.planning import plan as plan_stage
from tbench2_env.server.images.steps import Copy, Workdir, identity


def planned(text: str) -> BuildPlan:
    return emulate(parse(text))


def plan(text: str) -> BuildPlan:
    return planned(textwrap.dedent(text).lstrip("\n"))


def only_copy(text: str) -> Copy:
    (step,) = [step for step in plan(text).steps if isinstance(step, Copy)]
    return step


def test_a_task_like_most() -> None:
    assert plan("""
        FROM python:3.13-slim-bookworm
        # tools
        RUN apt-get update && apt-get install -y \\
            # needed by the tests
            curl

        WORKDIR /app
        ENV GREETING=hello
        COPY data.txt /app/data.txt
        EXPOSE 8080
        CMD ["bash"]
    """) == BuildPlan(
        workdir="/app",
        env={"GREETING": "hello"},
        steps=(
            Workdir("/app", 7),
            Copy(("data.txt",), "/app/data.txt", None, None, "/app", False, 9),
        ),
        unmet=(
            "base image python:3.13-slim-bookworm: the node's own root stands in for it",
            "RUN apt-get update && apt-get install -y curl (line 3)",
        ),
        user=None,
    )


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("", None),
        ("# nothing\n", None),
        ("WORKDIR /app", "/app"),
        ("workdir /app", "/app"),
        ("WORKDIR /a\nWORKDIR b\nWORKDIR ../c", "/a/c"),
        ("WORKDIR a", "/a"),
        ("WORKDIR //a/./b/", "/a/b"),
        ("WORKDIR /../..", "/"),
        ("WORKDIR '/with blanks'", "/with blanks"),
        ("WORKDIR /with blanks", "/with blanks"),
        ("ARG D=/d\nFROM x\nARG D\nWORKDIR $D", "/d"),
        ("ARG D=/d\nFROM x\nWORKDIR $D/e", "/e"),
        ("FROM x\nARG D=/d\nENV D=/e\nWORKDIR ${D}", "/e"),
        ("FROM x\nWORKDIR /early\nFROM y", None),
        ("FROM x AS One\nWORKDIR /early\nFROM one\nWORKDIR late", "/early/late"),
        ("WORKDIR /app\\\n  /sub", "/app  /sub"),
        ("\ufeffWORKDIR /app\r\n", "/app"),
    ],
)
def test_workdir(text: str, workdir: str | None) -> None:
    assert planned(text).workdir == workdir


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("A=b", {"A": "b"}),
        ("A=b C=\"d e\" F='g $A'", {"A": "b", "C": "d e", "F": "g $A"}),
        ("A=b\\ c", {"A": "b c"}),
        ('A="say \\"hi\\" \\n"', {"A": 'say "hi" \\n'}),
        ("A=", {"A": ""}),
        ("A b  c", {"A": "b  c"}),
        ("A\t'b' \"c\"", {"A": "b c"}),
        ("A=b \\\n\n  # why\n  C=d \\\n", {"A": "b", "C": "d"}),
        ("PATH=/opt/bin:$PATH", {"PATH": f"/opt/bin:{DEFAULT_ENV['PATH']}"}),
        ("A=$NOTHING-${NOTHING}", {"A": "-"}),
        ("A=${NOTHING:-a} B=${NOTHING-b}", {"A": "a", "B": "b"}),
        ("A=${PATH:+yes} B=${NOTHING:+no}", {"A": "yes", "B": ""}),
        ("A=${X:-${Y:-${Z:-deep}}}", {"A": "deep"}),
        ("A=\"${X:-'a b'}\"", {"A": "a b"}),
        ("A=\\$PATH B='$PATH' C=a$", {"A": "$PATH", "B": "$PATH", "C": "a$"}),
        ("A=1\nENV A=2 B=$A", {"A": "2", "B": "1"}),
    ],
)
def test_env(line: str, env: dict[str, str]) -> None:
    assert planned(f"FROM x\nENV {line}").env == env


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY a b /c/", {"sources": ("a", "b"), "dest": "/c/"}),
        ("COPY a .", {"dest": ".", "workdir": "/w"}),
        ('COPY ["a b", "c"]', {"sources": ("a b",), "dest": "c"}),
        ("COPY [ab].txt c", {"sources": ("[ab].txt",)}),
        ("COPY --chown=1:2 --chmod=0755 --link a b", {"chown": "1:2", "chmod": "0755", "sources": ("a",)}),
        ('COPY --chown="$WHO" a b', {"chown": "me"}),
        ("ADD a.tar /", {"is_add": True}),
        ("ADD --unpack=false a.tar /", {"is_add": False}),
        ("COPY $SRC/* ${DST:-/d}/", {"sources": ("src/*",), "dest": "/d/"}),
        ("copy a c", {"sources": ("a",)}),
    ],
)
def test_copy(line: str, expected: dict[str, object]) -> None:
    copy = only_copy(f"FROM x\nENV WHO=me SRC=src\nWORKDIR /w\n{line}")
    assert {name: getattr(copy, name) for name in expected} == expected


def test_heredocs() -> None:
    copy = only_copy("""
        FROM x
        ENV A=b
        COPY <<one.txt <<-"two.txt" plain.txt /etc/
        $A \\$A "$A" 'it' ${B:-"c"}
        # no comment \\
        one.txt
        \tRUN $A
        \ttwo.txt
        RUN <<EOF cat
        COPY nothing
        EOF
    """)
    assert copy.sources == ("plain.txt",)
    assert copy.inline == (
        ("one.txt", 'b $A "b" \'it\' "c"\n# no comment \n'),
        ("two.txt", "RUN $A\n"),
    )


def test_a_here_string_or_a_shift_is_no_heredoc() -> None:
    text = "RUN cat <<<word\nRUN x=$((1<<3)) '<<EOF'\nWORKDIR /app"
    assert planned(text).workdir == "/app"


@pytest.mark.parametrize(
    ("line", "unmet"),
    [
        ("RUN make  all", "RUN make all (line 2)"),
        ("RUN " + "x" * 300, "RUN " + "x" * 195 + "… (line 2)"),
        ("COPY --from=build /x /y", "COPY --from=build /x /y (line 2): not available without a build"),
        ("ADD https://host/x.tar.gz /opt", "ADD https://host/x.tar.gz /opt (line 2): nothing is downloaded"),
        (
            "ADD git@github.com:a/b.git /b",
            "ADD git@github.com:a/b.git /b (line 2): "
            "only files are downloaded, by http(s): clone a repository with RUN git clone",
        ),
        ("COPY --from=img $A/b --link /c", "COPY --from=img /b --link /c (line 2): not available without a build"),
        (
            "RUN --mount=type=secret,id=x <<EOF\nmake\nEOF",
            "RUN --mount=type=secret,id=x <<EOF (line 2): "
            "--mount=type=secret is not supported: COPY what it needs, or remove it",
        ),
        ("HEALTHCHECK CMD true", "HEALTHCHECK CMD true (line 2)"),
        (
            "ONBUILD COPY <<EOF /x\nRUN\nEOF",
            "ONBUILD COPY <<EOF /x (line 2): nothing is built on this image: remove it",
        ),
        ("USER git", "USER git: commands run as root"),
    ],
)
def test_unmet(line: str, unmet: str) -> None:
    assert planned(f"FROM x\n{line}").unmet[1:] == (unmet,)


@pytest.mark.parametrize(
    "line", ["USER root", "USER 0:0", "USER a\nUSER root", "VOLUME /x", 'SHELL ["sh"]', "LABEL a=b"]
)
def test_met(line: str) -> None:
    assert len(planned(f"FROM x\n{line}").unmet) == 1


def test_stages() -> None:
    built = plan("""
        ARG TAG=3.13
        FROM golang AS build
        RUN go build
        COPY a /a
        FROM python:${TAG} AS base
        ENV A=1
        ARG B=2
        WORKDIR /app
        USER app
        RUN pip install x
        FROM base
        ENV C=$A$B
        COPY --from=build /a /b
    """)
    assert built == BuildPlan(
        workdir="/app",
        env={"A": "1", "C": "12"},
        steps=(Workdir("/app", 8),),
        unmet=(
            "base image python:3.13: the node's own root stands in for it",
            "RUN pip install x (line 10)",
            "COPY --from=build /a /b (line 13): not available without a build",
            "USER app: commands run as root",
        ),
        user="app",
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM x\nCOPY a", 2, "COPY needs a source and a destination"),
        ("FROM x\n\nCOPY --frmo=b a b", 3, "COPY unknown flag --frmo --from"),
        ("COPY --chown a b", 1, "--chown has no value"),
        ("COPY --chmod=888 a b", 1, "octal 7777"),
        ("COPY --chmod=77777 a b", 1, "octal 7777"),
        ("COPY https://x/y /z", 1, "use ADD"),
        ('COPY ["a", 1]', 1, "strings"),
        ('COPY ["\\u0000", "b"]', 1, "strings"),
        ('COPY "a b" /c', 1, "quote never closed"),
        ("COPY <<EOF /x\nbody", 1, "COPY heredoc only 'EOF'"),
        ("COPY <<.. /x/\n..", 1, "rename"),
        ("WORKDIR 'a", 1, "WORKDIR quote never closed"),
        ("ENV A", 1, "ENV 'A' name=value"),
        ("ENV A=b C", 1, "ENV 'C' name=value"),
        ("ENV A=${B", 1, "bad substitution"),
        ("ENV A=${B/c/d}", 1, "bad substitution ${name:-default}"),
        ("ENV A=${B:?say it}", 1, "B say it"),
        ("FORM x", 1, "FORM unknown use FROM"),
        ("RUN", 1, "RUN no arguments"),
        ("FROM x AS", 1, "FROM <image> AS <name>"),
        ("FROM $X", 1, "$X is empty ARG"),
        ("FROM --os=y x", 1, "--os --platform"),
        ("WORKDIR /a\nFROM x", 2, "FROM before the first"),
        ("FROM x\nRUN a\0b", 2, "UTF-8"),
        ("# syntax=x\n# Escape = `\nFROM x", 2, "backslash"),
        ("FROM x\nCOPY --from=0 a b", 2, "COPY --from=0 0 stages"),
        ("FROM x AS a\nFROM y\nCOPY --from=1 a b", 3, "COPY --from=1 1 stages"),
        ("FROM x\nCOPY --from=$A a b", 2, "COPY --from=$A FROM $A AS <name>"),
        ("FROM x\nSHELL []", 2, "SHELL JSON"),
        ("FROM x\nSHELL bash -c", 2, "SHELL JSON"),
        ("FROM x\nRUN []", 2, "RUN JSON"),
        ("FROM x\nRUN [\"a\", 1]", 2, "RUN JSON strings"),
        ("FROM x\nRUN --network=none", 2, "RUN command"),
        ("FROM x\nRUN --netwrk=none a", 2, "RUN --netwrk --network"),
        ("FROM x\nRUN --mount=type=cache a", 2, "RUN --mount=type=cache target="),
        ("FROM x\nADD --checksum=sha256:0 http://h/x /y", 2, "ADD --checksum=sha256:<hex>"),
        ("FROM x\nADD http://[ /y", 2, "ADD http://[ URL"),
        ("COPY --chmod=u+y a b", 1, "--chmod=u+y u+x"),
    ],
)  # fmt: skip
def test_wrong(text: str, line: int, words: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        planned(text)
    assert caught.value.line == line
    assert [word for word in words.split() if word not in str(caught.value)] == []
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "bases", "needed"),
    [
        ("", [("", None)], (0,)),
        ("ARG A=1\nRUN x", [("", None)], (0,)),
        ("FROM scratch", [("scratch", None)], (0,)),
        ("ARG V=3.13\nARG N=python:$V\nFROM ${N}-slim", [("python:3.13-slim", None)], (0,)),
        ("FROM a AS One\nFROM b\nFROM one", [("a", None), ("b", None), ("", 0)], (0, 2)),
        ("FROM a AS x\nFROM b AS x\nFROM X", [("a", None), ("b", None), ("", 1)], (1, 2)),
        ("FROM a AS one\nFROM b\nFROM c\nCOPY --from=One a b", [("a", None), ("b", None), ("c", None)], (0, 2)),
        (
            "FROM a\nFROM b\nCOPY --from=0 a b\nFROM 0\nCOPY --from=1 a b",
            [("a", None), ("b", None), ("0", None)],
            (0, 1, 2),
        ),
        ("FROM a\nFROM b\nCOPY --from=img:1 a b", [("a", None), ("b", None)], (1,)),
        ("FROM a AS x\nFROM b AS y\nFROM y AS x\nFROM x", [("a", None), ("b", None), ("", 1), ("", 2)], (1, 2, 3)),
        ("FROM --platform=$BUILDPLATFORM a", [("a", None)], (0,)),
    ],
)  # fmt: skip
def test_bases(text: str, bases: list[tuple[str, int | None]], needed: tuple[int, ...]) -> None:
    whole = parse(text)
    assert [(stage.base, stage.base_stage) for stage in whole.stages] == bases
    assert whole.needed_stages == needed
    assert whole.target == len(bases) - 1
    assert (whole.stages[0].platform or "linux/").startswith("linux/")


def test_load(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("WORKDIR /ä")
    assert load(file).workdir == "/ä"
    file.write_bytes(b"FROM x\nWORKDIR /\xe4\n")
    with pytest.raises(DockerfileError, match=r"line 2: .*UTF-8"):
        load(file)


WORDS = st.sampled_from(
    [
        *(
            "FROM",
            "AS",
            "COPY",
            "ADD",
            "ENV",
            "ARG",
            "RUN",
            "SHELL",
            "WORKDIR",
            "USER",
            "ONBUILD",
            "--from=",
            "--chmod=7",
            "--",
        ),
        *(
            "x",
            "A=b",
            "$A",
            "${A:-",
            "{",
            "}",
            "$",
            "'",
            '"',
            "\\",
            "`",
            "#",
            "<<",
            "<<EOF",
            "EOF",
            "-",
            "[",
            '"a",',
            "]",
        ),
        *("--mount=type=cache,", "target=", "--exclude=", "--checksum=", "--from=0", "http://[", "https://x/"),
        *("/", "..", "=", "é", "https://x", "\n", "\n", "\\\n", " ", "\t", "\r", "\0", "\ud800"),
    ]
)


@settings(max_examples=500)
@given(st.one_of(st.text(), st.lists(WORDS).map("".join), st.lists(WORDS).map(" ".join)))
def test_nothing_but_dockerfile_errors(text: str) -> None:
    line, workdir = 1, "/"
    try:
        workdir = planned(text).workdir or "/"
        whole, plans = parse(text), list[Plan]()
        for index, stage in enumerate(whole.stages):
            plans.append(
                plan_stage(whole, index, ImageConfig() if stage.base_stage is None else plans[stage.base_stage])
            )
            assert all(map(identity, plans[-1].steps))
    except DockerfileError as error:
        line = error.line
    assert 1 <= line <= text.count("\n") + 1
    assert workdir.startswith("/")


def test_long_and_deep_texts_are_quick() -> None:
    for piece in ("<", "<< ", "'", "\\", "${A:-", "{", "[", "--x ", '"\\', "$", "a\\\n", "\t"):
        for head in ("COPY ", "ENV A=", "RUN <<"):
            with suppress(DockerfileError):
                planned(head + piece * 20_000)
