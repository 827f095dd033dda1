"""JSON schemas, regular expressions and choices to grammars that say exactly what they say."""

from .compiler import CompiledSchema, compile_choice, compile_regex, compile_schema
from .errors import Unsupported, UnsupportedSchemaError
from .limits import SchemaOptions

__all__ = [
    "CompiledSchema",
    "SchemaOptions",
    "Unsupported",
    "UnsupportedSchemaError",
    "compile_choice",
    "compile_regex",
    "compile_schema",
]
