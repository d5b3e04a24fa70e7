#!/bin/bash
python3 - << 'PY'
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def members(name, data):
    if name.endswith(".zip"):
        archive = zipfile.ZipFile(io.BytesIO(data))
        return [(inner, archive.read(inner)) for inner in archive.namelist()]
    if name.endswith(".tar.gz"):
        archive = tarfile.open(fileobj=io.BytesIO(data))
        return [(inner.name, archive.extractfile(inner).read()) for inner in archive if inner.isfile()]
    return []


def needles(way, name, data):
    if name == "needle.txt":
        yield way, data.decode().split()
    for inner, content in members(name, data):
        yield from needles(f"{way}/{inner}", inner, content)


for way, (_, code, _, digest) in needles("vault.zip", "vault.zip", Path("/app/vault.zip").read_bytes()):
    if hashlib.sha256(code.encode()).hexdigest() == digest:
        Path("/app/found.txt").write_text(f"{code}\n{way}\n")
PY
