"""Image references, against what docker makes of them."""

import pytest

from tbench2_env.server.images.reference import BadReference, Reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "normal", "familiar"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04", "ubuntu:24.04"),
        ("index.docker.io/ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("docker.io/library/python:3.13-slim", "docker.io/library/python:3.13-slim", "python:3.13-slim"),
        ("alexgshaw/fix-git:20251031", "docker.io/alexgshaw/fix-git:20251031", "alexgshaw/fix-git:20251031"),
        (f"ubuntu@{DIGEST}", f"docker.io/library/ubuntu@{DIGEST}", f"ubuntu@{DIGEST}"),
        (f"ubuntu:24.04@{DIGEST}", f"docker.io/library/ubuntu:24.04@{DIGEST}", f"ubuntu:24.04@{DIGEST}"),
        (f"localhost:5000/x@{DIGEST}", f"localhost:5000/x@{DIGEST}", f"localhost:5000/x@{DIGEST}"),
        ("localhost/x", "localhost/x:latest", "localhost/x:latest"),
        ("[::1]:5000/a/b:c", "[::1]:5000/a/b:c", "[::1]:5000/a/b:c"),
        ("ghcr.example/a/b__c/d-e.f:V_1.0", "ghcr.example/a/b__c/d-e.f:V_1.0", "ghcr.example/a/b__c/d-e.f:V_1.0"),
        ("Corp/x", "Corp/x:latest", "Corp/x:latest"),
    ],
)
def test_a_reference_is_normalised_as_docker_does(text: str, normal: str, familiar: str) -> None:
    reference = Reference.parse(text)
    assert str(reference) == normal
    assert reference.familiar == familiar
    assert Reference.parse(normal) == reference


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("Ubuntu", "'library/Ubuntu'"),
        ("ubuntu 24", "'library/ubuntu 24'"),
        ("ubuntu:", "''"),
        ("ubuntu:24 04", "'24 04'"),
        ("ubuntu:a:b", "'a:b'"),
        ("ubuntu:" + "a" * 129, "is no tag"),
        ("ubuntu@sha256:12", "'sha256:12'"),
        ("ubuntu@", "is no digest"),
        ("ex_ample.com/x", "'ex_ample.com'"),
        ("host:port/x", "'host:port'"),
        ("a//b", "'a//b'"),
        ("/b", "'/b'"),
        ("a/", "'a/'"),
        ("a/" + "b" * 255, "255 characters"),
        ("--all", "'library/--all'"),
        ("ubuntu\n", "is no repository"),
    ],
)
def test_what_names_no_image_is_refused_naming_the_part(text: str, part: str) -> None:
    with pytest.raises(BadReference, match=r"^image ") as refusal:
        Reference.parse(text)
    assert part in str(refusal.value)
