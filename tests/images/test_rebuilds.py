"""What of a build is made again and what is not: after an edit, a failure, a kill, damage, and with many at once."""

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.building import Builders, Ledger, Workshop, leftovers, settings_of, workshop
from support.processes import is_running
from support.server import descendants, eventually
from tbench2_env.isolation.process import SandboxError
from tbench2_env.server.snapshots import Snapshot
from tbench2_env.server.taskconfig import TaskError

from .conftest import StartWorkshop

STAMP = "cat /proc/sys/kernel/random/uuid"


async def stamps(shop: Workshop, snapshot: Snapshot) -> list[str]:
    """What each RUN came up with when it was executed."""
    return await shop.run(snapshot, "cat /stamp/*")


# ---------------------------------------------------------------- edits
EDITED = f"""
RUN mkdir /stamp && {STAMP} >/stamp/1
COPY a.txt /a.txt
RUN {STAMP} >/stamp/2
RUN {STAMP} >/stamp/3
"""


async def test_an_edit_rebuilds_what_comes_after(shop: Workshop, start_workshop: StartWorkshop) -> None:
    files = {"a.txt": "a"}
    first = await stamps(shop, await shop.build(EDITED, files))
    assert len(set(first)) == 3
    other = await start_workshop()  # another life of the server
    assert await stamps(other, await other.build(EDITED, files, name="other")) == first
    assert await stamps(shop, await shop.build(EDITED, {**files, "b.txt": "b", "sub/c": "c"})) == first
    spaced = "# a comment\n\n" + EDITED.replace("RUN", "run").replace("COPY a.txt", "COPY  a.txt") + 'CMD ["x"]\n'
    assert await stamps(shop, await shop.build(spaced, files)) == first
    last = await stamps(shop, await shop.build(EDITED.replace(">/stamp/3", " >/stamp/3"), files))
    assert last[:2] == first[:2]
    assert last[2] != first[2]
    copied = await stamps(shop, await shop.build(EDITED, {"a.txt": "b"}))
    assert copied[0] == first[0]
    assert not set(copied[1:]) & set(first)
    assert await stamps(shop, await shop.build(EDITED, files)) == first, "what was built before is still there"
    variable = await stamps(shop, await shop.build(f"ENV X=1\n{EDITED}", files))
    assert not set(variable) & set(first)


async def test_an_edited_base(shop: Workshop, tiny: Path, tmp_path: Path, start_workshop: StartWorkshop) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base, symlinks=True)
    shops = [await start_workshop(bases=f"tiny={base}")]
    first = await stamps(shops[0], await shops[0].build(EDITED, {"a.txt": "a"}))
    (base / "etc/new").write_text("new")
    shops.append(await start_workshop(bases=f"tiny={base}"))
    second = await stamps(shops[1], await shops[1].build(EDITED, {"a.txt": "a"}))
    assert not set(first) & set(second)


# ---------------------------------------------------------------- failures
async def test_a_failing_step(shop: Workshop) -> None:
    good = f"RUN mkdir /stamp && {STAMP} >/stamp/1\n"
    bad = "RUN seq 100 && \\\n    echo oops >&2; exit 7\n"
    with pytest.raises(TaskError) as caught:
        await shop.build(good + bad)
    text = str(caught.value)
    assert "environment/Dockerfile line 3: RUN seq 100 && echo oops >&2; exit 7: ended with exit code 7" in text
    assert "the last 50 lines of its output" in text
    assert text.splitlines()[-50:] == [*map(str, range(52, 101)), "oops"]
    log = Path(text.partition("(all: ")[2].partition(")")[0])
    assert log.read_text().splitlines()[-101:] == [*map(str, range(1, 101)), "oops"]
    assert leftovers(shop.store) == []
    before = {each.note["created_by"]: each.id for each in shop.store.usage() if "created_by" in each.note}
    await shop.build(good + "RUN true\n")
    after = {each.note["created_by"]: each.id for each in shop.store.usage() if "created_by" in each.note}
    assert before.items() <= after.items()
    assert len(before) == 1


CANNOT = (
    ("RUN nothing-like-it", r"exit code 127.*\n.*nothing-like-it: not found"),
    ('RUN ["nothing-like-it"]', r"exit code 127.*\n.*nothing-like-it: not found"),
    ('RUN ["/no/such"]', "line 4: RUN .*cannot be started: /no/such: .*No such file"),
    ("RUN kill -9 $$", "exit code 137; it printed nothing"),
    ("COPY missing /x", "line 4: COPY: missing: not in the build context"),
    ("COPY --from=tiny /missing /x", "line 4: COPY: /missing: not in the stage or image"),
    ("WORKDIR /etc/passwd", "line 4: WORKDIR: .*no directory"),
    ("COPY --chown=ghost a.txt /x", "line 4: COPY: user ghost"),
)


async def test_what_cannot_be_done(shop: Workshop) -> None:
    for line, said in CANNOT:
        with pytest.raises(TaskError, match=said):
            await shop.build(f"RUN true\n\n{line}\n", {"a.txt": "a"})


