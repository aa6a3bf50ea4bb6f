"""Conversion between frozen dataclasses and the plain dictionaries of YAML and JSON.

Every core type has ``from_manifest`` and ``to_manifest``; both come from `Manifest` below and follow the type's own
annotations, so a field is written once: its type, and by ``Annotated`` its range (`penstock.core.limits`) and its
meaning. Manifest names are camelCase, Python names snake_case. Reading is strict: an unknown field is rejected with its
path and the nearest known name, a value of the wrong type with its path and the expected type. The mistakes of all
fields are reported together (`penstock.core.errors.MistakesError`). A field may carry ``metadata={"read": f, "write":
g}`` if the written form is not the plain value (``4Gi`` for bytes); ``f(value, path)`` reads, ``g(value)`` writes, and
``"schema"`` describes it (`penstock.core.manifest_schema`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from penstock.core.errors import (
    MOST_MISTAKES,
    MOST_SHOWN,
    UserError,
    mistakes_in,
    mistakes_raised_by,
    raise_all,
    shown,
)
from penstock.core.limits import EXACT, Limit
from penstock.core.names import require_name
from penstock.core.ranges import require_length, require_within
from penstock.core.rules import Rule

T = TypeVar("T")


NO_RULES: tuple[Rule, ...] = ()


class Manifest:
    """Gives a frozen dataclass its two manifest forms."""

    __slots__ = ()

    rules = NO_RULES

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Further checks: of single fields, with better remedies than a range has, and of items.

        Rules and checks are also evaluated if another field is wrong, on an object with only the fields that are right.
        """
        return ()

    @classmethod
    def from_manifest(cls, value: Any, path: str = "") -> Self:
        """The instance described by ``value``; raises `UserError` with the field's path below ``path``."""
        return read_dataclass(cls, value, path)

    def to_manifest(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers; fields equal to their default are left out."""
        return write_dataclass(self)


class Checked(Manifest):
    """A manifest whose ranges, names, checks and rules hold of every instance."""

    __slots__ = ()

    def __post_init__(self) -> None:
        require_all(self)


def camel(name: str) -> str:
    """``kv_heads`` as ``kvHeads``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def join(path: str, name: str | int) -> str:
    """The path of a field or list item below ``path``."""
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


Reader = Callable[[Any, str], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A dataclass's declaration of one field; a value of type ``plain`` needs no reading.

    ``limit`` and ``meaning`` are empty for a field that declares none.
    """

    declared: dataclasses.Field[Any]
    annotation: Any
    read: Reader
    plain: type | None
    is_required: bool
    limit: Limit
    meaning: str

    @property
    def default(self) -> Any:
        """The default; `dataclasses.MISSING` without one."""
        factory = self.declared.default_factory
        return self.declared.default if factory is dataclasses.MISSING else factory()


def declarations(cls: Any) -> dict[str, Declaration]:
    """The declarations of all fields of the dataclass ``cls``, by the field's name in manifests."""
    return _declarations(cls)


@functools.cache
def _declarations(owner: Any) -> dict[str, Declaration]:
    plain, extended = typing.get_type_hints(owner), typing.get_type_hints(owner, include_extras=True)
    return {
        camel(field.name): _declaration(field, plain[field.name], getattr(extended[field.name], "__metadata__", ()))
        for field in dataclasses.fields(owner)
    }


def _declaration(declared: dataclasses.Field[Any], annotation: Any, extras: Iterable[Any]) -> Declaration:
    custom_reader: Reader | None = declared.metadata.get("read")
    return Declaration(
        declared=declared,
        annotation=annotation,
        read=custom_reader or _reader(annotation),
        plain=annotation if custom_reader is None and annotation in _TAKEN_AS_THEY_ARE else None,
        is_required=declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING,
        limit=next((extra for extra in extras if isinstance(extra, Mapping)), {}),
        meaning=next((extra for extra in extras if isinstance(extra, str)), ""),
    )


_are_limits_lifted: ContextVar[bool] = ContextVar("_are_limits_lifted", default=False)


@contextlib.contextmanager
def limits_lifted() -> Iterator[None]:
    """Apply no declared ranges to anything that is read in the block.

    For values that an earlier version accepted: a later limit ends no running attempt, and hides no stored job.
    """
    token = _are_limits_lifted.set(True)
    try:
        yield
    finally:
        _are_limits_lifted.reset(token)


def require_limits(owner: Any) -> None:
    """Raise `UserError` for all fields of ``owner`` beyond their declared ranges.

    Numbers and lengths are checked here, and patterns by `require_all`. Types check choices themselves, with better
    remedies.
    """
    if _are_limits_lifted.get():
        return
    mistakes = []
    for name, field in declarations(type(owner)).items():
        if not field.limit:
            continue
        try:
            require_within(getattr(owner, field.declared.name), field.limit, name)
        except UserError as error:
            default = write_value(field.default) if not field.is_required else None
            example = f", such as {default}" if default and isinstance(default, (int, float, list)) else ""
            mistakes.append(UserError(what=error.what, where=error.where, remedy=error.remedy + example))
    raise_all(mistakes)


def require_all(owner: Manifest) -> None:
    """Raise `UserError` for the fields of ``owner`` beyond their ranges, and for broken checks and rules, together.

    Other mistakes of a field beyond its range are not reported.
    """
    mistakes = mistakes_raised_by(lambda: require_limits(owner))
    beyond = {mistake.where for mistake in mistakes}
    others = _disagreements(type(owner), owner)
    raise_all([*mistakes, *(mistake for mistake in others if not mistake.where or mistake.where not in beyond)])


def _disagreements(cls: Any, instance: Any, *skipped: type[Exception]) -> list[UserError]:
    """Mistakes in names, and those that the checks and rules of ``cls`` report, but for any that raise ``skipped``."""
    mistakes: list[UserError] = []
    for name, attribute, pattern in _named_fields(cls):
        try:
            if isinstance(value := getattr(instance, attribute, None), str):
                require_name(value, name, pattern)
        except UserError as mistake:
            mistakes.append(mistake)
    for check in cls.checks():
        with contextlib.suppress(*skipped):
            mistakes += mistakes_raised_by(functools.partial(check, instance))
    for rule in cls.rules:
        try:
            if not rule.holds(instance):
                mistakes.append(rule.mistake(instance))
        except skipped:
            continue
    return mistakes


@functools.cache
def _named_fields(cls: Any) -> tuple[tuple[str, str, str], ...]:
    """Fields whose values are names: the field's name in manifests, the attribute's, and the pattern."""
    return tuple(
        (name, field.declared.name, field.limit["pattern"])
        for name, field in declarations(cls).items()
        if "pattern" in field.limit
    )


def read_dataclass(cls: type[T], value: Any, path: str) -> T:
    """``value`` (a mapping) as an instance of the dataclass ``cls``."""
    if not isinstance(value, Mapping):
        raise mistyped(value, "a mapping of fields", path)
    known = declarations(cls)
    unknown = itertools.islice((name for name in value if name not in known), MOST_MISTAKES)
    mistakes = [unknown_field(str(name), known, path) for name in unknown]
    arguments = {}
    for name, field in known.items():
        if name in value:
            given = value[name]
            try:
                arguments[field.declared.name] = _read_field(field, given, join(path, name))
            except UserError as error:
                mistakes.append(error)
        elif field.is_required:
            mistakes.append(UserError(what="is missing", where=join(path, name), remedy=f"add {name}"))
    if mistakes:
        raise_all([*mistakes, *_disagreements_of_right(cls, value, arguments, path)])
    try:
        return cls(**arguments)
    except UserError as error:
        raise_all([placed(mistake, _below(path, mistake.where)) for mistake in mistakes_in(error)])
        raise


def _disagreements_of_right(
    cls: type, value: Mapping[str, Any], arguments: Mapping[str, Any], path: str
) -> list[UserError]:
    """Mistakes of agreement between the fields that are right; a check that needs another field is skipped."""
    if not issubclass(cls, Manifest):
        return []
    known = declarations(cls)
    absent = [field for name, field in known.items() if name not in value and not field.is_required]
    right = types.SimpleNamespace(**{field.declared.name: field.default for field in absent}, **arguments)
    return [placed(mistake, _below(path, mistake.where)) for mistake in _disagreements(cls, right, AttributeError)]


def _read_field(field: Declaration, given: Any, path: str) -> Any:
    if field.limit and not _are_limits_lifted.get():
        is_rounded = type(given) is int and abs(given) > EXACT  # if it is read as a float
        (require_within if is_rounded else require_length)(given, field.limit, path)
    is_read = type(given) is field.plain and not (isinstance(given, int) and given.bit_length() > _MOST_BITS)
    return given if is_read else field.read(given, path)


def placed(mistake: UserError, where: str) -> UserError:
    """The mistake with the full path of its place."""
    return UserError(what=mistake.what, where=where, remedy=mistake.remedy)


def _below(path: str, where: str) -> str:
    return join(path, where) if path and where else path or where


def read_value(annotation: Any, value: Any, path: str) -> Any:
    """``value`` checked against, and converted to, the type ``annotation``."""
    return _reader(annotation)(value, path)


@functools.cache
def _reader(annotation: Any) -> Reader:
    """The reader of a type's values; cached, because records are read by the thousand."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return lambda value, path: value
    if dataclasses.is_dataclass(annotation):
        from_manifest: Reader | None = getattr(annotation, "from_manifest", None)
        return from_manifest or functools.partial(read_dataclass, typing.cast(type, annotation))
    return functools.partial(_reader_of_origin(annotation, origin), annotation)


def _reader_of_origin(annotation: Any, origin: Any) -> Callable[[Any, Any, str], Any]:
    if origin in (types.UnionType, typing.Union):
        return _read_union
    if origin is typing.Literal:
        return _read_literal
    if origin is tuple:
        return _read_tuple
    if origin in (dict, Mapping):
        return _read_mapping
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _read_enum
    return _read_scalar


def _read_union(annotation: Any, value: Any, path: str) -> Any:
    options = [option for option in typing.get_args(annotation) if option is not type(None)]
    if value is None and len(options) < len(typing.get_args(annotation)):
        return None
    if len(options) == 1:
        return read_value(options[0], value, path)
    for option in options:
        try:
            return read_value(option, value, path)
        except UserError:
            continue
    raise mistyped(value, " or ".join(_type_name(option) for option in options), path)


def _read_literal(annotation: Any, value: Any, path: str) -> Any:
    return _read_choice(typing.get_args(annotation), value, path)


def _read_enum(annotation: Any, value: Any, path: str) -> Any:
    return annotation(_read_choice(_values(annotation), value, path))


@functools.cache
def _values(annotation: type[enum.Enum]) -> tuple[Any, ...]:
    return tuple(member.value for member in annotation)


def _read_choice(choices: tuple[Any, ...], value: Any, path: str) -> Any:
    if value in choices and type(value) in {type(choice) for choice in choices}:
        return value
    names = ", ".join(str(choice) for choice in choices)
    remedy = nearest(value, choices) if isinstance(value, str) else ""
    raise UserError(what=f"{shown(value)} is not one of {names}", where=path, remedy=remedy)


def _read_tuple(annotation: Any, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise mistyped(value, "a list", path)
    types_ = typing.get_args(annotation)
    if len(types_) == 2 and types_[1] is ...:
        read = _reader(types_[0])
        return tuple(_read_items((read, item, join(path, i)) for i, item in enumerate(value)))
    if len(types_) != len(value):
        raise mistyped(value, f"a list of {len(types_)} values", path)
    pairs = enumerate(zip(types_, value, strict=True))
    return tuple(_read_items((_reader(kind), item, join(path, i)) for i, (kind, item) in pairs))


def _read_items(items: Iterable[tuple[Reader, Any, str]]) -> list[Any]:
    """The items read; the mistakes of all of them are raised together."""
    values, mistakes = [], list[UserError]()
    for read, item, path in items:
        try:
            values.append(read(item, path))
        except UserError as error:
            mistakes.append(error)
            if len(mistakes) == MOST_MISTAKES:
                break
    raise_all(mistakes)
    return values


def _read_mapping(annotation: Any, value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise mistyped(value, "a mapping", path)
    _, item_type = typing.get_args(annotation)
    read = _reader(item_type)
    items = _read_items((read, item, join(path, str(name))) for name, item in value.items())
    return dict(zip(map(str, value), items, strict=True))


_SCALAR_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_TAKEN_AS_THEY_ARE = frozenset(_SCALAR_NAMES) - {float}
_MOST_BITS = 63


def _read_scalar(annotation: Any, value: Any, path: str) -> Any:
    if annotation is float:
        return _read_finite(value, path)
    if annotation is int and type(value) is float and value.is_integer():
        value = int(value)  # JSON has one kind of number: 1e3 and 2.0 are integers
    if type(value) is annotation:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise UserError(what=f"{shown(value)} is too large", where=path, remedy=f"write at most 2^{_MOST_BITS} - 1")
        return value
    raise mistyped(value, _type_name(annotation), path)


def _read_finite(value: Any, path: str) -> float:
    number = read_number(value, path)
    if math.isfinite(number):
        return number
    raise mistyped(value, "a finite number", path)


def read_number(value: Any, path: str) -> float:
    """Any number, also infinity and NaN: for measured values, which may be wrong."""
    if type(value) is float:
        return value
    if type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    raise mistyped(value, _SCALAR_NAMES[float], path)


def _type_name(annotation: Any) -> str:
    if annotation in _SCALAR_NAMES:
        return _SCALAR_NAMES[annotation]
    return "a list" if typing.get_origin(annotation) is tuple else "a mapping of fields"


def mistyped(value: Any, expected: str, path: str) -> UserError:
    """The error for a value of the wrong type."""
    quoting = ", in quotes" if expected == _SCALAR_NAMES[str] else ""
    return UserError(what=f"{shown(value)} is not {expected}", where=path, remedy=f"write {expected}{quoting}")


def unknown_field(name: str, known: Mapping[str, Any], path: str) -> UserError:
    """The error for a field that does not exist, with the nearest one that does."""
    remedy = nearest(name, tuple(known)) or "known fields: " + ", ".join(known)
    place = name if len(name) <= MOST_SHOWN else f"{name[: MOST_SHOWN - 3]}..."
    return UserError(what="unknown field", where=join(path, place), remedy=remedy)


def nearest(name: str, choices: tuple[Any, ...]) -> str:
    """``did you mean ...?`` with the choice most like ``name``, else an empty string."""
    close = difflib.get_close_matches(name[:MOST_SHOWN], [str(choice) for choice in choices], n=1)
    return f"did you mean {close[0]}?" if close else ""


def write_dataclass(instance: Any) -> dict[str, Any]:
    """The plain form of a dataclass instance; `read_dataclass` reverses it."""
    written = {}
    for name, field in declarations(type(instance)).items():
        value = getattr(instance, field.declared.name)
        if value == field.default:
            continue
        writer = field.declared.metadata.get("write", write_value)
        written[name] = writer(value)
    return written


def write_value(value: Any) -> Any:
    """The plain form of any field's value."""
    if isinstance(value, Manifest):
        return value.to_manifest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return write_dataclass(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [write_value(item) for item in value]
    if isinstance(value, Mapping):
        return {name: write_value(item) for name, item in value.items()}
    return value
