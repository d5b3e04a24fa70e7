"""What the instructions of a Dockerfile leave, built through a real engine."""

import hashlib
import io
import re
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support.building import Workshop
from support.node import BEST_RUNG, IDS_ARE_FAKED, NODE, ROOT_IS_OVERLAY, RUNGS_HERE
from tbench2_env.isolation.spec import RUNGS
from tbench2_env.server.taskconfig import TaskError

from .conftest import StartWorkshop

#: Of this machine's, rung 3 stores layers as rung 2 does.
EACH_RUNG = pytest.mark.parametrize("rung", [rung.name for rung in RUNGS_HERE if NODE or rung.name != "3"])


def there(uid: int, rung: str = BEST_RUNG.name) -> int:
    """Who a user of the image is on the rung: root, where an episode has one id."""
    return uid if RUNGS[rung].has_id_range else 0


FORMS = r"""
RUN echo shell $0 >/a && \
    echo more >>/a
RUN ["bash", "-c", "echo exec $0 $BASH_VERSINFO >/b", "zero"]
RUN <<EOF
echo first >/c
cd /tmp
echo second $PWD >>/c
EOF
RUN cat >/d <<END && echo after >>/d
document
END
RUN <<EOF
#!/bin/bash
echo script ${BASH_SOURCE[0]} >/e
EOF
RUN bash <<'EOF'
echo $((6 * 7)) >/f
EOF
"""


async def test_forms_of_run(shop: Workshop) -> None:
    assert await shop.built(FORMS, "cd /; cat a b c d e f; ls dev/pipes 2>/dev/null || true") == [
        *("shell /bin/sh", "more", "exec zero 5", "first", "second /tmp", "document", "after"),
        *("script /dev/pipes/EOF", "42"),
    ]


async def test_long_commands(shop: Workshop) -> None:
    """A heredoc may be as long as what the kernel takes for an argument, and longer as a script of its own."""
    words = "".join(f"echo {number} >>/a\n" for number in range(7000))
    assert len(words) > 100_000
    dockerfile = (
        f"RUN <<EOF\n{words}EOF\nUSER someone\nRUN <<EOF\n#!/bin/bash\n{'# long' * 50_000}\nid -u >/tmp/b\nEOF\n"
    )
    assert (await shop.built(dockerfile, "cat /a /tmp/b"))[-2:] == ["6999", str(there(33))]


VARIABLES = r"""ARG BASE=tiny
FROM $BASE
ARG VERSION=7
ENV A=1 B="two words" PATH=/opt/bin:/usr/bin:/bin
RUN echo "$VERSION $A $B $HOME $PWD" >/seen; env >/env
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN echo "$0 $SHELLOPTS" >/shell
RUN false | true || echo pipefail >>/shell
WORKDIR /srv
WORKDIR app
RUN echo $PWD >place; mkdir -p /opt/bin; echo "#!/bin/sh" >/opt/bin/tool; echo "echo found" >>/opt/bin/tool
RUN chmod 755 /opt/bin/tool
RUN ["tool"]
"""


async def test_variables_shell_and_workdir(shop: Workshop) -> None:
    lines = await shop.built(VARIABLES, "cat /seen /shell; echo $A, $B, $VERSION, $PWD; cat place; tool; cat /env")
    assert lines[0] == "7 1 two words /root /"
    assert "pipefail" in lines[1]
    assert lines[2:6] == ["pipefail", "1, two words, , /srv/app", "/srv/app", "found"]
    names = {line.partition("=")[0] for line in lines[6:]}
    assert names == {"A", "B", "PATH", "VERSION", "HOME", "PWD"}, "nothing of the server's own"


