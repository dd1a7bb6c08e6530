"""Rules from a file, for a proxy that is started from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from remote_ckpt.errors import ConfigError, MissingDependencyError
from remote_ckpt.testing.proxy.answer_faults import DelayAnswer, DelayRequest, LoseAnswer, Reply, Reset
from remote_ckpt.testing.proxy.body_faults import Cut, FlipByte, Shorten, Stall, Surround, Throttle, ZeroBytes
from remote_ckpt.testing.proxy.exchange import Fault
from remote_ckpt.testing.proxy.rules import Rule
from remote_ckpt.testing.proxy.s3_faults import FailKeys, IgnoreRange, ShortListing, WrongRange

FAULTS: Final[Mapping[str, type[Fault]]] = {
    "cut": Cut,
    "delay_answer": DelayAnswer,
    "delay_request": DelayRequest,
    "fail_keys": FailKeys,
    "flip_byte": FlipByte,
    "ignore_range": IgnoreRange,
    "lose_answer": LoseAnswer,
    "reply": Reply,
    "reset": Reset,
    "short_listing": ShortListing,
    "shorten": Shorten,
    "stall": Stall,
    "surround": Surround,
    "throttle": Throttle,
    "wrong_range": WrongRange,
    "zero_bytes": ZeroBytes,
}
"""The faults by the ``kind`` that a file of rules calls them."""


def load_rules(path: str | Path) -> list[Rule]:
    """Return the rules of a JSON or TOML file: a list named ``rules``, see :func:`parse_rules`.

    Raises:
        ConfigError: The file cannot be read, or holds no rules.
        MissingDependencyError: It is TOML, and this Python is older than 3.11.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = _parse_toml(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:  # both parsers' errors are ValueErrors
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_rules(document)


def parse_rules(document: object) -> list[Rule]:
    """Return the rules of a document such as ``{"rules": [{"method": "PUT", "fault": {"kind": "reset"}}]}``.

    A rule has the fields of :class:`Rule`; its fault a ``kind`` of :data:`FAULTS`, and that one's fields.

    Raises:
        ConfigError: It is no such document; the message names the rule and the field.
    """
    found = document.get("rules") if isinstance(document, Mapping) else None
    if not isinstance(found, list):
        raise ConfigError("a file of rules holds one list named 'rules'")
    return [_parse_rule(rule, f"rule {number}") for number, rule in enumerate(found, 1)]


def _parse_rule(found: object, where: str) -> Rule:
    if not isinstance(found, Mapping) or not isinstance(found.get("fault"), Mapping):
        raise ConfigError(f"{where} needs a fault, such as {{'kind': 'reset'}}")
    given = dict(found["fault"])
    kind = given.pop("kind", None)
    if kind not in FAULTS:
        raise ConfigError(f"{where}: unknown kind of fault {kind!r}; known are {', '.join(FAULTS)}")
    fault = FAULTS[kind](**_checked(FAULTS[kind], given, where))
    given = {name: value for name, value in found.items() if name != "fault"}
    try:
        return Rule(fault=fault, **_checked(Rule, given, where))
    except ConfigError as error:
        raise error if error.message.startswith(where) else ConfigError(f"{where}: {error}") from error


def _checked(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a document's fields as a dataclass takes them, or say which one does not fit."""
    hints = get_type_hints(kind)
    known = {one.name: one for one in dataclasses.fields(kind) if one.name not in ("fault", "until")}
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(known)}")
    required = [name for name, one in known.items() if _is_required(one) and name not in given]
    if required:
        raise ConfigError(f"{where} needs the field {required[0]!r}")
    return {name: _as_type(value, hints[name], f"{where}: {name}") for name, value in given.items()}


def _is_required(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _as_type(value: object, hint: Any, where: str) -> object:
    if isinstance(value, str) and hint is bytes:
        return value.encode()
    if not _accepts(hint, value):
        raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}, not {value!r}")
    return value


def _accepts(hint: Any, value: object) -> bool:
    kind, choices = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in choices
    if kind in (Union, UnionType):
        return any(_accepts(choice, value) for choice in choices)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _parse_toml(text: str) -> object:
    try:
        import tomllib
    except ImportError as error:
        raise MissingDependencyError("rules in TOML need Python 3.11: write them in JSON") from error
    return tomllib.loads(text)
