"""Formats that are enforced, as regular expressions; every text is valid under its RFC.

``format`` is an annotation by the standard and an assertion for most people. So a format only ever
narrows: texts that are not of the format are never written, and under ``not`` nothing is, since a
validator may take any string for valid.
"""

from __future__ import annotations

YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
LEAP = r"(?:(?:[1-9]\d|0[1-9])(?:0[48]|[2468][048]|[13579][26])|000[48]|00[2468][048]|00[13579][26]"
LEAP += r"|(?:[2468][048]|[13579][26]|0[48])00)"
LONG = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
DATE = rf"(?:{YEAR}-(?:{LONG}|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
DATE += rf"|{LEAP}-02-29)"
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
CLOCK = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
DAYS = r"\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D"
OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"{OCTET}(?:\.{OCTET}){{3}}"
GROUP = r"[0-9a-fA-F]{1,4}"
LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,31}"
HOST = rf"{LABEL}(?:\.{LABEL}){{0,3}}"
ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
LOCAL = rf"(?:{ATOM}{{1,64}}|{ATOM}{{1,20}}(?:\.{ATOM}{{1,20}}){{1,2}})"
UNRESERVED = r"[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"
PATH = rf"(?:/(?:{UNRESERVED})*)*(?:\?(?:{UNRESERVED}|[/?])*)?(?:#(?:{UNRESERVED}|[/?])*)?"
NAME = r"[a-zA-Z](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,20}"

FORMATS: dict[str, str] = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"{DATE}T{TIME}",
    "duration": rf"P(?:\d{{1,4}}W|(?:{DAYS})(?:{CLOCK})?|{CLOCK})",
    "email": rf"{LOCAL}@{NAME}(?:\.{NAME}){{1,2}}",
    "hostname": rf"{NAME}(?:\.{NAME}){{0,3}}",
    "ipv4": IPV4,
    "ipv6": "|".join(
        [rf"(?:{GROUP}:){{7}}{GROUP}", rf"(?:{GROUP}(?::{GROUP}){{0,5}})?::", rf"::{GROUP}"]
        + [rf"(?:{GROUP}:){{{n}}}(?::{GROUP}){{1,{7 - n}}}" for n in range(1, 7)]
    ),
    "uri": rf"[a-z][a-z0-9+.-]{{0,15}}://(?:{HOST}|{IPV4})(?::\d{{1,4}})?{PATH}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
}
"""By name; each is meant for the whole text."""

ANNOTATIONS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template "
    "relative-json-pointer regex".split()
)
"""Formats of the standard that are not enforced: they cost a refusal, unless formats annotate."""
