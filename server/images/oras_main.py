"""The process that talks to a registry where there is no skopeo: fetches a manifest or blobs with the `oras` package.

A process and not a thread, so that a pull can be cancelled at any moment. Its argument is a `Job` as JSON; it exits
with 0, and the manifest on stdout, or with DENIED or UNREACHABLE and one sentence on stderr.
"""

import io
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import oras.auth.utils
import oras.provider
import requests
import requests.adapters

from tbench2_env.server.images.manifests import BadManifest, Blob, parse_manifest
from tbench2_env.server.images.transports import UNREACHABLE, is_loopback

#: The exit code for a registry that answered, but not with what was asked for.
DENIED = 3
_CONNECT_TIMEOUT_S = 8.0
_CHUNK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 4 << 20  # what skopeo and docker take, too
#: Docker Hub's name in references, the host of its API, and its name in docker's config file.
_HUB, _HUB_HOST, _HUB_KEY = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
_MANIFESTS = ", ".join(oras.defaults.default_manifest_accepted_media_types)


@dataclass(frozen=True)
class Job:
    """What to fetch into `folder`: the manifest and config of a tag or digest, or blobs, as (digest, bytes)."""

    host: str
    repository: str
    docker_config: str | None
    folder: Path
    silence_s: float  # after which a registry that sends nothing counts as unreachable
    describe: str | None = None
    blobs: Sequence[tuple[str, int]] = ()


class Failed(Exception):
    """The sentence for people, and the exit code."""

    def __init__(self, reason: str, code: int = DENIED) -> None:
        super().__init__(reason)
        self.code = code


class _Adapter(requests.adapters.HTTPAdapter):
    """Every request has timeouts; oras sets none."""

    def __init__(self, silence_s: float) -> None:
        super().__init__()
        self._timeout = (min(_CONNECT_TIMEOUT_S, silence_s), silence_s)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        return super().send(request, *args, **{**kwargs, "timeout": self._timeout})


class _Provider(oras.provider.Registry):
    """Asks once: oras sleeps up to 120 s between attempts, on a node without internet for nothing."""

    do_request = oras.provider.Registry.do_request.__wrapped__


def fetch(job: Job) -> Blob | None:
    """Returns the manifest, if that is what is described. Raises: Failed."""
    try:
        provider, url = _connect(job)
        if job.describe is not None:
            return _describe(provider, url, job.describe, job.folder)
        for blob in (Blob(*each) for each in job.blobs):
            _save(provider, url, blob, job.folder)
    except (requests.ConnectionError, requests.Timeout) as error:
        raise Failed(_cause(error), UNREACHABLE) from None
    except (requests.RequestException, BadManifest) as error:
        raise Failed(f"it sent {error}" if isinstance(error, BadManifest) else _cause(error)) from None
    return None


def _describe(provider: oras.provider.Registry, url: str, name: str, folder: Path) -> Blob:
    raw = io.BytesIO()
    with _get(provider, f"{url}/manifests/{name}") as response:
        _copy(response, raw, _MAX_MANIFEST_BYTES)
    manifest = parse_manifest(raw.getvalue(), name if ":" in name else None)
    if isinstance(manifest, str):
        return _describe(provider, url, manifest, folder)
    manifest.own.path(folder).write_bytes(raw.getvalue())
    _save(provider, url, manifest.config, folder)
    return manifest.own


def _save(provider: oras.provider.Registry, url: str, blob: Blob, folder: Path) -> None:
    with _get(provider, f"{url}/blobs/{blob.digest}") as response, blob.path(folder).open("wb") as out:
        _copy(response, out, blob.size)


def _copy(response: requests.Response, out: BinaryIO, limit: int) -> None:
    for chunk in response.iter_content(_CHUNK_BYTES):
        out.write(chunk)
        if out.tell() > limit:
            return  # whoever checks the digest will see that it is too long