USERS = r"""
USER someone
RUN echo $HOME >/tmp/home; id -u >/tmp/id; id -G >>/tmp/id; touch /etc/x 2>/dev/null || echo no >>/tmp/id
WORKDIR /srv/mine
RUN touch made
COPY note given
USER someone:44
RUN touch /tmp/of-crew
USER 1234
RUN touch /tmp/of-number; echo $HOME >>/tmp/home 2>/dev/null || echo denied >/tmp/denied
USER root
RUN echo $HOME >/root/home; chown 5:6 /srv/mine/given
USER someone
"""


LOOK_AT_USERS = """cat /tmp/home /tmp/id; cat /tmp/denied 2>/dev/null; id -u; echo $HOME
stat -c '%u %g %n' /srv/mine . made given /tmp/of-crew /tmp/of-number /root /etc/passwd"""


@EACH_RUNG
async def test_users(start_workshop: StartWorkshop, rung: str) -> None:
    shop = await start_workshop(isolation=rung)
    if not RUNGS[rung].has_id_range:
        await check_users_where_there_is_one(shop)
        return
    assert await shop.built(USERS, LOOK_AT_USERS, {"note": "n"}) == [
        *("/home/someone", "33", "33 44", "no", "denied", "33", "/home/someone"),
        *("33 33 /srv/mine", "33 33 .", "33 33 made", "5 6 given", "33 44 /tmp/of-crew", "1234 0 /tmp/of-number"),
        *("0 0 /root", "0 0 /etc/passwd"),
    ]


async def check_users_where_there_is_one(shop: Workshop) -> None:
    """All of them are root, in their own homes; who may not change owners is told why the build failed."""
    dockerfile = USERS
    if not IDS_ARE_FAKED:
        with pytest.raises(TaskError, match=r"line 13: RUN .*one user id only(?s:.*)\nchown: .*Invalid arg"):
            await shop.build(USERS, {"note": "n"})
        dockerfile = USERS.replace("; chown 5:6 /srv/mine/given", "")
    snapshot = await shop.build(dockerfile, {"note": "n"})
    assert await shop.run(snapshot, LOOK_AT_USERS) == [
        *("/home/someone", "/", "0", "0", "0", "/home/someone"),
        *("0 0 /srv/mine", "0 0 .", "0 0 made", "0 0 given", "0 0 /tmp/of-crew", "0 0 /tmp/of-number"),
        *("0 0 /root", "0 0 /etc/passwd"),
    ]
    (unmet,) = snapshot.environment.unmet
    assert unmet == "USER someone: this host has one user id only, so commands run as root"
    assert await shop.run(snapshot, "cat /etc/apt/apt.conf.d/*") == ['APT::Sandbox::User "root";']
    assert not [each for each in snapshot.environment.layers if (shop.store.root(each) / "etc/apt").exists()]


async def test_a_user_that_the_image_does_not_have(shop: Workshop) -> None:
    with pytest.raises(TaskError, match=r"environment/Dockerfile.*line 4: USER: .*/etc/passwd has no user 'ghost'"):
        await shop.build("RUN true\nUSER ghost\nRUN true\n")
    with pytest.raises(TaskError, match=r"USER: .*no user 'ghost'"):
        await shop.build("USER ghost\n")


CHANGES = r"""
RUN mkdir -p /w/gone /w/old/deep /w/again && cd /w && echo 1 >file && echo 2 >gone/x
RUN cd /w && echo 3 >old/deep/y && echo 4 >again/z
RUN cd /w && echo 5 >hard && ln hard link && cp /bin/cat suid && chmod 4755 suid && mkfifo pipe
COPY a.txt /w/file
RUN cd /w && rm -r gone && mv old new && rm -r again && mkdir again && echo 6 >>hard && rm /home/someone/note
RUN cd /w && mv new/deep newer && cd newer && echo 7 >>y
COPY tree /w/newer/
"""
LOOK = r"""cd /w; echo *; echo newer/* again/*; cat file link newer/y
stat -c '%a %h %n' suid hard; ls -A /home/someone new
stat -c %F pipe"""


