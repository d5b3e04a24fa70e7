"""Output kept within a bound; the pipe that feeds it."""

import asyncio
import os
import re

from hypothesis import given
from hypothesis import strategies as st

from tbench2_env.server.output import Capture, Reader, open_pipe, pipe_size, to_text

PORTIONS = st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\x1b", b".")), max_size=30)
LIMITS = st.integers(2, 200)


def captured(portions: list[bytes], limit: int) -> Capture:
    capture = Capture(limit)
    for portion in portions:
        capture.feed(portion)
    return capture


def replaced(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


@given(PORTIONS, LIMITS)
def test_head_and_tail_are_kept_exactly_and_the_cut_is_counted(portions: list[bytes], limit: int) -> None:
    data, half = b"".join(portions), limit // 2
    capture = captured(portions, limit)
    assert capture.total == len(data)
    cut = len(data) - 2 * half
    if cut <= 0:
        assert capture.text() == replaced(data)
    else:
        cut_line = f"\n[... {cut} bytes of output cut ...]\n"
        assert capture.text() == replaced(data[:half]) + cut_line + replaced(data[-half:])


@given(PORTIONS, LIMITS)
def test_how_the_output_was_portioned_does_not_matter(portions: list[bytes], limit: int) -> None:
    assert captured(portions, limit).text() == captured([b"".join(portions)], limit).text()


@given(st.lists(st.binary(max_size=40), max_size=30), LIMITS)
def test_any_bytes_become_text_that_can_be_sent(portions: list[bytes], limit: int) -> None:
    captured(portions, limit).text().encode()


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(2, 3000))
def test_memory_is_bounded(sizes: list[int], limit: int) -> None:
    capture = Capture(limit)
    for size in sizes:
        capture.feed(b"x" * size)
        assert len(capture._tail) + len(capture._head) <= 2 * limit


@given(st.text(alphabet="é漢🙂", min_size=50, max_size=60), st.integers(2, 40))
def test_a_cut_in_the_middle_of_a_character_is_no_error(text: str, limit: int) -> None:
    kept = captured([text.encode()], limit).text()
    assert re.search(r"\[\.\.\. \d+ bytes of output cut \.\.\.\]", kept)
    head = kept.split("\n")[0].rstrip("�")
    assert text.startswith(head)


@given(PORTIONS, PORTIONS, LIMITS)
def test_taking_starts_anew(first: list[bytes], then: list[bytes], limit: int) -> None:
    capture = captured(first, limit)
    assert capture.take() == captured(first, limit).text()
    for portion in then:
        capture.feed(portion)
    assert capture.text() == captured(then, limit).text()


def test_escapes_are_removed_and_text_is_not() -> None:
    cases = {
        b"\x1b[1;31mred\x1b[0m": "red",
        b"\x1b[?25l\x1b[2J\x1b[Hx\x1b[10;20Hy": "xy",
        b"\x1b]0;title\x07after": "after",
        b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
        b"\x1bPq#0\x1b\\sixel": "sixel",
        b"\x1b(B\x1b=\x1b>\x1b7\x1b8x": "x",
        b"a [31m b ]0; c": "a [31m b ]0; c",
        b"tab\tcr\r\n": "tab\tcr\r\n",
    }
    assert {data: to_text(data) for data in cases} == cases


@given(st.text(alphabet="\x1b[]();?0123456789mHKPX\\\x07\n ab~"))
def test_removing_escapes_never_fails_and_only_removes(text: str) -> None:
    left = iter(text)
    assert all(char in left for char in to_text(text.encode()))


# ---------------------------------------------------------------- the reader
async def test_a_reader_feeds_all_and_ends() -> None:
    read_end, write_end = open_pipe()
    capture = Capture(1 << 20)
    reader = Reader(read_end, capture.feed)
    os.write(write_end, b"one")
    os.close(write_end)
    await asyncio.wait_for(reader.ended.wait(), 5)
    assert (capture.text(), reader.closed) == ("one", True)
    reader.close()


async def test_finishing_takes_what_is_there_and_drops_the_rest() -> None:
    read_end, write_end = open_pipe()
    capture = Capture(1 << 20)
    reader = Reader(read_end, capture.feed)
    size = pipe_size(write_end)
    os.write(write_end, b"x" * size)
    reader.finish()
    assert capture.total == size
    os.set_blocking(write_end, False)
    written = 0
    async with asyncio.timeout(10):
        while written < 3 * size:  # somebody still empties the pipe
            try:
                written += os.write(write_end, b"y" * 4096)
            except BlockingIOError:
                await asyncio.sleep(0.01)
    assert capture.total == size
    os.close(write_end)
    await asyncio.wait_for(reader.ended.wait(), 5)


async def test_a_closed_reader_stays_closed() -> None:
    read_end, write_end = open_pipe()
    reader = Reader(read_end, lambda data: None)
    reader.close()
    reader.close()
    reader.finish()
    assert reader.closed
    os.close(write_end)
