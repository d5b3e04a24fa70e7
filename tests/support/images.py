"""Small images as OCI layouts, and a registry of one's own that has them."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from support.server import free_port
from tbench2_env.server.images.oci import ARCHITECTURE

_OCI = "application/vnd.oci.image"
_DOCKER = "application/vnd.docker"


def tar(*members: tuple[str, bytes | Mapping[str, Any]]) -> bytes:
    """A tar of (name, content of a file or attributes of its TarInfo); a name that ends in "/" is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, content in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode, info.type = (0o755, tarfile.DIRTYPE) if name.endswith("/") else (0o644, tarfile.REGTYPE)
            attributes = {"data": content} if isinstance(content, bytes) else dict(content)
            data = attributes.pop("data", b"")
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@dataclass(frozen=True)
class Made:
    """An OCI layout with one image; `blobs` are its layers' digests, lowest first, `diff_ids` those of their tars."""

    folder: Path
    digest: str
    blobs: tuple[str, ...]
    diff_ids: tuple[str, ...]


def make_image(
    folder: Path, layers: Sequence[bytes], config: Mapping[str, Any] = {}, *, docker: bool = False, others: bool = False
) -> Made:
    """Of tars. `docker`: with docker's media types; `others`: in an index, after an image for another machine."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    diff_ids = tuple(f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers)

    def put_manifest(architecture: str) -> dict[str, Any]:
        document = {
            "architecture": architecture, "os": "linux", "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        }  # fmt: skip
        layer_type = f"{_DOCKER}.image.rootfs.diff.tar.gzip" if docker else f"{_OCI}.layer.v1.tar+gzip"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_DOCKER}.distribution.manifest.v2+json" if docker else f"{_OCI}.manifest.v1+json",
            "config": put(
                _json(document), f"{_DOCKER}.container.image.v1+json" if docker else f"{_OCI}.config.v1+json"
            ),
            "layers": [put(gzip.compress(each, mtime=0), layer_type) for each in layers],
        }
        platform = {"os": "linux", "architecture": architecture}
        return {**put(_json(manifest), str(manifest["mediaType"])), "platform": platform}

    ours = put_manifest(ARCHITECTURE)
    entry = ours
    if others:
        index_type = f"{_DOCKER}.distribution.manifest.list.v2+json" if docker else f"{_OCI}.index.v1+json"
        index = {"schemaVersion": 2, "mediaType": index_type, "manifests": [put_manifest("s390x"), ours]}
        entry = put(_json(index), index_type)
    (folder / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    manifest = json.loads((blobs / ours["digest"].removeprefix("sha256:")).read_bytes())
    return Made(folder, ours["digest"], tuple(each["digest"] for each in manifest["layers"]), diff_ids)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


class DockerRegistry(AbstractContextManager["DockerRegistry"]):
    """Debian's `docker-registry` on a free port of the loopback, with its storage in `folder`."""

    def __init__(self, folder: Path, htpasswd: str | None = None) -> None:
        self._folder, self._port = folder, free_port()
        self._config = folder / "registry.json"
        config: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
            "http": {"addr": self.host, "secret": "s"},
        }
        if htpasswd is not None:
            (folder / "htpasswd").write_text(htpasswd)
            config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
        self._config.write_text(json.dumps(config))  # JSON is YAML

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        with (self._folder / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(["docker-registry", "serve", self._config], stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "registry.log").read_text()
            assert time.monotonic() < deadline, "docker-registry does not answer"
            time.sleep(0.02)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.host}/v2/", timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 401
        except OSError:
            return False
        return True

    def push(self, image: Made, name: str, login: tuple[str, str] | None = None) -> str:
        """Returns the image's reference, `name` being repository:tag."""
        reference = f"{self.host}/{name}"
        creds = [f"--dest-creds={':'.join(login)}"] if login else []
        subprocess.run(
            ["skopeo", "--insecure-policy", "copy", "--quiet", "--all", "--preserve-digests", "--dest-tls-verify=false",
             *creds, f"oci:{image.folder}", f"docker://{reference}"],
            check=True, capture_output=True, timeout=30, env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        )  # fmt: skip
        return reference

    def blob(self, digest: str) -> Path:
        """The blob's file in the registry's storage."""
        digits = digest.removeprefix("sha256:")
        return self._folder / "storage/docker/registry/v2/blobs/sha256" / digits[:2] / digits / "data"
