"""Makes the generated fixtures of the sample tasks, the same bytes every time: `python3 make_fixtures.py`.

The expected answers come from what is planted here, not from running a solution. Compressed files may differ with
another zlib or git; their content does not.
"""

import gzip
import hashlib
import io
import json
import os
import random
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


# ---- mend-repo: a bundle with main, irrigation and a commit that no branch reaches

PLAN = (
    "bed 1: beans, water {0} min\nbed 2: leeks, water 10 min\nbed 3: {1}, water {2} min\nbed 4: rhubarb, water 5 min\n"
)
README = "# Garden\n\nplan.txt says what grows where, and for how long it is watered.\n"
TOOLS = "spade\nrake\nhoe\n"
SEEDS = "beans 40 g\nleeks 2 g\ncarrots 3 g\n"


def commit(ref: str, mark: int, parent: int, when: int, title: str, files: dict[str, str]) -> str:
    """One commit of a git fast-import stream."""
    lines = [f"commit {ref}", f"mark :{mark}", f"committer Ines Moor <ines@garden.example> {when} +0000"]
    lines += [f"data {len(title) + 1}", title]
    lines += [f"from :{parent}"] if parent else []
    for name, text in files.items():
        lines += [f"M 100644 inline {name}", f"data {len(text)}", text]
    return "\n".join(lines) + "\n"


def mend_repo() -> None:
    start, main, branch, lost = 1899800000, "refs/heads/main", "refs/heads/irrigation", "refs/lost/seeds"
    stream = "".join(
        [
            commit(main, 1, 0, start, "Plan the beds", {"README.md": README, "plan.txt": PLAN.format(10, "empty", 0)}),
            commit(main, 2, 1, start + 100, "List the tools", {"tools.txt": TOOLS}),
            commit(lost, 3, 2, start + 200, "Add the seed list", {"seeds.txt": SEEDS}),
            commit(main, 4, 2, start + 300, "Carrots in bed 3", {"plan.txt": PLAN.format(10, "carrots", 0)}),
            commit(branch, 5, 2, start + 400, "Water bed 3", {"plan.txt": PLAN.format(10, "empty", 15)}),
            commit(branch, 6, 5, start + 500, "Beans are thirsty", {"plan.txt": PLAN.format(20, "empty", 15)}),
        ]
    )
    bundle = (HERE / "mend-repo/environment/garden.bundle").resolve()
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder, "-c", "pack.threads=1"]
        subprocess.run([*git, "init", "--quiet", "--bare", "--initial-branch=main"], check=True)
        subprocess.run([*git, "fast-import", "--quiet"], input=stream.encode(), check=True)
        subprocess.run([*git, "bundle", "create", "--quiet", str(bundle), "HEAD", main, branch, lost], check=True)
    (HERE / "mend-repo/tests/plan.txt").write_text(PLAN.format(20, "carrots", 15))
    (HERE / "mend-repo/tests/seeds.txt").write_text(SEEDS)


# ---- log-sleuth: 2,000 lines of an access log, one break-in, a few broken lines


def log_sleuth() -> None:
    rng = random.Random("log-sleuth")
    clients = [f"10.4.{rng.randrange(8)}.{rng.randrange(2, 250)}" for _ in range(40)]
    intruder, loser, forgetful, patient = "10.4.9.77", "10.4.9.12", "10.4.9.31", "10.4.9.58"
    taken = ["/vault/index", "/vault/keys.pem", "/vault/plans/7"]
    script: list[tuple[int, str, str, str, int]] = []  # second of the day, client, method, path, status
    script += [(34000 + 9 * n, loser, "POST", "/login", 401) for n in range(14)]  # never gets in
    script += [(33000 + 7 * n, forgetful, "POST", "/login", 401) for n in range(7)]  # seven only, then in
    script += [(33060, forgetful, "POST", "/login", 200), (33075, forgetful, "GET", "/vault/index", 200)]
    script += [(36000 + 40 * n, patient, "POST", "/login", 200 if n % 4 == 3 else 401) for n in range(16)]
    script += [(35210 + 11 * n, intruder, "POST", "/login", 401) for n in range(11)]
    script += [(35215, intruder, "GET", "/vault/index", 403)]
    script += [(35400, intruder, "POST", "/login", 200)]
    script += [(35410 + 20 * n, intruder, "GET", path, 200) for n, path in enumerate(taken)]
    script += [(35420, intruder, "GET", "/vault/old", 404)]
    paths = [f"/shop/item/{n}" for n in range(1, 60)] + ["/", "/about", "/shop", "/search?q=lamp"]
    busiest = 37860  # 10:31
    for _ in range(1995 - len(script)):
        second = busiest + rng.randrange(60) if rng.random() < 0.03 else 30000 + rng.randrange(12000)
        status = rng.choices([200, 304, 404, 500], [80, 12, 6, 2])[0]
        script.append((second, rng.choice(clients), "GET", rng.choice(paths), status))
    lines, sent, minutes = [], 0, Counter()
    for second, client, method, path, status in sorted(script, key=lambda entry: entry[0]):
        size = 0 if status == 304 else rng.randrange(120, 9000)
        stamp = f"2031-04-07T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"
        lines.append(f"{stamp} {client} {method} {path} {status} {size}")
        sent += size if status == 200 else 0
        minutes[stamp[:16]] += 1
    (top, most), (_, second_most) = minutes.most_common(2)
    assert most > second_most
    for at in (150, 611, 978, 1404, 1877):  # a crashed writer: cut in the middle of a field
        lines.insert(at, lines[at][: rng.randrange(22, 40)])
    (HERE / "log-sleuth/environment/access.log").write_text("\n".join(lines) + "\n")
    expected = {
        "requests": 1995,
        "broken": 5,
        "bytes_ok": sent,
        "busiest_minute": top,
        "intruder": intruder,
        "taken": taken,
    }
    (HERE / "log-sleuth/tests/expected.json").write_text(json.dumps(expected, indent=1) + "\n")


