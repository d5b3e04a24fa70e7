"""Layouts go into a store and come out of one, and skopeo takes and gives the same; nothing corrupt gets in."""

import asyncio
import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tbench2_env.isolation import worktree
from tbench2_env.server.images import oci
from tbench2_env.server.images.archive import ArchiveError
from tbench2_env.server.images.export import write_layout
from tbench2_env.server.images.image import Image, ImageConfig
from tbench2_env.server.images.layout import BlobCorrupt, Layout, LayoutError, import_layout
from tbench2_env.server.images.store import MissingLayer, Store

from .conftest import KIND

with_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
CONFIG = ImageConfig({"PATH": "/usr/bin:/bin", "A": "b"}, "/app", "me", ("/bin/bash", "-c"))
Edit = Callable[[dict[str, Any]], object]


def layer(**files: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


BASE, MIDDLE, TOP = layer(base="1", both="1"), layer(middle="2"), layer(top="3", both="3")
LAYERS = (BASE, MIDDLE, TOP)


def diff_id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


IDS = tuple(map(diff_id, reversed(LAYERS)))


class Maker:
    """Makes a layout, and lets tests change its documents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str = "", **more: Any) -> dict[str, Any]:
        digest = oci.digest(data)
        self.file(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **more}

    def file(self, digest: str) -> Path:
        return self.path / "blobs" / digest.replace(":", "/")

    def image(
        self, layers: Sequence[bytes] = LAYERS, edit: Edit = lambda _: None, type: str = oci.LAYER
    ) -> dict[str, Any]:
        """A manifest's descriptor. `edit` gets {"config": …, "manifest": …} before they are written."""
        config = {
            "architecture": oci.ARCHITECTURE, "os": "linux", "config": CONFIG.to_oci(),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id(data)}" for data in layers]},
        }  # fmt: skip
        manifest: dict[str, Any] = {
            "schemaVersion": 2, "mediaType": oci.MANIFEST,
            "layers": [self.blob(gzip.compress(data, mtime=0), type) for data in layers],
        }  # fmt: skip
        edit({"config": config, "manifest": manifest})
        manifest.setdefault("config", self.blob(json.dumps(config).encode(), oci.CONFIG))
        return self.blob(json.dumps(manifest).encode(), oci.MANIFEST)

    def index(self, *manifests: dict[str, Any]) -> Layout:
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        return Layout(self.path)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "layout")


def skopeo(*arguments: str | Path) -> bytes:
    argv = ["skopeo", "--insecure-policy", *map(str, arguments)]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=60).stdout


