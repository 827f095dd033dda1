"""JSON schemas, regular expressions and choices to grammars that say exactly what they say."""

from deepinfer_structured.schema.compiler import (
    CompiledSchema,
    compile_choice,
    compile_regex,
    compile_schema,
)
from deepinfer_structured.schema.errors import Unsupported, UnsupportedSchemaError
from deepinfer_structured.schema.limits import SchemaOptions

__all__ = [
    "CompiledSchema",
    "SchemaOptions",
    "Unsupported",
    "UnsupportedSchemaError",
    "compile_choice",
    "compile_regex",
    "compile_schema",
]
