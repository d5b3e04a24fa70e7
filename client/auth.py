"""The headers a client sends with every connection, among them its token, which must not end up in a log.

A server that was started with a token answers nobody without it; see `Unauthorized`.
"""

import logging
import os
import re
from collections.abc import Mapping

_TOKEN_VARIABLE = "TB2_AUTH_TOKEN"
_TOKEN = re.compile(r"[!-~]+")
_HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")  # RFC 9110, 5.5
_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})


class Headers(dict[str, str]):
    """Header names and values. The repr has no values, as tracebacks with local variables end up in logs."""

    def __repr__(self) -> str:
        return f"<headers {', '.join(self)}>"


def request_headers(headers: Mapping[str, str] | None, token: str | None) -> Headers:
    """`headers`, and `Authorization: Bearer <token>` unless they have an Authorization of their own.

    Args:
        headers: further ones to send.
        token: None means that of the environment variable TB2_AUTH_TOKEN; an empty one means none.

    Raises:
        ValueError: a value that cannot be a header's (a token with a line end, say). The text does not show it.
    """
    sent = Headers(headers or {})
    for name, value in sent.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"the value of header {name!r} has a character that no header may have")
    token = os.environ.get(_TOKEN_VARIABLE) if token is None else token
    if token and "authorization" not in map(str.lower, sent):
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"token= or {_TOKEN_VARIABLE} has a blank, a line end or a character beyond ASCII")
        sent["Authorization"] = f"Bearer {token}"
    return sent


class _HideSecrets(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case (str(name), _) if name.lower() in _SECRET_HEADERS:
                record.args = (name, "***")
        return True


#: For `websockets`, which at level DEBUG logs the headers it sends, each as `"> %s: %s"`.
ws_logger = logging.getLogger("websockets.client.tbench2_env")
ws_logger.addFilter(_HideSecrets())