@pytest.mark.parametrize(
    "line", ["RUN --mount=type=secret,id=x true", "ONBUILD RUN true", "ADD https://x/y.git /x", "RUNN true"]
)
async def test_what_is_not_supported_is_told_first(start_workshop: StartWorkshop, reports: Ledger, line: str) -> None:
    shop = await start_workshop(network="host")
    with pytest.raises(TaskError, match=f"line 5: {line.split()[0]}: "):
        await shop.build(f"FROM tiny AS one\n{reports.run('one')}\nFROM tiny\n{line}\nCOPY --from=one /etc /x\n")
    assert reports.lines == []


async def test_the_time_of_a_build(shop: Workshop) -> None:
    toml = "[environment]\nbuild_timeout_sec = 1.0\n"
    begun = time.monotonic()
    with pytest.raises(TaskError, match=r"line 3: RUN sleep 60: .* 1 s \(environment.build_timeout_sec in task.toml\)"):
        await shop.build("RUN true\nRUN sleep 60\n", toml=toml)
    assert time.monotonic() - begun < 3
    shop.assert_idle()
    assert len([each for each in shop.store.usage() if each.note.get("created_by") == "RUN true"]) == 1


async def test_a_step_that_takes_too_much(shop: Workshop) -> None:
    """The limits of the task's storage and of processes hold for each RUN."""
    fill = "RUN for i in $(seq 300); do cat /mib >>/big; done; sleep 10\n"
    with pytest.raises(TaskError, match=r"line 3: RUN for i in .*was ended: .*storage"):
        await shop.build(f"COPY mib /\n{fill}", {"mib": bytes(1 << 20)}, toml="[environment]\nstorage_mb = 1\n")
    assert leftovers(shop.store) == []


# ---------------------------------------------------------------- many at once
async def test_many_callers_in_one_engine_build_once(start_workshop: StartWorkshop, reports: Ledger) -> None:
    shop = await start_workshop(network="host")
    task = shop.task(reports.run("one") + reports.run("two"))
    reports.holds = "one"
    takes = [asyncio.create_task(shop.engine.snapshots.take(task)) for _ in range(16)]
    await asyncio.to_thread(eventually, lambda: reports.lines == ["one"], 10)
    takes[0].cancel()
    await asyncio.sleep(0.05)
    reports.let_go()
    with pytest.raises(asyncio.CancelledError):
        await takes[0]
    taken = await asyncio.gather(*takes[1:])
    assert len({snapshot.name for snapshot, _ in taken}) == 1
    for _, lease in taken:
        lease.close()
    assert reports.lines == ["one", "two"]


async def test_two_tasks_build_once_what_they_share(start_workshop: StartWorkshop, reports: Ledger) -> None:
    shop = await start_workshop(network="host")
    shared = reports.run("shared")
    tasks = [shop.task(shared + reports.run(name), name=name) for name in ("a", "b")]
    await asyncio.gather(*map(shop.engine.snapshots.get, tasks))
    assert sorted(reports.lines) == ["a", "b", "shared"]


async def test_a_server_that_stops_ends_its_builds(tmp_path: Path, tiny: Path, reports: Ledger) -> None:
    """Whoever waits for one is told, or gets it from the next engine."""
    settings = settings_of(tmp_path, tiny, network="host")
    reports.holds = "two"
    async with workshop(settings, tmp_path) as shop:
        building = asyncio.create_task(shop.build(reports.run("one") + reports.run("two")))
        await asyncio.to_thread(eventually, lambda: "two" in reports.lines, 10)
        begun = time.monotonic()
        await shop.engine.snapshots.stop()
        assert time.monotonic() - begun < 2
        with pytest.raises(SandboxError, match="the engine was stopped"):
            await building
        shop.assert_idle()
    reports.holds = ""
    async with workshop(settings, tmp_path) as shop:
        await shop.build(reports.run("one") + reports.run("two"))
    assert reports.lines == ["one", "two", "two"]


async def test_many_processes_build_once(tmp_path: Path, tiny: Path, reports: Ledger) -> None:
    settings = settings_of(tmp_path, tiny, network="host")
    async with workshop(settings, tmp_path) as shop:
        task = shop.task("".join(map(reports.run, ("one", "two", "three"))))
        with Builders(settings, task) as builders:
            said = await asyncio.to_thread(builders.start_together, 8)
        assert {line.rpartition(" ")[0] for line in said} == {"built 1"}, said
        await shop.engine.snapshots.get(task)
        assert reports.lines == ["one", "two", "three"]
        assert leftovers(shop.store) == []


async def test_a_build_killed_at_each_step_goes_on(tmp_path: Path, tiny: Path, reports: Ledger) -> None:
    settings = settings_of(tmp_path, tiny, network="host")
    words = ["1", "2", "3", "4", "5"]
    async with workshop(settings, tmp_path) as shop:
        task = shop.task("".join(reports.run(word, f"echo {word} >>/done") for word in words))
        with Builders(settings, task) as builders:
            for word in words:
                reports.holds = word
                await asyncio.to_thread(kill_while, builders, reports, word)
        reports.holds = ""
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        snapshot = await shop.engine.snapshots.get(task)
        assert await shop.run(snapshot, "cat /done") == words
        assert reports.lines == ["1", *(each for pair in itertools.pairwise(words) for each in pair), "5"]
        assert leftovers(shop.store) == []


