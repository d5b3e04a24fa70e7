"""Bases of the operator's and images of a real registry, taken into a real store."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import DockerRegistry, Made, make_image, tar
from support.server import free_port
from tbench2_env.server.images.bases import Bases, BaseUnavailable, parse_bases
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.registry import Registries
from tbench2_env.server.images.store import Store

from .conftest import KIND

ROOT = os.geteuid() == 0
#: Nobody listens there; the port stays reserved, by a descriptor that the fixture `store` is to find open already.
DEAD = f"127.0.0.1:{free_port()}"
NOWHERE = Registries(())

BASE = tar(
    ("etc/", {}),
    ("etc/motd", b"base\n"),
    ("bin/", {}),
    ("bin/su", {"data": b"#!", "mode": 0o4755}),
    ("bin/sg", {"type": b"1", "linkname": "bin/su"}),
    ("opt/", {}),
    ("opt/old", b"old"),
)
UPPER = tar(("etc/", {}), ("etc/.wh.motd", b""), ("opt/", {}), ("opt/.wh..wh..opq", b""), ("opt/new", b"new"))
CONFIG = {"Env": ["PATH=/bin", "A=b=c"], "WorkingDir": "/opt", "User": "daemon", "Entrypoint": ["/bin/no"]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerRegistry]:
    with DockerRegistry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    folder = tmp_path / "rootfs"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/motd").write_text("folder\n")
    return folder


def bases(store: Store, registries: Registries = NOWHERE, **named: Path) -> Bases:
    return Bases(named, registries, store, recheck_s=0)


def run(*argv: str | Path, data: bytes = b"") -> bytes:
    return subprocess.run(argv, input=data, capture_output=True, check=True, timeout=30).stdout


def text(store: Store, image: Image, name: str = "etc/motd") -> str:
    """Of a file of the image's topmost layer, which must be sound."""
    return (store.root(image.layers[0]) / name).read_text()


# ---------------------------------------------------------------- TB2_BASES
def test_bases_are_named_with_commas_and_lines(rootfs: Path) -> None:
    given = f"ubuntu:24.04={rootfs}, python:3.13*={rootfs}\n\n debian = {rootfs},"
    assert parse_bases(given) == {"ubuntu:24.04": rootfs, "python:3.13*": rootfs, "debian": rootfs}
    assert parse_bases("") == {}


@pytest.mark.parametrize(
    ("entry", "fix"),
    [
        ("ubuntu", "is no base: give name=path"),
        ("=/x", "is no base: give name=path"),
        ("ubuntu=", "is no base: give name=path"),
        ("ubuntu=x", "x is not absolute: give the whole path"),
        ("ubuntu=/", "/ is the node's own root, with all that runs on it: give a folder made for this"),
        ("ubuntu={tmp}/absent", "there is neither a folder nor a file"),
        ("ubuntu={tmp}/file.iso", "is neither a folder, nor a .tar"),
        ("ubuntu={tmp}/empty", "is no root file system: it has none of the folders usr, bin, etc"),
        ("ubuntu={tmp}/a.tar,ubuntu={tmp}/a.tar", "ubuntu is given twice"),
    ],
)
def test_a_wrong_entry_is_named_with_its_fix(tmp_path: Path, entry: str, fix: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("file.iso", "a.tar"):
        (tmp_path / name).touch()
    entry = entry.format(tmp=tmp_path)
    with pytest.raises(ValueError, match=r"^'") as refusal:
        parse_bases(entry)
    assert str(refusal.value).startswith(repr(entry.rpartition(",")[2]))
    assert fix in str(refusal.value)


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("python:3.13-slim", "slim"),
        ("docker.io/library/python:3.13-slim", "slim"),
        ("python:3.13-slim-bookworm", "3.13"),
        ("python:3.13.1", "3.13"),
        ("python", "latest"),
        ("ghcr.example/x/python:3.13", None),
        ("python:3.12", None),
    ],
)
async def test_the_exact_name_goes_before_a_pattern(
    store: Store, tmp_path: Path, reference: str, found: str | None
) -> None:
    named = {"python:3.13*": "3.13", "python:3.13-slim": "slim", "index.docker.io/library/python:latest": "latest"}
    for text_ in named.values():
        (tmp_path / text_ / "etc").mkdir(parents=True)
        (tmp_path / text_ / "etc/motd").write_text(text_)
    here = Bases({name: tmp_path / text_ for name, text_ in named.items()}, NOWHERE, store)
    if found is None:
        advice = rf"nothing of TB2_BASES matches it, and TB2_REGISTRY is none: add {reference}=/path to TB2_BASES"
        with pytest.raises(BaseUnavailable, match=advice):
            await here.resolve(reference)
    else:
        image = await here.resolve(reference)
        assert text(store, image) == found
        assert image.source.startswith("TB2_BASES ")
        assert image.source.endswith(f"={tmp_path / found}")


