"""Pulling from a real docker-registry on the loopback, through skopeo and through oras."""

import asyncio
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from support.images import DockerRegistry, Made, make_image, tar
from support.server import free_port
from tbench2_env.server.images.layout import Layout
from tbench2_env.server.images.reference import Reference
from tbench2_env.server.images.registry import PulledLayout, Registries, RegistryError, parse_registries
from tbench2_env.server.images.tools import run_tool

#: htpasswd's line (bcrypt, cost 4) for this login.
LOGIN = ("ada", "secret")
HTPASSWD = "ada:$2b$04$gE4bmHfR51.aJwnDoa8kl.4PqVfqZfB3KFBkv9c1aDghknCTFYRlW\n"
TIMEOUT_S = 30.0

BASE = tar(("etc/", {}), ("etc/motd", b"base\n"), ("bin/su", {"data": b"#!", "mode": 0o4755}))
UPPER = tar(("etc/", {}), ("etc/.wh.motd", b""), ("opt/", {}), ("opt/.wh..wh..opq", b""))

Wanted = Callable[[Sequence[str]], Collection[str]]


def every(diff_ids: Sequence[str]) -> Collection[str]:
    return diff_ids


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    with DockerRegistry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_image(tmp_path_factory.mktemp("image") / "layout", [BASE, UPPER], {"Env": ["A=b"]}, others=True)


#: For tests of what both have in common: a process of Python for each question takes its time.
just_skopeo = pytest.mark.parametrize("skopeo", ["skopeo"], indirect=True)


@pytest.fixture(params=["skopeo", "oras"])
def skopeo(request: pytest.FixtureRequest) -> str | None:
    """The program, or None: the test is run with oras, too."""
    program = shutil.which("skopeo") if request.param == "skopeo" else None
    assert program or request.param == "oras", "install skopeo"
    return program


async def pull(
    registries: Registries, name: str, into: Path, pinned: str | None = None, wanted: Wanted = every
) -> PulledLayout:
    return await registries.pull(Reference.parse(name), into, pinned, wanted, TIMEOUT_S)


def blobs(folder: Path) -> set[str]:
    """Digests of the blobs of a layout, all of them whole."""
    found = list((folder / "blobs/sha256").iterdir())
    for each in found:
        assert hashlib.sha256(each.read_bytes()).hexdigest() == each.name
    return {f"sha256:{each.name}" for each in found}


@pytest.mark.parametrize(("skopeo", "docker"), [("skopeo", 0), ("skopeo", 1), ("oras", 1)], indirect=["skopeo"])
async def test_a_pulled_image_is_a_whole_layout_of_this_machines_image(
    registry: DockerRegistry, skopeo: str | None, tmp_path: Path, docker: bool
) -> None:
    """In OCI's format and in docker's own, which keeps its digests."""
    image = make_image(tmp_path / "made", [BASE, UPPER], docker=docker, others=True)
    name = registry.push(image, f"whole:{docker}")
    pulled = await pull(Registries(skopeo=skopeo), name, tmp_path / "layout")
    assert (pulled.digest, pulled.source) == (image.digest, f"{registry.host}/whole@{image.digest}")
    found = Layout(tmp_path / "layout").manifest()
    assert (found.digest, [each.digest for each in found.layers]) == (image.digest, list(image.blobs))
    manifest = json.loads((tmp_path / "layout/blobs/sha256" / image.digest.removeprefix("sha256:")).read_bytes())
    assert blobs(tmp_path / "layout") == {image.digest, manifest["config"]["digest"], *image.blobs}
    assert sorted(each.name for each in (tmp_path / "layout").iterdir()) == ["blobs", "index.json", "oci-layout"]


@just_skopeo
async def test_layers_that_are_not_wanted_stay_away(
    registry: DockerRegistry, image: Made, skopeo: str | None, tmp_path: Path
) -> None:
    name, asked = registry.push(image, "some:1"), list[str]()

    def only_upper(diff_ids: Sequence[str]) -> Collection[str]:
        asked.extend(diff_ids)
        return diff_ids[1:]

    await pull(Registries(skopeo=skopeo), name, tmp_path / "layout", wanted=only_upper)
    assert [f"sha256:{each}" for each in asked] == list(image.diff_ids)
    assert blobs(tmp_path / "layout") & set(image.blobs) == {image.blobs[1]}


@just_skopeo
async def test_a_pin_survives_the_tag_being_moved(
    registry: DockerRegistry, image: Made, skopeo: str | None, tmp_path: Path
) -> None:
    name, registries = registry.push(image, "moved:1"), Registries(skopeo=skopeo)
    other = make_image(tmp_path / "other", [tar(("etc/motd", b"moved\n"))])
    registry.push(other, "moved:1")
    assert (await pull(registries, name, tmp_path / "layout", image.digest)).digest == image.digest
    assert (await pull(registries, name, tmp_path / "layout")).digest == other.digest
    gone = "sha256:" + "0" * 64
    with pytest.raises(RegistryError, match=rf"moved:1 at its pinned digest {gone} could not be pulled: .*unknown"):
        await pull(registries, name, tmp_path / "layout", gone)


async def test_the_error_says_which_registry_said_what(
    registry: DockerRegistry, image: Made, skopeo: str | None, tmp_path: Path
) -> None:
    known = "skopeo-knows" if skopeo else "oras-knows"
    registry.push(image, f"{known}:1")
    registries = Registries([registry.host], skopeo=skopeo)
    for name in ("nowhere:1", f"{registry.host}/{known}:2"):
        with pytest.raises(
            RegistryError, match=rf"^\S+ could not be pulled: {registry.host}: .*manifest unknown"
        ) as no:
            await pull(registries, name, tmp_path / "layout")
        assert "\n" not in str(no.value)
    assert not (tmp_path / "layout").exists()
    if skopeo is None:
        return
    registry.push(image, f"{known}:2")  # an answer, and so not remembered
    await pull(registries, f"{registry.host}/{known}:2", tmp_path / "layout")