# ---- pixel-count: a picture whose rows are padded, and the histogram of its pixels


def pixel_count() -> None:
    rng = random.Random("pixel-count")
    width, height = 61, 47
    stride = -(-width // 4) * 4
    counts, rows = Counter(), b""
    for y in range(height):
        row = bytes((x * x // 9 + y * 3 + rng.randrange(3)) % 200 for x in range(width))
        counts.update(row)
        rows += row + bytes(rng.choice((0, 7, 255)) for _ in range(stride - width))
    header = b"PXF1" + struct.pack("<HHHH", width, height, stride, 24) + bytes.fromhex("0a1b2c3d4e5f6071 82930000")
    assert len(header) == 24
    (HERE / "pixel-count/environment/frame.bin").write_bytes(header + rows + b"END\x00\x07\x07")
    histogram = struct.pack("<256I", *(counts[value] for value in range(256)))
    (HERE / "pixel-count/tests/fixtures/histogram.bin").write_bytes(histogram)


# ---- elsewhere: crates and a shelf to be stamped


def elsewhere() -> None:
    rng = random.Random("elsewhere")
    context, lines = HERE / "elsewhere/environment", []
    names = [f"crate-{n:02}.txt" for n in (1, 2, 3, 10)] + ["shelf/low/rope", "shelf/low/tar pot", "shelf/high/lamp"]
    for name in names:
        text = "".join(f"{rng.randrange(1, 90)} x {rng.choice(('nail', 'hinge', 'bolt', 'ring'))}\n" for _ in range(5))
        (context / name).write_text(text)
        where = name if name.startswith("shelf/") else f"crates/{name}"
        lines.append(f"{where}\tKB7-autumn-{hashlib.sha256(text.encode()).hexdigest()[:12]}\n")
    (context / "crate-notes.draft").write_text("The glob in the Dockerfile leaves this one behind.\n")
    (HERE / "elsewhere/tests/manifest.tsv").write_text("".join(sorted(lines)))


# ---- needle-archive: archives in archives, thirteen needles, one of them genuine


def as_zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2031, 1, 2, 3, 4, 6)), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def as_tar_gz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def needle_archive() -> None:
    rng = random.Random("needle-archive")

    def needle(genuine: bool = False) -> bytes:
        code = "".join(rng.choices("abcdefghjkmnpqrstuvwxyz23456789", k=16))
        digest = hashlib.sha256(code.encode() if genuine else code.upper().encode()).hexdigest()
        return f"code: {code}\nsha256: {digest}\n".encode()

    found, crates = b"", {"read.me": b"Mind the tins.\n"}
    for crate in range(1, 5):
        boxes = {f"straw-{n}.txt": ("straw " * rng.randrange(5, 40)).encode() for n in (1, 2)}
        for box in range(1, 4):
            contents = {"needle.txt": needle(), "label.txt": f"box {box} of crate {crate}\n".encode()}
            if (crate, box) == (3, 2):
                found = needle(genuine=True)
                contents["tin.tar.gz"] = as_tar_gz({"thimble.txt": b"silver\n", "needle.txt": found})
            boxes[f"box-{box}.zip"] = as_zip(contents)
        crates[f"crate-{crate}.tar.gz"] = as_tar_gz(boxes)
    (HERE / "needle-archive/environment/vault.zip").write_bytes(as_zip(crates))
    code = found.decode().split()[1]
    answer = f"{code}\nvault.zip/crate-3.tar.gz/box-2.zip/tin.tar.gz/needle.txt\n"
    (HERE / "needle-archive/tests/found.txt").write_text(answer)


if __name__ == "__main__":
    os.environ.update(GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=os.devnull)
    for make in (mend_repo, log_sleuth, pixel_count, elsewhere, needle_archive):
        make()