def as_tar(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as tar:
        tar.add(folder, ".")
    return target


def content_of(image: Image, store: Store) -> dict[str, str]:
    """Names and texts of the layers laid over each other."""
    found: dict[str, str] = {}
    for layer_id in reversed(image.layers):
        found |= {path.name: path.read_text() for path in store.root(layer_id).iterdir()}
    return found


WHOLE = {"base": "1", "middle": "2", "top": "3", "both": "3"}


# ---------------------------------------------------------------- reading
@pytest.mark.parametrize("tar", [False, True])
async def test_an_image_of_a_layout(maker: Maker, store: Store, tar: bool) -> None:
    manifest = maker.image()
    layout = maker.index(manifest)
    if tar:
        layout = Layout(as_tar(maker.path, maker.path.with_name("layout.tar")))
    image = await import_layout(layout, store)
    assert image == Image(IDS, CONFIG, manifest["digest"], f"{layout.path}@{manifest['digest']}")
    assert content_of(image, store) == WHOLE
    assert store.note(IDS[0])["source"] == image.source


async def test_layers_are_shared_whatever_they_are_compressed_with(maker: Maker, store: Store) -> None:
    await import_layout(maker.index(maker.image([BASE, MIDDLE])), store, source="first")

    def edit(documents: dict[str, Any]) -> None:
        documents["manifest"]["layers"][0] = maker.blob(BASE, "application/vnd.oci.image.layer.v1.tar")

    image = await import_layout(maker.index(maker.image([BASE, TOP], edit)), store, source="second")
    assert image.source == "second"
    assert store.note(diff_id(BASE))["source"] == "first"
    assert len(store.usage()) == 3


async def test_each_layer_is_there_once_and_the_topmost_counts(maker: Maker, store: Store) -> None:
    image = await import_layout(maker.index(maker.image([BASE, TOP, BASE])), store)
    assert image.layers == (diff_id(BASE), diff_id(TOP))
    assert content_of(image, store) == {"base": "1", "both": "1", "top": "3"}


async def test_nothing_is_below_an_opaque_root(maker: Maker, store: Store) -> None:
    wiped = layer(**{".wh..wh..opq": "", "left": "x"})
    image = await import_layout(maker.index(maker.image([BASE, wiped, TOP])), store)
    assert image.layers == (diff_id(TOP), diff_id(wiped))


async def test_what_a_layer_could_not_hold_is_noted(maker: Maker, store: Store) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        device = tarfile.TarInfo("dev/none")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    image = await import_layout(maker.index(maker.image([out.getvalue()])), store)
    assert store.note(image.layers[0])["skipped"] == ["dev/none: of a type that a layer cannot hold"]


def machine(architecture: str = oci.ARCHITECTURE, os: str = "linux") -> dict[str, Any]:
    return {"platform": {"os": os, "architecture": architecture}}


async def test_the_image_for_this_machine(maker: Maker, store: Store) -> None:
    ours = {**maker.image(), **machine()}
    others = [{**maker.blob(b"{}", oci.MANIFEST), **machine(name, os)} for name, os in
              (("s390x", "linux"), (oci.ARCHITECTURE, "windows"), ("unknown", "unknown"))]  # fmt: skip
    nested = maker.blob(json.dumps({"manifests": [*others, ours]}).encode(), oci.INDEXES[1])
    assert (await import_layout(maker.index(nested), store)).digest == ours["digest"]
    with pytest.raises(LayoutError, match=f"0 images for linux/{oci.ARCHITECTURE}, where one is wanted"):
        maker.index(*others).manifest()


def test_an_image_by_its_name(maker: Maker) -> None:
    first, second = maker.image([BASE]), maker.image([TOP])
    layout = maker.index(*(
        {**image, "annotations": {oci.NAME: name}} for image, name in ((first, "one:1"), (second, "two"), (second, "2"))
    ))  # fmt: skip
    assert layout.manifest("two").digest == layout.manifest("2").digest == second["digest"]
    assert layout.manifest("one:1").diff_ids == (diff_id(BASE),)
    for name, count in ((None, 2), ("three", 0)):
        with pytest.raises(LayoutError, match=f"{count} images.*where one is wanted; names: 2, one:1, two"):
            layout.manifest(name)


def saved(folder: Path, layers: dict[str, bytes | str], **config: Any) -> Path:
    """What docker saved before it wrote layouts; a layer that is a text is a link."""
    document = json.dumps({"rootfs": {"diff_ids": config.pop("diff_ids")}, "config": CONFIG.to_oci()}).encode()
    name = f"{config.pop('name', diff_id(document))}.json"
    images = [{"Config": name, "RepoTags": ["x:1"], "Layers": list(layers)}]
    target = folder / "saved.tar"
    with tarfile.open(target, "w") as tar:
        for path, data in {name: document, **layers, "manifest.json": json.dumps(images).encode()}.items():
            info = tarfile.TarInfo(path)
            if isinstance(data, str):
                info.type, info.linkname, data = tarfile.SYMTYPE, data, b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target


async def test_what_docker_used_to_save(tmp_path: Path, store: Store) -> None:
    diff_ids = [f"sha256:{diff_id(data)}" for data in (BASE, TOP)]
    tar = saved(
        tmp_path, {"a/layer.tar": "../b.tar", "c/layer.tar": TOP, "b.tar": BASE}, diff_ids=[*diff_ids, diff_ids[0]]
    )
    image = await import_layout(Layout(tar), store, "x:1")
    assert image.layers == (diff_id(BASE), diff_id(TOP))
    assert image.config == CONFIG
    with pytest.raises(LayoutError, match="0 images, where one is wanted; tags: x:1"):
        Layout(tar).manifest("x:2")


async def test_what_docker_used_to_save_is_checked(tmp_path: Path, store: Store) -> None:
    wrong = saved(tmp_path, {"a.tar": TOP}, diff_ids=[f"sha256:{diff_id(BASE)}"])
    with pytest.raises(BlobCorrupt, match=rf"a\.tar is corrupt: unpacked it is sha256:{diff_id(TOP)}"):
        await import_layout(Layout(wrong), store)
    wrong = saved(tmp_path, {"a.tar": TOP}, diff_ids=[f"sha256:{diff_id(TOP)}"], name="0" * 64)
    with pytest.raises(BlobCorrupt, match=r"sha256:0000.* is corrupt"):
        Layout(wrong).manifest()


# ---------------------------------------------------------------- refusing
@pytest.mark.parametrize("tar", [False, True])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is corrupt: it has the digest sha256:"),
        (lambda data: data[: len(data) // 2], "bytes instead of"),
        (lambda data: data + b"x", "bytes instead of"),
        (lambda data: None, "is missing"),
    ],
)
@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
async def test_no_corrupt_blob_is_used(
    maker: Maker, store: Store, what: str, damage: Callable[[bytes], bytes | None], text: str, tar: bool
) -> None:
    documents: dict[str, Any] = {}
    manifest = maker.image(edit=documents.update)
    digest = {
        "manifest": manifest["digest"], "layer": documents["manifest"]["layers"][1]["digest"],
        "config": documents["manifest"]["config"]["digest"],
    }[what]  # fmt: skip
    layout, file = maker.index(manifest), maker.file(digest)
    whole = file.read_bytes()
    damaged = damage(whole)
    file.unlink()
    if damaged is not None:
        file.write_bytes(damaged)
    if tar:
        layout = Layout(as_tar(maker.path, maker.path.with_name("layout.tar")))
    with pytest.raises(BlobCorrupt, match=f"{digest} .*{text}|the blob {digest} {text}"):
        await import_layout(layout, store)
    assert not store.has(IDS[1])
    file.write_bytes(whole)
    assert content_of(await import_layout(maker.index(manifest), store), store) == WHOLE  # as if it had never been


async def test_a_layer_that_is_not_what_the_image_says(maker: Maker, store: Store) -> None:
    def edit(documents: dict[str, Any]) -> None:
        documents["config"]["rootfs"]["diff_ids"][0] = f"sha256:{diff_id(b'')}"

    with pytest.raises(BlobCorrupt, match=f"unpacked it is sha256:{diff_id(BASE)}, and its image says"):
        await import_layout(maker.index(maker.image(edit=edit)), store)


async def test_a_layer_that_is_no_archive(maker: Maker, store: Store) -> None:
    with pytest.raises(ArchiveError, match=r"layer sha256:.*: the archive is broken"):
        await import_layout(maker.index(maker.image([b"text" * 200])), store)


def change(document: str, name: str, value: Any) -> Edit:
    return lambda documents: documents[document].update({name: value})


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change("config", "architecture", "s390x"), "is for linux/s390x, and this machine is linux/"),
        (change("config", "os", "windows"), "is for windows/"),
        (change("config", "rootfs", None), "rootfs: no JSON object"),
        (change("config", "rootfs", {"diff_ids": []}), "3 layers, but rootfs.diff_ids are"),
        (change("config", "rootfs", {"diff_ids": ["sha256:../../x"] * 3}), "3 layers, but rootfs.diff_ids are"),
        (change("config", "config", {"Env": 3}), "Env of the image's configuration is a int"),
        (change("manifest", "layers", {}), "layers: no JSON array"),
        (change("manifest", "layers", [3]), "layer of the manifest: no JSON object"),
        (change("manifest", "layers", [{"mediaType": "application/vnd.oci.image.layer.v1.tar+encrypted"}]),
         "a layer of the type application/vnd.oci.image.layer.v1.tar+encrypted cannot be unpacked"),
        (change("manifest", "layers", [{"mediaType": oci.LAYER, "digest": "sha512:00", "size": 3}]), "no descriptor"),
        (change("manifest", "config", {"digest": "sha256:../../etc/passwd", "size": 3}), "no descriptor"),
        (change("manifest", "config", None), "config of the manifest: no JSON object"),
    ],
)  # fmt: skip
def test_nonsense_is_named(maker: Maker, edit: Edit, text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        maker.index(maker.image(edit=edit)).manifest()
    assert text in str(caught.value)


def test_what_is_no_layout(maker: Maker, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"neither index\.json nor manifest\.json"):
        Layout(maker.path).manifest()
    (maker.path / "index.json").write_text("{")
    with pytest.raises(LayoutError, match=r"index\.json: "):
        Layout(maker.path).manifest()
    packed = tmp_path / "layout.tar.gz"
    packed.write_bytes(gzip.compress(b"x" * 2000))
    for path in (packed, tmp_path / "none"):
        with pytest.raises(LayoutError, match=r"neither a folder nor an uncompressed tar .*: unpack it first"):
            Layout(path)
    old = maker.blob(b"{}", "application/vnd.docker.distribution.manifest.v1+prettyjws")
    with pytest.raises(LayoutError, match=r"manifest of the type .*v1\+prettyjws is not supported"):
        maker.index(old).manifest()


async def test_an_import_can_be_cancelled(maker: Maker, store: Store) -> None:
    layers = [layer(**{f"file{number}": "x" * 3_000_000}) for number in range(8)]
    importing = asyncio.create_task(import_layout(maker.index(maker.image(layers)), store))
    await asyncio.sleep(0.05)
    importing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await importing
    for usage in store.usage():
        assert store.root(usage.id).is_dir()


# ---------------------------------------------------------------- writing
@pytest.fixture
def image(maker: Maker, store: Store) -> Image:
    return asyncio.run(import_layout(maker.index(maker.image()), store))


async def test_a_written_layout_can_be_read(image: Image, store: Store, tmp_path: Path) -> None:
    digest = await write_layout(tmp_path / "written", image, store, "task:1")
    manifest = Layout(tmp_path / "written").manifest("task:1")
    assert (manifest.digest, manifest.config) == (digest, CONFIG)
    again = Store(tmp_path / "again", KIND)
    assert content_of(await import_layout(Layout(tmp_path / "written"), again), again) == WHOLE
    assert digest == await write_layout(tmp_path / "second", image, store, "other")


async def test_writing_leaves_nothing_when_it_fails(image: Image, store: Store, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(LayoutError, match="taken exists: remove it"):
        await write_layout(tmp_path / "taken", image, store, "x")
    (store.root(image.layers[0]) / ".wh.top").write_text("")
    with pytest.raises(ArchiveError, match="cannot hold this name"):
        await write_layout(tmp_path / "new", image, store, "x")
    with pytest.raises(MissingLayer):
        await write_layout(tmp_path / "new", Image(("none",), CONFIG, "", ""), store, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layout", "store", "taken"]


@with_skopeo
def test_skopeo_reads_what_we_write(image: Image, store: Store, tmp_path: Path) -> None:
    digest = asyncio.run(write_layout(tmp_path / "written", image, store, "task"))
    seen = json.loads(skopeo("inspect", f"oci:{tmp_path}/written:task"))
    assert seen["Digest"] == digest
    assert len(seen["Layers"]) == 3
    assert json.loads(skopeo("inspect", "--config", f"oci:{tmp_path}/written"))["config"]["WorkingDir"] == "/app"


@with_skopeo
@pytest.mark.parametrize(
    ("arguments", "target"),
    [
        ((), "docker-archive:{}:x:1"),
        ((), "oci-archive:{}:x:1"),
        (("--format", "v2s2"), "dir:{}"),
        (("--dest-compress", "--dest-compress-format", "zstd"), "oci:{}:x:1"),
        (("--dest-decompress",), "oci:{}"),
    ],
)
def test_we_read_what_skopeo_writes(
    maker: Maker, store: Store, tmp_path: Path, arguments: tuple[str, ...], target: str
) -> None:
    maker.index(maker.image())
    skopeo("copy", "--quiet", *arguments, f"oci:{maker.path}", target.format(tmp_path / "copy"))
    if target.startswith("dir:"):  # no layout; only the blobs' and documents' types are docker's
        copy = Maker(tmp_path / "copied")
        for file in (tmp_path / "copy").iterdir():
            copy.file(oci.digest(file.read_bytes())).write_bytes(file.read_bytes())
        manifest = (tmp_path / "copy/manifest.json").read_bytes()
        layout = copy.index(copy.blob(manifest, oci.MANIFESTS[1]))
    else:
        layout = Layout(tmp_path / "copy")
    image = asyncio.run(import_layout(layout, store))
    assert image.layers == IDS
    assert image.config == CONFIG
    assert content_of(image, store) == WHOLE
    worktree.delete(str(store.folder))
