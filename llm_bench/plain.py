"""The text of plain events: those that say nothing but more content of choice 0, as most events of a stream do.

They differ in nothing but that text, so one is parsed and the others are cut around it, many at a time.
"""

import re
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import and_, itemgetter

import orjson

from llm_bench.protocol import Dialect

_UNPLAIN = re.compile(rb'["\\\x00-\x1f]')  # ends a JSON string, begins an escape, or may not stand in one
_NUL = b"\\u0000"
_LESSONS = 8  # times that a reader tries to cut many at a time: some servers change a field each event


def plain_reader(
    dialect: Dialect, data_of: Callable[[bytes], bytes] = bytes
) -> Callable[[Sequence[bytes], int], list[str]]:
    """(events, place) -> the texts of the plain events that follow each other from that place on; for one stream.

    `data_of`: the data of an event that comes in its framing.

    The reader knows what stands around the text in the last event that `dialect.plain` has read. An event that begins
    and ends with the same, and has a JSON string's inside between, is the same JSON but for that one string.
    """
    plain, key = dialect.plain, dialect.text_key
    before = after = b""
    lessons = 0

    def one(data: bytes) -> str | None:
        if key not in data:  # as where a stream ends: cheaper than to read it for nothing
            return None
        if before and len(data) > len(before) + len(after) and data.startswith(before) and data.endswith(after):
            middle = data[len(before) : -len(after)]
            if _UNPLAIN.search(middle) is None:
                try:
                    return middle.decode()
                except UnicodeDecodeError:
                    return None  # no JSON either
        return plain(data_of(data))

    def texts(events: Sequence[bytes], place: int) -> list[str]:
        nonlocal before, after, lessons
        found: list[str] = []
        while place + len(found) < len(events):
            data = events[place + len(found)]
            text = one(data)
            if text is None:
                break
            found.append(text)
            if key and lessons < _LESSONS and (len(found) == 1 or not data.startswith(before)):
                lessons += 1
                before, after = _around(data, text.encode(), key) or (before, after)
                if before:
                    found += _alike(events[place + len(found) :], before, after)
        return found

    return texts


def _alike(events: Sequence[bytes], before: bytes, after: bytes) -> list[str]:
    """The texts of the events, from the first on, that are `before`, a text, `after`; [] where one cannot be read.

    By functions of C alone, most of them over all events at once: a function of ours an event would take far longer.
    """
    count = len(events)
    while count and not (events[count - 1].startswith(before) and events[count - 1].endswith(after)):
        count -= 1  # a stream ends in a few events of other kinds
    insides = [*map(itemgetter(slice(len(before), -len(after))), events[:count])]
    # Put together again they are the events, byte by byte, or one of them differs: each is as long as it was then, or
    # longer where it was too short to hold both. What is put around both sides spares two copies of all.
    if (after + before).join((b"", *insides, b"")) != b"".join((after, *events[:count], before)):
        begins, ends = map(bytes.startswith, events, repeat(before)), map(bytes.endswith, events, repeat(after))
        del insides[[*map(and_, begins, ends), False].index(False) :]
    # All as one string with a NUL between two. As many as were put there, written and read: no text ended within an
    # escape or holds one itself. A quote that belongs nowhere, or half a character, makes it no JSON.
    inside = _NUL.join(insides)
    try:
        found = orjson.loads(b'"%b"' % inside).split("\0")
    except ValueError:
        return []
    return found if len(found) == len(insides) == inside.count(_NUL) + 1 and all(found) else []


def _around(data: bytes, text: bytes, key: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and after the one text of an event; None where it is escaped, or has not the only such key."""
    if data.count(key) != 1 or _UNPLAIN.search(text):
        return None
    for opening in (key + b':"', key + b': "'):
        begin = data.find(opening + text + b'"')
        if begin >= 0:
            begin += len(opening)
            return data[:begin], data[begin + len(text) :]
    return None