async def test_scratch_is_empty(store: Store) -> None:
    assert (await bases(store).resolve("scratch")).layers == ()


async def test_a_folder_is_taken_once_and_anew_when_it_changed(store: Store, rootfs: Path) -> None:
    first, *others = await asyncio.gather(*(bases(store, base=rootfs).resolve("base") for _ in range(3)))
    assert others == [first, first]
    assert first.config == ImageConfig()
    assert text(store, first) == "folder\n"
    (rootfs / "etc/motd").write_text("changed\n")
    second = await bases(store, base=rootfs).resolve("base")
    assert text(store, second) == "changed\n"
    assert second.digest != first.digest
    assert len(store.usage()) == 2
    assert store.usage()[0].note == {"base": str(rootfs)}


async def test_a_folder_is_not_looked_at_each_time(store: Store, rootfs: Path) -> None:
    here = Bases({"base": rootfs}, NOWHERE, store)
    first = await here.resolve("base")
    (rootfs / "etc/motd").write_text("changed\n")
    assert await here.resolve("base") == first
    store.remove(first.layers)
    assert text(store, await here.resolve("base")) == "changed\n"


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.zst"])
async def test_a_tar_of_a_root_file_system(store: Store, tmp_path: Path, suffix: str) -> None:
    archive = tmp_path / f"base{suffix}"
    (tmp_path / "base.tar").write_bytes(BASE)
    if program := {".tar.gz": "gzip", ".tar.xz": "xz", ".tar.zst": "zstd"}.get(suffix):
        archive.write_bytes(run(program, "-c", data=BASE))
    image = await bases(store, base=archive).resolve("base")
    root = store.root(image.layers[0])
    assert (root / "bin/su").samefile(root / "bin/sg")
    assert (root / "bin/su").stat().st_mode & 0o7777 == 0o4755
    archive.write_bytes(tar(("etc/motd", b"other\n")))
    assert text(store, await bases(store, base=archive).resolve("base")) == "other\n"


async def test_a_large_archive_is_not_read_to_its_end_to_see_what_it_is(store: Store, tmp_path: Path) -> None:
    content = tar(("etc/noise", os.urandom(8 << 20)))
    (tmp_path / "base.tar.zst").write_bytes(run("zstd", "-c", "-1", data=content))
    image = await bases(store, base=tmp_path / "base.tar.zst").resolve("base")
    assert (store.root(image.layers[0]) / "etc/noise").stat().st_size == 8 << 20


async def test_a_file_is_read_again_only_when_it_changed(store: Store, tmp_path: Path) -> None:
    archive = tmp_path / "base.tar"
    archive.write_bytes(BASE)
    image = await bases(store, base=archive).resolve("base")
    os.utime(archive, (1, 1))
    copy = tmp_path / "copy.tar"
    shutil.copy(archive, copy)
    assert [(await bases(store, base=path).resolve("base")).digest for path in (archive, copy)] == [image.digest] * 2
    assert len(store.usage()) == 1


async def test_a_squashfs(store: Store, rootfs: Path, tmp_path: Path) -> None:
    run("mksquashfs", rootfs, tmp_path / "base.sqsh", "-quiet", "-no-progress")
    image = await bases(store, base=tmp_path / "base.sqsh").resolve("base")
    assert text(store, image) == "folder\n"
    (tmp_path / "base.sqsh").write_bytes(b"hsqs" + bytes(4096))
    with pytest.raises(BaseUnavailable, match=r"base.sqsh cannot be unpacked: "):
        await bases(store, base=tmp_path / "base.sqsh").resolve("base")


