"""Where the subschemas lie: ``$id``, ``$anchor``, ``$dynamicAnchor``, and what references name.

JSON Schema 2020-12 core, sections 8 and 9. A subschema is known by its document and its pointer;
its base URI is that of the resource around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from deepinfer_structured.schema.errors import UnsupportedSchemaError
from deepinfer_structured.schema.limits import SchemaOptions

ONE = (
    "items contains additionalProperties propertyNames not if then else unevaluatedItems "
    "unevaluatedProperties"
).split()
MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment contentEncoding "
    "contentMediaType contentSchema example discriminator".split()
)
"""The last two are OpenAPI's; pydantic writes a discriminator, which changes no validation."""
ASSERTIONS = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength "
    "minLength pattern format maxItems minItems uniqueItems maxContains minContains maxProperties "
    "minProperties required dependentRequired".split()
)
IDENTIFIERS = frozenset("$schema $id $anchor $dynamicAnchor $ref $dynamicRef $vocabulary".split())
KNOWN = ASSERTIONS | ANNOTATIONS | IDENTIFIERS | {*ONE, *MANY, *NAMED}
DIALECTS = {"https://json-schema.org/draft/2020-12/schema": 2020}
DIALECTS |= {"https://json-schema.org/draft/2019-09/schema": 2019}
DIALECTS |= {f"http://json-schema.org/draft-0{n}/schema": n for n in (6, 7)}
NEW = {  # keywords that a dialect does not have, or means otherwise
    2019: frozenset("prefixItems $dynamicRef $dynamicAnchor unevaluatedItems".split()),
    7: frozenset(
        "prefixItems $dynamicRef $dynamicAnchor unevaluatedItems unevaluatedProperties $anchor "
        "minContains maxContains dependentRequired dependentSchemas".split()
    ),
}
NEW[6] = NEW[7] | {"if", "then", "else"}
OLD = {
    "dependencies": "dependentRequired or dependentSchemas",
    "additionalItems": "prefixItems with items",
    "$recursiveRef": "$dynamicRef",
    "$recursiveAnchor": "$dynamicAnchor",
    "nullable": 'a type list with "null", or anyOf with {"type": "null"}',
    "id": "$id",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A subschema: the document that holds it, its pointer there, and its base URI."""

    document: str
    pointer: str
    base: str = field(compare=False)
    schema: Any = field(compare=False, repr=False)
    draft: int = field(compare=False, default=2020)

    @property
    def path(self) -> str:
        """As errors name it."""
        return f"{self.document}#{self.pointer}" if self.document else self.pointer

    def refuse(self, keyword: str, reason: str, instead: str) -> UnsupportedSchemaError:
        """The error about one of its keywords."""
        path = f"{self.path}/{escaped(keyword)}" if isinstance(self.schema, dict) else self.path
        return UnsupportedSchemaError(path, keyword, reason, instead)


def escaped(name: str) -> str:
    """A name as a token of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class Schemas:
    """All resources of a schema and of the documents that it refers to.

    Raises:
        UnsupportedSchemaError: from the constructor and ``find``, for unknown keywords, dialects,
            references that lead nowhere or leave the documents at hand.
    """

    def __init__(self, schema: Any, options: SchemaOptions) -> None:
        self.options = options
        self.resources: dict[str, Place] = {}
        self.anchors: dict[tuple[str, str], Place] = {}
        self.dynamic: dict[tuple[str, str], Place] = {}
        self.places: dict[tuple[str, str], Place] = {}
        self.uses_dynamic = False
        self.root = self._add("", "", schema)
        self._follow()

    def _add(self, document: str, base: str, schema: Any) -> Place:
        place = Place(document, "", base, schema)
        self.resources[base] = place
        self._walk(place, 0)
        return self.places[document, ""]

    def _follow(self) -> None:
        """Look every reference up, so that all documents are known before anything is read."""
        done: set[tuple[str, str]] = set()
        while todo := [place for key, place in self.places.items() if key not in done]:
            for place in todo:
                done.add((place.document, place.pointer))
                for keyword in ("$ref", "$dynamicRef"):
                    if isinstance(place.schema, dict) and keyword in place.schema:
                        self.find(place, keyword)

    def _walk(self, place: Place, depth: int) -> None:
        """Take note of a subschema and of all below it."""
        if len(self.places) >= self.options.max_nodes or depth > self.options.max_depth:
            what = f"has over {self.options.max_nodes} subschemas or is over "
            what += f"{self.options.max_depth} deep"
            raise place.refuse("schema", what, "a smaller schema")
        schema = place.schema
        if not isinstance(schema, dict | bool):
            raise place.refuse("schema", "a schema is an object or a boolean", "{...}, true, false")
        if isinstance(schema, dict):
            place = self._identified(place, schema)
            self._check(place, schema)
        self.places[place.document, place.pointer] = place
        for token, child in children(place):
            self._walk(self._below(place, token, child), depth + 1)

    def _below(self, place: Place, token: str, child: Any) -> Place:
        return Place(place.document, place.pointer + token, place.base, child, place.draft)

    def _identified(self, place: Place, schema: dict[str, Any]) -> Place:
        base, draft = place.base, place.draft
        if "$schema" in schema:
            draft = DIALECTS.get(str(schema["$schema"]).rstrip("#"), 0)
            if not draft:
                raise place.refuse(
                    "$schema", "an unknown dialect", "the dialect of 2020-12, or no $schema"
                )
        if isinstance(schema.get("$id"), str) and not ("$ref" in schema and draft < 2019):
            base = joined(base, schema["$id"]).removesuffix("#")
            if "#" in base:
                raise place.refuse("$id", "it has a fragment", "$anchor for the fragment")
        place = Place(place.document, place.pointer, base, schema, draft)
        if "$id" in schema or not place.pointer:
            self.resources[base] = place
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self.anchors[base, name] = place
                if keyword == "$dynamicAnchor":
                    self.dynamic[base, name] = place
        self.uses_dynamic |= "$dynamicRef" in schema
        return place

    def _check(self, place: Place, schema: dict[str, Any]) -> None:
        """Refuse what the standard does not know; nothing is ignored in silence."""
        for keyword in schema:
            if keyword in OLD:
                raise place.refuse(keyword, "it is not of JSON Schema 2020-12", OLD[keyword])
            if keyword not in KNOWN and not str(keyword).startswith("x-"):
                raise place.refuse(
                    keyword, "an unknown keyword", "no such keyword, or x-… for a note"
                )
        if later := sorted(NEW.get(place.draft, frozenset()) & set(schema)):
            raise place.refuse(later[0], f"draft {place.draft} has another", "$schema of 2020-12")
        if isinstance(schema.get("items"), list):
            raise place.refuse("items", "a list is of older drafts", "prefixItems")
        if "$vocabulary" in schema and place is not self.root_of(place):
            raise place.refuse("$vocabulary", "only a meta-schema has one", "no $vocabulary")
        if place.draft < 2019 and "$ref" in schema:
            beside = set(schema) & KNOWN - ANNOTATIONS - {*NAMED[3:], "$ref", "$schema", "$id"}
            if beside:
                what = f"draft {place.draft} ignores {min(beside)} beside it"
                raise place.refuse("$ref", what, "$schema of 2020-12, or an allOf")

    def root_of(self, place: Place) -> Place:
        """The resource around it."""
        return self.resources.get(place.base, place)

    def find(self, place: Place, keyword: str) -> Place:
        """What a ``$ref`` or ``$dynamicRef`` names, before any dynamic scope."""
        reference = place.schema[keyword]
        if not isinstance(reference, str):
            raise place.refuse(keyword, "it is no string", "a URI reference")
        uri, fragment = urldefrag(joined(place.base, reference))
        fragment = unquote(fragment)
        if uri not in self.resources:
            self._fetch(place, keyword, uri)
        resource = self.resources[uri]
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((uri, fragment))
            if found is None:
                raise place.refuse(
                    keyword, f"no $anchor {fragment!r} in {uri or 'the schema'}", "a name that is"
                )
            return found
        return self._pointed(place, keyword, resource, fragment)

    def _fetch(self, place: Place, keyword: str, uri: str) -> None:
        """Only documents that were handed over; nothing is ever loaded."""
        for name, document in self.options.documents.items():
            if urldefrag(name)[0] == uri:
                self._add(uri, uri, document)
                if uri not in self.resources:
                    self.resources[uri] = self.places[uri, ""]
                return
        raise place.refuse(
            keyword, f"{uri} is not at hand", "$defs in the schema, or the document in options"
        )

    def _pointed(self, place: Place, keyword: str, resource: Place, pointer: str) -> Place:
        at = resource
        for token in pointer.split("/")[1:]:
            name, schema = token.replace("~1", "/").replace("~0", "~"), at.schema
            if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
                below = schema[int(name)]
            elif isinstance(schema, dict) and name in schema:
                below = schema[name]
            else:
                raise place.refuse(keyword, f"nothing lies at {pointer}", "a pointer that leads on")
            at = self._below(at, "/" + token, below)
            at = self.places.get((at.document, at.pointer), at)
        if (at.document, at.pointer) not in self.places:
            self._walk(at, 0)
            at = self.places[at.document, at.pointer]
        return at

    def dynamically(self, place: Place, scope: tuple[str, ...]) -> Place:
        """What a ``$dynamicRef`` names where the resources of ``scope`` were entered in order."""
        found = self.find(place, "$dynamicRef")
        name = urldefrag(joined(place.base, place.schema["$dynamicRef"]))[1]
        if self.dynamic.get((found.base, name)) != found:
            return found
        outer = (self.dynamic.get((uri, name)) for uri in scope)
        return next((target for target in outer if target is not None), found)


def children(place: Place) -> Iterator[tuple[str, Any]]:
    """The subschemas right below, as (pointer from here, schema)."""
    schema = place.schema
    if not isinstance(schema, dict):
        return
    for keyword in schema:
        value = schema[keyword]
        if keyword in ONE:
            yield f"/{keyword}", value
        elif keyword in MANY:
            if not isinstance(value, list) or not value:
                raise place.refuse(keyword, "it is no list of schemas", "[{...}, ...]")
            for index, child in enumerate(value):
                yield f"/{keyword}/{index}", child
        elif keyword in NAMED:
            if not isinstance(value, dict):
                raise place.refuse(keyword, "it is no object of schemas", '{"name": {...}, ...}')
            for name, child in value.items():
                yield f"/{escaped(keyword)}/{escaped(name)}", child


def joined(base: str, reference: str) -> str:
    """A reference resolved against a base; fragments also where the scheme has no hierarchy."""
    if reference.startswith("#") or not reference:
        return base + reference
    return urljoin(base, reference)


def clean(schema: Any, options: SchemaOptions) -> Any:
    """A copy that is JSON and nothing else; refused are sizes and depths beyond the limits."""
    instead = "a schema that json.dumps can write"
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
        if size <= options.max_bytes:
            return json.loads(text)
    except RecursionError:
        raise UnsupportedSchemaError("", "schema", "it is nested too deep", instead) from None
    except UnicodeEncodeError:
        raise UnsupportedSchemaError("", "schema", "it holds a lone surrogate", instead) from None
    except (TypeError, ValueError) as error:
        raise UnsupportedSchemaError("", "schema", f"it is no JSON ({error})", instead) from None
    what = f"it has {size} bytes, over the {options.max_bytes} of max_bytes"
    raise UnsupportedSchemaError("", "schema", what, "a smaller schema")
