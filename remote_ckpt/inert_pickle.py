"""A pickle read as inert data: what it names is only named, what it calls is only written down.

Python's unpicklers import and call. Kept from harm by lists of what is allowed, they still let a pickle set
attributes of the classes on the list, and an index into their memo allocate gigabytes. This one knows no
classes at all: it builds dicts, lists, tuples, texts and numbers, and a :class:`Record` in place of every
object. Its memory is bounded by the pickle's length, its time is linear in it.

The opcodes are those that `pickle <https://docs.python.org/3/library/pickletools.html>`_ writes for such
data in protocols 2 to 5; any other is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

_MAX_PROTOCOL = 5


class Named:
    """A class or function that a pickle refers to.

    Args:
        module: Module's name, as written.
        name: Name in it, as written.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class Record:
    """An object of a pickle: what would be called, with what, and the state that would be given to it.

    Args:
        kind: What would be called.
        arguments: With what.

    Attributes:
        state: What would be set on the object; None without.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Named, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None


class Persistent:
    """What is not in the pickle but beside it, as ``torch.save`` keeps storages.

    Args:
        name: Its persistent id: any value.
    """

    __slots__ = ("name",)

    def __init__(self, name: Any) -> None:
        self.name = name


class MalformedPickleError(ValueError):
    """Not a pickle of plain data, cut, or not what the format says."""


def parse_pickle(data: bytes, name: Callable[[str, str], Named]) -> Any:
    """Return what a pickle describes.

    Args:
        data: The pickle; what follows its end is ignored.
        name: Makes the :class:`Named` for a module and a name, or raises.

    Raises:
        MalformedPickleError: It is no pickle of plain data.
    """
    try:
        return _Machine(data, name).run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise MalformedPickleError(f"cut or damaged ({type(error).__name__}: {error})") from error


class _Machine:
    """The stack machine that a pickle is a program for."""

    __slots__ = ("at", "data", "marks", "memo", "name", "named", "stack")

    def __init__(self, data: bytes, name: Callable[[str, str], Named]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}  # a dict: a large index costs nothing
        self.name = name
        self.named: dict[tuple[str, str], Named] = {}

    def run(self) -> Any:
        """Run to the end. Most opcodes are handled right here: a call for each would double the time."""
        data, stack, memo, operations = self.data, self.stack, self.memo, _OPERATIONS
        at = 0
        while (opcode := data[at]) != _STOP:
            at += 1
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _GET:
                stack.append(memo[data[at]])
                at += 1
            elif opcode == _LONG_GET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif opcode == _SMALL_INT:
                stack.append(data[at])
                at += 1
            elif opcode == _MARK:
                self.marks.append(len(stack))
            elif opcode == _EMPTY_TUPLE:
                stack.append(())
            elif opcode == _TUPLE_OF_TWO:
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif opcode == _TUPLE_OF_ONE:
                stack[-1] = (stack[-1],)
            elif opcode == _EMPTY_DICT:
                stack.append({})
            else:
                self.at = at
                operations[opcode](self)
                at = self.at
        return stack.pop()

    # --- the pickle's bytes

    def take(self, count: int) -> bytes:
        start = self.at
        self.at = end = start + count
        if end > len(self.data):
            raise MalformedPickleError("cut off")
        return self.data[start:end]

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise MalformedPickleError("cut off")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def protocol(self) -> None:
        if self.byte() > _MAX_PROTOCOL:
            raise MalformedPickleError("a pickle protocol that is not known here")

    def frame(self) -> None:
        self.take(8)  # a hint for readers of streams

    # --- scalars

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def two_byte_int(self) -> None:
        self.stack.append(int.from_bytes(self.take(2), "little"))

    def four_byte_int(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long_int(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.byte()), "little", signed=True))

    def real(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def short_text(self) -> None:
        start = self.at + 1
        self.at = end = start + self.data[self.at]
        if end > len(self.data):
            raise MalformedPickleError("cut off")
        self.stack.append(self.data[start:end].decode("utf-8", "surrogatepass"))

    def text(self) -> None:
        size = int.from_bytes(self.take(4), "little")
        self.stack.append(self.take(size).decode("utf-8", "surrogatepass"))

    # --- containers

    def above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def tuple_of_three(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def tuple_of_marked(self) -> None:
        items = tuple(self.above_mark())
        self.stack.append(items)

    def empty_list(self) -> None:
        self.stack.append([])

    def append(self) -> None:
        value = self.stack.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        values = self.above_mark()
        self.top(list).extend(values)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.top(dict)[_hashable(key)] = value

    def set_items(self) -> None:
        items = iter(self.above_mark())
        target = self.top(dict)
        for key, value in zip(items, items, strict=True):
            target[_hashable(key)] = value

    def top(self, kind: type[Any]) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise MalformedPickleError(f"a {type(value).__name__} where a {kind.__name__} is filled")
        return value

    # --- objects

    def refer(self) -> None:
        module = self.line()
        self.push_named(module, self.line())

    def refer_from_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise MalformedPickleError("a reference that is not made of texts")
        self.push_named(module, name)

    def push_named(self, module: str, name: str) -> None:
        known = self.named.get((module, name))
        if known is None:
            known = self.named[module, name] = self.name(module, name)
        self.stack.append(known)

    def call(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack[-1]
        if type(kind) is not Named or type(arguments) is not tuple:
            raise MalformedPickleError(f"a call of a {type(kind).__name__}")
        self.stack[-1] = Record(kind, arguments)

    def build(self) -> None:
        state = self.stack.pop()
        record = self.top(Record)
        if record.state is not None:
            raise MalformedPickleError("an object that is given its state twice")
        record.state = state

    def refer_beside(self) -> None:
        self.stack[-1] = Persistent(self.stack[-1])

    # --- references to what was there before

    def put(self) -> None:
        self.memo[self.byte()] = self.stack[-1]

    def long_put(self) -> None:
        self.memo[int.from_bytes(self.take(4), "little")] = self.stack[-1]


def _refuse(machine: _Machine) -> None:
    at = machine.at - 1
    raise MalformedPickleError(f"opcode {machine.data[at]} at byte {at}")


def _hashable(key: Any) -> Any:
    """Return a dict's key; hashing a deeply nested tuple would overrun the stack."""
    if type(key) is str or type(key) is Record or type(key) is int:
        return key
    raise MalformedPickleError(f"a dict with a {type(key).__name__} as key")