@just_skopeo
async def test_mirrors_are_asked_in_order(
    registry: DockerRegistry, image: Made, skopeo: str | None, tmp_path: Path
) -> None:
    registry.push(image, "hub/library/ubuntu:24.04")
    dead = f"127.0.0.1:{free_port()}"
    registries = Registries([dead, registry.host, f"{registry.host}/hub"], skopeo=skopeo)
    pulled = await pull(registries, "ubuntu:24.04", tmp_path / "layout")
    assert pulled.source == f"{registry.host}/hub/library/ubuntu@{image.digest}"


async def test_a_login_comes_from_dockers_config_file(image: Made, skopeo: str | None, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    (tmp_path / "registry").mkdir()
    with DockerRegistry(tmp_path / "registry", HTPASSWD) as registry:
        name = registry.push(image, "secret:1", LOGIN)
        config.write_text(json.dumps({"auths": {registry.host: {"auth": "YWRhOnNlY3JldA=="}}}))  # ada:secret
        pulled = await pull(Registries(docker_config=config, skopeo=skopeo), name, tmp_path / "layout")
        assert pulled.digest == image.digest
        config.write_text(json.dumps({"auths": {registry.host: {"auth": "YWRhOndyb25n"}}}))  # ada:wrong
        with pytest.raises(RegistryError, match=r"(?i)authentication required|unauthorized"):
            await pull(Registries(docker_config=config, skopeo=skopeo), name, tmp_path / "layout")
        if skopeo is None:
            with pytest.raises(RegistryError, match=rf"asks for a login: `docker login {registry.host}`"):
                await pull(Registries(), name, tmp_path / "layout")


@pytest.mark.parametrize(("skopeo", "harm"), [("skopeo", "corrupted"), ("oras", "cut short")], indirect=["skopeo"])
async def test_a_blob_that_does_not_arrive_whole_is_refused_and_fetched_again(
    registry: DockerRegistry, skopeo: str | None, tmp_path: Path, harm: str
) -> None:
    layer = tar(("noise", os.urandom(5000)))
    made = make_image(tmp_path / "made", [layer])
    name, registries = registry.push(made, "harmed:1"), Registries(skopeo=skopeo)
    (digest,) = made.blobs
    whole = registry.blob(digest).read_bytes()
    registry.blob(digest).write_bytes(whole[:-100] if harm == "cut short" else whole[:-100] + bytes(100))
    with pytest.raises(RegistryError, match=rf"{digest} did not arrive whole in 2 tries"):
        await pull(registries, name, tmp_path / "layout")
    assert not (tmp_path / "layout").exists()
    if skopeo is None:
        return
    registry.blob(digest).write_bytes(whole)
    await pull(registries, name, tmp_path / "layout")
    assert gzip.decompress((tmp_path / "layout/blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()) == layer


async def test_a_registry_that_is_down_is_not_waited_for_again(skopeo: str | None, tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    registries = Registries([dead], skopeo=skopeo)
    with pytest.raises(RegistryError, match=rf"ubuntu:24.04 could not be pulled: {dead}: .*[Cc]onnection refused"):
        await pull(registries, "ubuntu:24.04", tmp_path / "layout")
    began = time.monotonic()
    for _ in range(64):
        with pytest.raises(RegistryError, match=r"[Cc]onnection refused.* \(not asked again for \d+ s\)$"):
            await pull(registries, "debian", tmp_path / "layout")
    assert time.monotonic() - began < 5


async def test_a_silent_registry_ends_the_pull_in_time_and_with_its_process(
    skopeo: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tbench2_env.server.images.transports.ANSWER_TIMEOUT_S", 0.7)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        registries = Registries([host], skopeo=skopeo)
        async with asyncio.TaskGroup() as group:
            pulls = [group.create_task(_refusal(registries, tmp_path / str(index))) for index in range(8)]
        (said,) = {each.result().split(" (not asked")[0] for each in pulls}
        assert sum("not asked again" in each.result() for each in pulls) == 7  # of many at once, one waits
        assert said.startswith(f"ubuntu:latest could not be pulled: {host}: ")
        assert re.search(r"no answer within 0\.7 s|timed out", said)


async def _refusal(registries: Registries, into: Path) -> str:
    with pytest.raises(RegistryError) as refusal:
        await pull(registries, "ubuntu", into)
    return str(refusal.value)


async def test_a_pull_ends_at_its_deadline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(RegistryError, match=r"it was not here after 0.3 s"):
            await Registries().pull(Reference.parse(name), tmp_path / "layout", None, every, 0.3)


async def test_nothing_is_pulled_without_servers(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"localhost:1/x:latest is not pulled, because TB2_REGISTRY is none"):
        await pull(Registries(parse_registries("none")), "localhost:1/x", tmp_path / "layout")


@pytest.mark.parametrize(
    "text", ["", "https://mirror.example", "none, docker.io", "a b", "mirror.example/Upper", "host"]
)
def test_what_names_no_registry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no registry"):
        parse_registries(text)


def test_registries_are_named_with_commas() -> None:
    text = " mirror.example:5000/hub , docker.io,localhost"
    assert parse_registries(text) == ("mirror.example:5000/hub", "docker.io", "localhost")


async def test_a_cancelled_tool_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"
    task = asyncio.create_task(run_tool(["sh", "-c", script]))
    while not (tmp_path / "pid").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # an orphan is reaped by whoever inherits it
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        await asyncio.sleep(0.02)
    pytest.fail("the tool's child outlived it")