def _connect(job: Job) -> tuple[oras.provider.Registry, str]:
    """A client with the credentials and the kind of login that the registry asks for, and the repository's address.

    A loopback registry may speak plain HTTP or have any certificate, as with docker.
    """
    loopback = is_loopback(job.host)
    host = _HUB_HOST if job.host == _HUB else job.host
    for insecure in (False, True) if loopback else (False,):
        provider = _provider(job, insecure, "token")
        try:
            ping = provider.session.get(f"{provider.prefix}://{host}/v2/", verify=not loopback)
            break
        except requests.ConnectionError:
            if insecure or not loopback:
                raise
    if ping.status_code in (429, *range(500, 600)):
        raise Failed(f"{ping.status_code} {ping.reason}", UNREACHABLE)
    if ping.headers.get("Www-Authenticate", "").lower().startswith("basic"):
        provider = _provider(job, provider.prefix == "http", "basic")
        if not _log_in(provider, job):
            raise Failed(f"asks for a login: `docker login {job.host}` writes one to docker's config.json")
    else:
        _log_in(provider, job)
    return provider, f"{provider.prefix}://{host}/v2/{job.repository}"


def _provider(job: Job, insecure: bool, auth_backend: str) -> oras.provider.Registry:
    verify = not is_loopback(job.host)
    provider = _Provider(insecure=insecure, tls_verify=verify, auth_backend=auth_backend)
    for scheme in ("http://", "https://"):
        provider.session.mount(scheme, _Adapter(job.silence_s))
    if not verify:
        provider.session.trust_env = False  # no proxy leads to our own loopback
    return provider


def _log_in(provider: oras.provider.Registry, job: Job) -> bool:
    """Whether docker's config file has credentials for the registry, itself or through a helper."""
    if job.docker_config is None:
        return False
    try:
        config = json.loads(Path(job.docker_config).read_bytes())
        provider.auth._auth_config = {"auths": {}, **config}
    except (OSError, ValueError, TypeError) as error:
        raise Failed(f"docker's config file {job.docker_config} cannot be read: {error}") from None
    keys = [_HUB_KEY, _HUB] if job.host == _HUB else [job.host, f"https://{job.host}", f"https://{job.host}/v1/"]
    return any(provider.auth._load_auth(key) for key in keys)


def _get(provider: oras.provider.Registry, url: str) -> requests.Response:
    try:
        response: requests.Response = provider.do_request(url, headers={"Accept": _MANIFESTS}, stream=True)
        if response.status_code == 401 and getattr(provider.auth, "token", None):
            provider.auth.token = None  # run out in the middle of a long pull, which oras does not expect
            response = provider.do_request(url, headers={"Accept": _MANIFESTS}, stream=True)
    except ValueError:  # oras: "Cannot respond to request for authentication."
        raise Failed("unauthorized: it gives this image to nobody without a login in docker's config.json") from None
    if response.status_code != 200:
        with response:
            raise Failed(_said(response), UNREACHABLE if response.status_code in (429, *range(500, 600)) else DENIED)
    return response


def _said(response: requests.Response) -> str:
    """The registry's own words (distribution-spec, "Error Codes"), or the status."""
    try:
        return "; ".join(f"{each['code']}: {each['message']}" for each in response.json()["errors"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def _cause(error: BaseException) -> str:
    """The innermost reason of what requests wraps in pools and retries, in one line."""
    inner: Any = error.args[0] if error.args else error
    inner = getattr(inner, "reason", inner)
    return " ".join(str(inner).split("object at 0x")[-1].split(": ", 1)[-1].split()) or type(error).__name__


def main() -> int:
    logging.disable()
    try:
        job = json.loads(sys.argv[1])
        manifest = fetch(Job(**{**job, "folder": Path(job["folder"])}))
    except Failed as failure:
        sys.stderr.write(f"{failure}\n")
        return failure.code
    if manifest is not None:
        sys.stdout.write(json.dumps([manifest.digest, manifest.size]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