async def test_a_squashfs_without_its_program(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.sqsh").touch()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BaseUnavailable, match=r"needs the program unsquashfs: install squashfs-tools"):
        await bases(store, base=tmp_path / "base.sqsh").resolve("base")


@pytest.mark.parametrize(
    "form", ["folder", "oci-archive", "oci-archive.gz", "docker-archive", "docker-archive without OCI"]
)
async def test_an_image_of_several_layers(store: Store, tmp_path: Path, form: str) -> None:
    made = make_image(tmp_path / "layout", [BASE, UPPER], CONFIG)
    path = made.folder if form == "folder" else tmp_path / "image.tar"
    if form.startswith("oci-archive"):
        path = tmp_path / f"image.tar{form.removeprefix('oci-archive')}"
        run("tar", "-C", made.folder, "-caf", path, ".")
    elif form != "folder":
        save(made, path, old=form != "docker-archive")
    image = await bases(store, base=path).resolve("base")
    check(store, image)
    assert image.source == f"TB2_BASES base={path}"
    assert await bases(store, base=path).resolve("base") == image


def check(store: Store, image: Image) -> None:
    """It is the image of BASE, UPPER and CONFIG."""
    upper, base = map(store.root, image.layers)
    assert image.config == ImageConfig({"PATH": "/bin", "A": "b=c"}, "/opt", "daemon")
    assert (base / "etc/motd").read_text() == "base\n"
    assert (base / "bin/su").samefile(base / "bin/sg")
    assert (base / "bin/su").stat().st_mode & 0o7777 == 0o4755
    assert (upper / "etc/motd").lstat().st_rdev == 0
    assert os.getxattr(upper / "opt", KIND.opaque) == b"y"
    assert (upper / "opt/new").read_text() == "new"


def save(made: Made, path: Path, *, old: bool) -> None:
    """As `docker save` does; `old`: without the OCI layout that it added in version 25."""
    config = json.loads(made.folder.joinpath("blobs/sha256", made.digest.split(":")[1]).read_bytes())["config"]
    data = (made.folder / "blobs/sha256" / config["digest"].split(":")[1]).read_bytes()
    manifest = [{"Config": "c0ffee.json", "RepoTags": ["x:1"], "Layers": ["a/layer.tar", "b/layer.tar"]}]
    members = [
        ("a/", {}), ("a/VERSION", b"1.0"), ("a/layer.tar", BASE), ("b/", {}), ("b/layer.tar", UPPER),
        ("c0ffee.json", data), ("manifest.json", json.dumps(manifest).encode()),
    ]  # fmt: skip
    if not old:
        files = [each for each in made.folder.rglob("*") if each.is_file()]
        members = [*((str(each.relative_to(made.folder)), each.read_bytes()) for each in sorted(files)), *members]
    path.write_bytes(tar(*members))


async def test_an_archive_that_is_broken_leaves_nothing(store: Store, tmp_path: Path) -> None:
    archive = tmp_path / "base.tar.gz"
    whole = run("gzip", "-c", data=BASE)
    for broken in (whole[:-20], whole[:40] + whole[60:]):
        archive.write_bytes(broken)
        with pytest.raises(BaseUnavailable, match=r"broken|no whole tar"):
            await bases(store, base=archive).resolve("base")
    assert not store.usage()
    archive.write_bytes(whole)
    await bases(store, base=archive).resolve("base")


async def test_a_base_that_vanished_is_unavailable(store: Store, rootfs: Path) -> None:
    here = bases(store, base=rootfs)
    shutil.rmtree(rootfs)
    with pytest.raises(BaseUnavailable, match=r"^base: there is neither a folder nor a file") as gone:
        await here.resolve("base")
    assert gone.value.reference == "base"


# ---------------------------------------------------------------- registries
async def test_an_image_is_pulled_once_and_pinned(registry: DockerRegistry, store: Store, tmp_path: Path) -> None:
    made = make_image(tmp_path / "layout", [BASE, UPPER], CONFIG)
    name = registry.push(made, "pinned:1")
    skopeo = shutil.which("skopeo")
    image, again = await asyncio.gather(*(Bases({}, Registries(skopeo=skopeo), store).resolve(name) for _ in range(2)))
    check(store, image)
    assert image == again
    assert (image.digest, image.source) == (made.digest, f"{registry.host}/pinned@{made.digest}")
    registry.push(make_image(tmp_path / "other", [UPPER]), "pinned:1")
    assert await Bases({}, Registries(skopeo=skopeo), store).resolve(name) == image
    assert await Bases({}, NOWHERE, store).resolve(name) == image  # nobody is asked
    store.remove([image.layers[0]])
    assert await Bases({}, Registries(skopeo=skopeo), store).resolve(name) == image


async def test_only_layers_that_the_store_lacks_are_fetched(
    registry: DockerRegistry, store: Store, tmp_path: Path
) -> None:
    one = make_image(tmp_path / "one", [BASE])
    two = make_image(tmp_path / "two", [BASE, UPPER])
    names = [registry.push(one, "one:1"), registry.push(two, "two:1")]
    here = Bases({}, Registries(), store)
    first = await here.resolve(names[0])
    kept = registry.blob(one.blobs[0])
    kept.rename(tmp_path / "taken away")  # whoever asks for it gets an error
    second = await here.resolve(names[1])
    (tmp_path / "taken away").rename(kept)
    assert second.layers[1:] == first.layers


async def test_what_is_not_to_be_had_says_why(store: Store) -> None:
    here = Bases({}, Registries([DEAD], skopeo=shutil.which("skopeo")), store)
    with pytest.raises(BaseUnavailable, match=rf"^ubuntu:24.04: .*{DEAD}: .*connection refused"):
        await here.resolve("ubuntu:24.04")
    with pytest.raises(BaseUnavailable, match=r"^Ubuntu: image 'Ubuntu': .* is no repository"):
        await here.resolve("Ubuntu")


async def test_a_cancelled_pull_leaves_nothing(registry: DockerRegistry, store: Store, tmp_path: Path) -> None:
    name = registry.push(make_image(tmp_path / "layout", [BASE]), "cancelled:1")
    task = asyncio.create_task(Bases({}, Registries(), store).resolve(name))
    while not list(store.folder.glob("making/pull-*")):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not store.usage()
