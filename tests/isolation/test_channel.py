"""Messages with descriptors between the three processes."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest

from tbench2_env.isolation.channel import DESCRIPTORS_MAX, MESSAGE_MAX, Channel, ChannelClosed, close_all
from tbench2_env.isolation.spec import encode

from .rig import own_descriptors


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    before = own_descriptors()
    one, other = (Channel(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.sock.close()
    other.sock.close()
    assert own_descriptors() == before


def test_a_message_arrives_whole_and_alone(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send({"n": 1})
    one.send({"n": 2, "text": "é\0"})
    assert other.receive() == ({"n": 1}, [])
    assert other.receive() == ({"n": 2, "text": "é\0"}, [])


def test_descriptors_arrive_in_order_and_are_not_inherited(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    pipes = [os.pipe() for _ in range(3)]
    one.send({}, [write_end for _, write_end in pipes])
    _, fds = other.receive()
    for number, fd in enumerate(fds):
        assert not os.get_inheritable(fd)
        os.write(fd, b"%d" % number)
    assert [os.read(read_end, 9) for read_end, _ in pipes] == [b"0", b"1", b"2"]
    close_all([*fds, *(fd for pipe in pipes for fd in pipe)])


def test_the_most_descriptors_that_a_message_takes(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send({}, [0] * DESCRIPTORS_MAX)
    _, fds = other.receive()
    assert len(fds) == DESCRIPTORS_MAX
    close_all(fds)


def test_more_descriptors_are_refused_and_not_lost_on_the_way(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends
    with pytest.raises(ValueError, match=str(DESCRIPTORS_MAX)):
        one.send({}, [0] * (DESCRIPTORS_MAX + 1))


def test_the_largest_message(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    message = {"text": "x" * (MESSAGE_MAX - len(encode({"text": ""})))}
    one.send(message)
    assert other.receive() == (message, [])


def test_a_larger_one_is_refused_with_advice_and_nothing_is_sent(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    with pytest.raises(ValueError, match="shorten env or argv"):
        one.send({"text": "x" * MESSAGE_MAX})
    other.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.receive()


def test_a_non_blocking_end_says_when_the_other_is_slow(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.sock.setblocking(False)
    sent = send_until_full(one)
    assert sent > 0
    assert [other.receive()[0]["n"] for _ in range(sent)] == list(range(sent))


def send_until_full(channel: Channel) -> int:
    for number in itertools.count():
        try:
            channel.send({"n": number, "text": "x" * 10_000})
        except BlockingIOError:
            return number
    raise AssertionError


@pytest.mark.parametrize("unread", [False, True])
def test_a_closed_channel(ends: tuple[Channel, Channel], unread: bool) -> None:
    one, other = ends
    if unread:
        one.send({})  # the peer's close is then a reset
    other.sock.close()
    with pytest.raises(ChannelClosed):
        one.receive()
    with pytest.raises((OSError, ChannelClosed)):
        one.send({})


def test_what_was_sent_before_the_close_is_read_first(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    other.send({"last": "words"})
    other.sock.close()
    assert one.receive() == ({"last": "words"}, [])
    with pytest.raises(ChannelClosed):
        one.receive()