_STOP: Final = ord(".")
_GET: Final = ord("h")
_LONG_GET: Final = ord("j")
_MEMOIZE: Final = 0x94
_SMALL_INT: Final = ord("K")
_MARK: Final = ord("(")
_EMPTY_DICT: Final = ord("}")
_EMPTY_TUPLE: Final = ord(")")
_TUPLE_OF_ONE: Final = 0x85
_TUPLE_OF_TWO: Final = 0x86
_BY_OPCODE: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"\x95": _Machine.frame,
    b"N": _Machine.none,
    b"\x88": _Machine.true,
    b"\x89": _Machine.false,
    b"M": _Machine.two_byte_int,
    b"J": _Machine.four_byte_int,
    b"\x8a": _Machine.long_int,
    b"G": _Machine.real,
    b"\x8c": _Machine.short_text,
    b"X": _Machine.text,
    b"\x87": _Machine.tuple_of_three,
    b"t": _Machine.tuple_of_marked,
    b"]": _Machine.empty_list,
    b"a": _Machine.append,
    b"e": _Machine.extend,
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"c": _Machine.refer,
    b"\x93": _Machine.refer_from_stack,
    b"R": _Machine.call,
    b"\x81": _Machine.call,
    b"b": _Machine.build,
    b"Q": _Machine.refer_beside,
    b"q": _Machine.put,
    b"r": _Machine.long_put,
}
_OPERATIONS: Final = [_BY_OPCODE.get(bytes([opcode]), _refuse) for opcode in range(256)]

__all__ = ["MalformedPickleError", "Named", "Persistent", "Record", "parse_pickle"]