@EACH_RUNG
async def test_changes_of_layers_below(start_workshop: StartWorkshop, rung: str) -> None:
    """Files replaced, removed and moved, of layers below; hard links, setuid programs, pipes."""
    shop = await start_workshop(isolation=rung)
    files = {"a.txt": "copied\n", "tree/y2": "tree\n"}
    assert await shop.built(CHANGES, LOOK, files) == [
        *("again file hard link new newer pipe suid", "newer/y newer/y2 again/*", "copied", "5", "3", "7"),
        # As in docker: what is written through one name of a lower layer's file is another file from then on.
        *("4755 1 suid", "644 1 hard", "/home/someone:", "", "new:", "fifo"),
    ]


SCRATCH = r"""
RUN mkdir -p /var/cache/kept && echo old >/var/cache/kept/old
RUN --mount=type=cache,target=/var/cache/apt --mount=type=tmpfs,target=/scratch,size=10 \
    ls -d /var/cache/apt /scratch && mkdir /var/cache/apt/d && echo x >/var/cache/apt/d/x && \
    echo y >/scratch/y && echo z >/z
RUN --mount=type=cache,target=/var/cache/kept echo new >/var/cache/kept/new; rm /var/cache/kept/old
RUN echo x >/tests/x; echo x >/logs/verifier/x; echo x >/logs/x; echo x >/run/x; echo x >/dev/shm/x; echo x >/tmp/x
RUN echo "127.0.0.9 other" >>/etc/hosts; echo nameserver 127.0.0.9 >/etc/resolv.conf; echo name >/etc/hostname
"""


async def test_what_a_layer_does_not_keep(shop: Workshop) -> None:
    """Caches, what is the sandbox's own, and what every episode gets anew."""
    look = """cat /z; ls -A /var/cache/apt /scratch /tests /logs/verifier /dev/shm 2>/dev/null
    ls -A /var/cache/kept; cat /etc/hosts /etc/hostname; echo x >>/etc/hosts; cat /tmp/x"""
    snapshot = await shop.build(SCRATCH)
    lines = await shop.run(snapshot, look)
    assert lines[0] == "z"
    assert not {"d", "y", "x", "new", "127.0.0.9 other", "name"}.intersection(lines[:-1]), lines
    assert "127.0.0.1\tlocalhost tbench" in lines
    assert lines[-1] == "x", "but /tmp of an image is kept"
    layers = [shop.store.root(layer) for layer in snapshot.environment.layers]
    assert not [path for root in layers for path in (root / "tests/x", root / "logs/verifier/x") if path.exists()]


async def test_services_of_a_run_end_with_it(shop: Workshop) -> None:
    service = "RUN sleep 1000 & setsid sleep 1000 >/dev/null 2>&1 & echo started >/a\n"
    assert await shop.built(service, "cat /a") == ["started"]


STAGES = r"""FROM tiny AS first
ENV A=first
USER someone
WORKDIR /made
RUN echo of-first >out; ln -s out link
USER root
RUN cp /bin/cat /made/suid && chmod 4711 /made/suid

FROM tiny AS unused
RUN exit 9

FROM first AS second
RUN echo $A >/second

FROM tiny:other
COPY --from=first /made /copied
COPY --from=second /second /second
COPY --from=0 /made/out /by-number
COPY --from=tiny:third /home/someone/note /of-image
COPY --from=first --chown=5:6 /made/out /owned
RUN ls /made 2>/dev/null || echo clean >/clean
"""


@EACH_RUNG
async def test_stages(start_workshop: StartWorkshop, rung: str) -> None:
    shop = await start_workshop(isolation=rung)
    look = (
        """cd /; cat copied/link second by-number of-image clean; echo "<$A>"; stat -c '%u %g %a %n' copied/* owned"""
    )
    lines = await shop.built(STAGES, look)
    assert lines[:6] == ["of-first", "first", "of-first", "of the image", "clean", "<>"]
    ids = ("33 33", "5 6") if RUNGS[rung].has_id_range else ("0 0", "0 0")
    assert lines[6:] == [
        *(f"{ids[0]} 777 copied/link", f"{ids[0]} 644 copied/out", "0 0 4711 copied/suid", f"{ids[1]} 644 owned"),
    ]


