"""The configuration of an image, as OCI writes it and as records keep it."""

import re
from typing import Any

import pytest

from tbench2_env.server.images.image import Image, ImageConfig

DOCUMENT = {
    "architecture": "amd64",
    "config": {
        "Env": ["PATH=/usr/bin", "A=b=c", "EMPTY="],
        "WorkingDir": "/app",
        "User": "me:users",
        "Shell": ["/bin/bash", "-c"],
        "Entrypoint": ["/init"],
        "Cmd": ["sh"],
    },
}
CONFIG = ImageConfig({"PATH": "/usr/bin", "A": "b=c", "EMPTY": ""}, "/app", "me:users", ("/bin/bash", "-c"))


def test_reading_and_writing() -> None:
    assert ImageConfig.from_oci(DOCUMENT) == CONFIG
    assert ImageConfig.from_oci({"config": CONFIG.to_oci()}) == CONFIG
    assert "Entrypoint" not in CONFIG.to_oci()


@pytest.mark.parametrize("document", [{}, {"config": None}, {"config": {"Env": None, "WorkingDir": "", "User": ""}}])
def test_what_an_image_does_not_say(document: dict[str, Any]) -> None:
    assert ImageConfig.from_oci(document) == ImageConfig()
    assert ImageConfig().to_oci() == {}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([], "config of the image's configuration is a list"),
        ({"Env": "A=b"}, "Env of the image's configuration is a str: 'A=b'"),
        ({"Env": [3]}, "Env of the image's configuration is a int"),
        ({"WorkingDir": 3}, "WorkingDir of"),
    ],
)
def test_nonsense_is_named(config: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ImageConfig.from_oci({"config": config})


def test_an_image_as_a_record() -> None:
    image = Image(("top", "base"), CONFIG, "sha256:ab", "registry.example/x@sha256:ab")
    assert Image.from_record(image.to_record()) == image
    with pytest.raises(ValueError, match="layers"):
        Image.from_record({"layers": "top"})
