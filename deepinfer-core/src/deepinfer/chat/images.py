"""An image as a caller gives it: a path, bytes, a data URL or an open picture."""

from __future__ import annotations

import base64
import os
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from deepinfer.chat.interface import ChatImage
from deepinfer.chat.messages import refuse


def image_of(where: str, given: Any) -> ChatImage:
    """What a caller gave as an image.

    Args:
        where: names its part of the messages, for errors.
        given: a path, the encoded picture, its data URL, or an image of Pillow.

    Raises:
        InvalidRequestError: it is something else.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return ChatImage(where, data=bytes(given))
    if isinstance(given, os.PathLike):
        return ChatImage(where, path=Path(given))
    if hasattr(given, "convert") and hasattr(given, "save"):
        return ChatImage(where, data=_encoded(where, given))
    if not isinstance(given, str):
        refuse(where, f"holds {type(given).__name__}; an image is a path, bytes or a data URL")
    scheme = given[:8].lower()  # of any case, as RFC 3986 has it
    if scheme.startswith("data:"):
        return ChatImage(where, data=_data_url(where, given))
    if scheme.startswith(("http://", "https://")):
        refuse(where, "is a web address, and the engine fetches nothing", "Pass the bytes.")
    if scheme.startswith("file://"):
        given = unquote(given[len("file://") :])
    return ChatImage(where, path=Path(given))


def _encoded(where: str, picture: Any) -> bytes:
    """A picture of Pillow, without loss."""
    file = BytesIO()
    try:
        picture.convert("RGB").save(file, "PNG")
    except Exception as why:  # a file that it reads only now, in one of many formats
        refuse(where, f"is a picture that cannot be read: {why}")
    return file.getvalue()


def _data_url(where: str, url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        refuse(where, "is a data URL without data")
    coded = head.lower().endswith(";base64")
    try:
        return base64.b64decode(body, validate=True) if coded else unquote_to_bytes(body)
    except ValueError as why:  # binascii.Error, and what stands for letters that ASCII lacks
        refuse(where, f"is a data URL that {'is not base64' if coded else 'holds no bytes'}: {why}")