# ---------------------------------------------------------------- ADD
def tar_of(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.uid, entry.mode = len(content), 33, 0o640
        tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


async def test_add(shop: Workshop, web: Callable[[str, bytes], str]) -> None:
    archive = tar_of("in/side", b"packed\n")
    url, right = web("a file.txt", b"from the web\n"), hashlib.sha256(b"from the web\n").hexdigest()
    dockerfile = f"""
ADD packed.tar.gz /unpacked/
ADD {url} /web/
ADD --checksum=sha256:{right} --chmod=644 {url} /checked
ADD {web("packed.tgz", archive)} /web/
ADD --unpack=true {web("packed.tgz", archive)} /web/
"""
    look = """cat /unpacked/in/side '/web/a file.txt' /checked /web/in/side
    stat -c '%a %u %n' /unpacked/in/side /web/* /checked"""
    assert await shop.built(dockerfile, look, {"packed.tar.gz": archive}) == [
        *("packed", "from the web", "from the web", "packed"),
        *(
            f"640 {there(33)} /unpacked/in/side",
            "600 0 /web/a file.txt",
            "755 0 /web/in",
            "600 0 /web/packed.tgz",
            "644 0 /checked",
        ),
    ]
    wrong = f"RUN true\nADD --checksum=sha256:{'0' * 64} {url} /x\n"
    with pytest.raises(TaskError, match=rf"line 3: ADD: .* has the checksum sha256:{right}, not"):
        await shop.build(wrong)
    with pytest.raises(TaskError, match=r"line 2: ADD: .*/none cannot be downloaded: HTTP Error 404"):
        await shop.build(f"ADD {url.rpartition('/')[0]}/none /x\n")


# ---------------------------------------------------------------- over the node
OVER_NODE = """FROM nowhere:1 AS other
RUN mkdir /opt/of-stage && echo stage >/opt/of-stage/file

FROM nowhere:1
COPY --from=other /opt/of-stage /etc/os-release /srv/
RUN test -d /var/lib && ls /usr/bin/env && mkdir -p /opt/built && echo built >/opt/built/a && rm /usr/bin/env
COPY a.txt /opt/built/b
WORKDIR /opt/built
RUN mv /etc/apt /etc/moved; echo c >c; echo x >/tmp/x; echo x >/root/x
"""


@EACH_RUNG
async def test_over_the_node(start_workshop: StartWorkshop, rung: str) -> None:
    shop = await start_workshop(isolation=rung, base_fallback="node")
    snapshot = await shop.build(OVER_NODE, {"a.txt": "b\n"})
    look = """pwd; cat a b c; ls /usr/bin/env 2>/dev/null
    ls -d /etc/moved/sources* /etc/apt 2>/dev/null; cat /tmp/x /root/x"""
    assert await shop.run(snapshot, "cat /srv/file; cmp /srv/os-release /etc/os-release; [ ! -e /opt/of-stage ]") == [
        "stage"
    ]
    lines = await shop.run(snapshot, look)
    assert lines[:4] == ["/opt/built", "built", "b", "c"]
    assert lines[4].startswith("/etc/moved/sources")
    assert lines[-2:] == ["x", "x"]
    assert "/etc/apt" not in lines
    (unmet,) = snapshot.environment.unmet
    assert unmet.startswith("base image nowhere:1: the node's own root stands in for it")
    assert Path("/usr/bin/env").exists()


async def test_what_fails_for_want_of_an_image_says_what_stood_in_for_it(start_workshop: StartWorkshop) -> None:
    shop = await start_workshop(base_fallback="node")
    stands_in = r"\nbase image nowhere:1: the node's own root stands in for it \(.*\)"
    for step in ("COPY --from=nowhere:1 /no-tool /", "RUN no-tool"):
        with pytest.raises(TaskError, match=rf"^task t: environment/Dockerfile line 2: (?s:.*){stands_in}$"):
            await shop.build(f"FROM nowhere:1\n{step}\n")


async def test_a_base_that_is_not_to_be_had(start_workshop: StartWorkshop) -> None:
    shop = await start_workshop(base_fallback="refuse")
    with pytest.raises(TaskError, match=r"base image nowhere:1: .*TB2_BASE_FALLBACK=refuse"):
        await shop.build(OVER_NODE)
    shop = await start_workshop(environment="auto")
    snapshot = await shop.build(OVER_NODE, {"a.txt": "b\n"})
    assert await shop.run(snapshot, "pwd; cat b; ls") == ["/opt/built", "b", "b"]
    assert len([each for each in snapshot.unmet if "RUN" in each]) == 2
    assert snapshot.environment.layers == ()


@pytest.mark.skipif(not ROOT_IS_OVERLAY, reason="there is no overlayfs here to keep a store on")
async def test_a_store_on_overlayfs(start_workshop: StartWorkshop) -> None:
    why = r"/cache/store/one-id cannot hold layers: .*; let TB2_CACHE_DIR be on a local disk .*, not on overlayfs"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        shop = await start_workshop(own_cache_dir=Path(folder, "cache"))
        with pytest.raises(TaskError, match=f"^task t: its environment cannot be stored: /var/tmp/[^ ]*{why}[^;]*$"):
            await shop.build("RUN true\n")
        shop = await start_workshop(own_cache_dir=Path(folder, "cache"), environment="auto")
        snapshot = await shop.build("COPY a /a\nRUN true\n", {"a": "a"})
        assert await shop.run(snapshot, "cat /a") == ["a"]
        assert re.match(rf"base image tiny: .*{why}", snapshot.unmet[0]), snapshot.unmet


async def test_an_image_from_nothing(shop: Workshop) -> None:
    dockerfile = (
        "FROM tiny AS all\nRUN echo x >/x; rm /etc/group\n{}\nFROM scratch\nCOPY --from=all / /\nRUN echo y >/y\n"
    )
    snapshot = await shop.build(dockerfile.format(""))
    assert await shop.run(snapshot, "cat /x /y /home/someone/note; ls /etc/group 2>/dev/null || echo none") == [
        *("x", "y", "of the image", "none"),
    ]
    assert len(snapshot.environment.layers) == 2
    with pytest.raises(TaskError, match=r"line 2: RUN true: cannot be started: /bin/sh: .*No such file"):
        await shop.build("FROM scratch\nRUN true\n")
    with pytest.raises(TaskError, match="there is no /bin/bash in it"):
        await shop.build("FROM scratch\nCOPY a /a\n", {"a": "a"})


# ---------------------------------------------------------------- prebuilt images
IMAGE = '[environment]\ndocker_image = "{}"\n'


@pytest.mark.parametrize("room_gb", [None, 1e-6])
async def test_a_prebuilt_image(start_workshop: StartWorkshop, room_gb: float | None) -> None:
    shop = await start_workshop(environment="image", store_max_gb=room_gb)
    look = "cat /home/someone/note; ls /built 2>/dev/null || echo none; pwd"
    snapshot = await shop.build("RUN echo x >/built\n", toml=IMAGE.format("tiny:7"))
    assert await shop.run(snapshot, look) == ["of the image", "none", "/"]
    assert snapshot.environment.source.startswith("TB2_BASES tiny*=")
    snapshot = await shop.build("RUN echo x >/built\nWORKDIR /w\n", toml=IMAGE.format("nowhere:7"))
    assert await shop.run(snapshot, look) == ["of the image", "/built", "/w"]
    (unmet,) = (each for each in snapshot.unmet if "docker_image" in each)
    assert unmet.startswith("environment.docker_image = nowhere:7: nothing of TB2_BASES matches it")
