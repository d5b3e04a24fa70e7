"""ADD of a URL: the download, after which the file is copied like any other."""

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from tbench2_env.server.images.dockerfile_syntax import DockerfileError
from tbench2_env.server.images.steps import Download
from tbench2_env.server.threads import Stop

_CHUNK = 1 << 16
#: How long a server may say nothing.
_SILENCE_S = 60.0


def fetch(step: Download, folder: Path, timeout_s: float, stop: Stop) -> None:
    """Download into the empty `folder`, as `step.copy` takes it from there. A server may be silent for `timeout_s`.

    Raises:
        DockerfileError: naming the line: nothing came, or not all, or not what `checksum` says.
        Stopped: by `stop`.
    """
    file = folder / step.name
    try:
        with file.open("xb") as out:
            _download(step.url, out, min(timeout_s, _SILENCE_S), stop)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the answer, too, and holds the connection
        reason = str(error) or type(error).__name__
        raise DockerfileError(step.line, f"ADD: {step.url} cannot be downloaded: {reason}") from None
    file.chmod(0o600)  # what docker gives it
    _check(step, file)


def _download(url: str, out: BinaryIO, timeout_s: float, stop: Stop) -> None:
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        while chunk := response.read1(_CHUNK):
            stop.check()
            out.write(chunk)
        # Python takes a connection that ends too early for the end of the file.
        if response.length:
            raise OSError(f"the connection was lost {response.length} bytes before its end")


def _check(step: Download, file: Path) -> None:
    if step.checksum is None:
        return
    algorithm, _, wanted = step.checksum.partition(":")
    if algorithm != "sha256":
        raise DockerfileError(step.line, f"ADD: --checksum={step.checksum}: only sha256 is known")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wanted.lower():
        raise DockerfileError(step.line, f"ADD: {step.url} has the checksum sha256:{found}, not {step.checksum}")