def kill_while(builders: Builders, reports: Ledger, word: str) -> None:
    """Kill a builder while it carries out the step that reports `word`; no process of it is left."""
    count, builder = reports.lines.count(word), builders.start()
    eventually(lambda: reports.lines.count(word) > count, 20)
    pids = [builder, *(below := descendants(builder))]
    assert any("bash" in line for line in below.values())
    os.kill(builder, signal.SIGKILL)
    eventually(lambda: not any(map(is_running, pids)), 5)
    reports.let_go()


# ---------------------------------------------------------------- damage, and room
DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda root: (root / "data").write_text("x" * 100),
    "cut off": lambda root: os.truncate(root / "data", 7),
    "removed": lambda root: (root / "data").unlink(),
    "added": lambda root: (root / "more").write_text("x"),
    "gone": lambda root: shutil.rmtree(root),
    "layer.json gone": lambda root: root.with_name("layer.json").unlink(),
}


async def test_damaged_layers_are_made_anew(start_workshop: StartWorkshop, tmp_path: Path, tiny: Path) -> None:
    """And nothing is made of them: neither what came after is lost, nor is a new step carried out on them."""
    dockerfile = f"""RUN mkdir /stamp; {STAMP} >/stamp/1; : {{}}
RUN seq -s '' 100 >/data; {STAMP} >/stamp/2
RUN {STAMP} >/stamp/3
"""
    first: dict[str, list[str]] = {}
    async with workshop(settings_of(tmp_path, tiny), tmp_path) as before:
        for how, damage in DAMAGES.items():
            snapshot = await before.build(dockerfile.format(how))
            first[how] = await stamps(before, snapshot)
            damage(before.store.root(snapshot.environment.layers[1]))
    shop = await start_workshop()
    for how in DAMAGES:
        snapshot = await shop.build(f"{dockerfile.format(how)}RUN cat /data >/copy || true\n")
        second = await stamps(shop, snapshot)
        assert [old == new for old, new in zip(first[how], second, strict=True)] == [True, False, True], how
        assert [len(line) for line in await shop.run(snapshot, "cat /data; cat /copy")] == [192, 192], how


async def test_room_is_made_of_what_is_unused(start_workshop: StartWorkshop) -> None:
    """A task in use keeps its layers; the others' go, and are built again when they are wanted."""
    shop = await start_workshop(store_max_gb=1e-6)
    stamped = f"RUN mkdir /stamp; {STAMP} >/stamp/1\nRUN {STAMP} >/stamp/2\n"
    used, lease = await shop.engine.snapshots.take(shop.task("RUN echo used >/a\n", name="used"))
    with lease:
        sandbox = await shop.open(used)
        other = await shop.build(stamped, name="other")
        first = await stamps(shop, other)
        third = await shop.build("RUN echo third >/a\n", name="third")
        assert await shop.run(third, "cat /a") == ["third"]
        kept = {each.id for each in shop.store.usage()}
        assert kept >= set(used.environment.layers)
        assert not kept & set(other.environment.layers[:-1])
        again, other_lease = await shop.engine.snapshots.take(shop.task(stamped, name="other"))
        with other_lease:
            second = await stamps(shop, again)
        assert len({*first, *second}) == 4
        await sandbox.destroy()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """`read_only()` answers with the cache folder of the workshops as a disk that nobody can write to."""
    shared = tmp_path / "shared"
    shared.mkdir()

    with ExitStack() as stack:

        def mount() -> Path:
            subprocess.run(["mount", "--bind", tmp_path / "cache", shared], check=True)
            stack.callback(lambda: subprocess.run(["umount", shared], check=True))
            subprocess.run(["mount", "-o", "remount,bind,ro", shared], check=True)
            return shared

        yield mount


async def test_a_store_on_a_disk_that_can_only_be_read(
    start_workshop: StartWorkshop, tmp_path: Path, tiny: Path, read_only: Callable[[], Path]
) -> None:
    """What is in it is used, whatever the room; for what is not, somebody else must build it."""
    dockerfile = "RUN echo x >/a\nWORKDIR /w\n"
    async with workshop(settings_of(tmp_path, tiny), tmp_path) as before:
        await before.build(dockerfile)
    settings = settings_of(tmp_path, tiny, own_cache_dir=read_only(), store_max_gb=1e-6)
    async with workshop(settings, tmp_path) as shop:
        assert await shop.built(dockerfile, "cat /a; pwd") == ["x", "/w"]
        with pytest.raises(TaskError, match=r"environment cannot be stored: .*cannot be written to.*TB2_CACHE_DIR"):
            await shop.build(f"{dockerfile}RUN true\n")
