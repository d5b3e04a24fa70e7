"""Image references, normalised as docker does: github.com/distribution/reference, reference.go and normalize.go.

The `oras` package's own parser takes `localhost/x` for Docker Hub's and any text for a name, so it is not used.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

DOCKER_HUB = "docker.io"
_DOMAIN = re.compile(r"(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]+)?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_NAME = 255


class BadReference(ValueError):
    """What should name an image does not; the text says which part and what is allowed."""


@dataclass(frozen=True)
class Reference:
    """One image: `registry` host[:port], `repository` a/b, and a tag, a digest or both (the digest then decides)."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: BadReference."""
        rest, at, digest = text.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            raise BadReference(f"image {text!r}: {digest!r} is no digest: sha256: and 64 hexadecimal digits")
        head, slash, tail = rest.rpartition("/")
        last, colon, tag = tail.partition(":")
        if colon and not _TAG.fullmatch(tag):
            raise BadReference(f"image {text!r}: {tag!r} is no tag: at most 128 letters, digits, '_', '.' and '-'")
        registry, repository = _split(head + slash + last)
        if not _DOMAIN.fullmatch(registry):
            raise BadReference(f"image {text!r}: {registry!r} is no registry: a host name or address, and :port")
        if not _REPOSITORY.fullmatch(repository) or len(f"{registry}/{repository}") > _MAX_NAME:
            raise BadReference(
                f"image {text!r}: {repository!r} is no repository: lower-case letters and digits, separated by "
                f"'.', '_', '-' and '/', and at most {_MAX_NAME} characters with the registry"
            )
        return cls(registry, repository, tag if colon else None if at else "latest", digest if at else None)

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    @property
    def familiar(self) -> str:
        """As people write it: `ubuntu:24.04` for docker.io/library/ubuntu:24.04."""
        return str(self).removeprefix(f"{DOCKER_HUB}/").removeprefix("library/")

    def at(self, digest: str) -> Self:
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def _split(name: str) -> tuple[str, str]:
    """Registry and repository. The first part is a registry if no repository could be called so."""
    first, slash, rest = name.partition("/")
    if not slash or not (set(".:[") & set(first) or first == "localhost" or first != first.lower()):
        first, rest = DOCKER_HUB, name
    if first == f"index.{DOCKER_HUB}":
        first = DOCKER_HUB
    return first, rest if first != DOCKER_HUB or "/" in rest else f"library/{rest}"
