"""What is wrong with a query for a given database: :func:`problems_of`.

sqlglot reads it, another program than the one that wrote it. Only reading is let through, by lists
of what may stand: kinds of statements, and functions of which it is known that they compute and do
nothing else. A function that no list names may read files, wait, or change the database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from deepinfer.recipes.sql_grammar import Database

_MOST: Final = 3
_TOO_DEEP: Final = "It is nested too deep."
_STATEMENTS: Final = ("Select", "Union", "Except", "Intersect", "Subquery")
# What a query may hold inside and that does more than read: changes, locks, variables.
_MORE: Final = (
    "Insert Update Delete Merge Into Create Drop Alter Command Lock Parameter SessionParameter"
).split()
FUNCTIONS: Final = frozenset(
    """
    and or xor any exists case if iif coalesce ifnull nvl nvl2 nullif greatest least decode
    cast try_cast convert typeof collate array
    count count_if sum total avg min max median mode any_value arg_max arg_min max_by min_by
    group_concat string_agg array_agg logical_and logical_or bool_and bool_or approx_distinct
    stddev stddev_pop stddev_samp variance variance_pop variance_samp corr covar_pop covar_samp
    percentile_cont percentile_disc grouping
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first last first_value
    last_value nth_value
    abs sign round trunc ceil ceiling floor mod exp ln log log2 log10 pow power sqrt cbrt pi degrees
    radians sin cos tan cot asin acos atan atan2 sinh cosh tanh rand random safe_divide width_bucket
    length len char_length byte_length lower upper initcap concat concat_ws substr substring left
    right trim ltrim rtrim pad lpad rpad replace translate reverse repeat space instr position
    str_position starts_with ends_with contains split_part regexp_like regexp_extract
    regexp_replace regexp_substr regexp_instr regexp_count ascii unicode char chr hex unhex quote
    format printf soundex levenshtein to_char number_to_str to_number md5 like glob ilike
    date time datetime timestamp julianday unixepoch strftime timediff date_add date_sub date_diff
    datediff date_trunc date_part date_from_parts datetime_add datetime_sub datetime_diff
    datetime_trunc timestamp_add timestamp_sub timestamp_diff timestamp_trunc timestampdiff extract
    year quarter month week day day_of_week day_of_month day_of_year hour minute second last_day
    add_months months_between make_interval age to_date str_to_date str_to_time time_to_str
    time_str_to_date time_str_to_time time_trunc ts_or_ds_add ts_or_ds_diff ts_or_ds_to_date
    ts_or_ds_to_datetime ts_or_ds_to_time ts_or_ds_to_timestamp unix_to_time time_to_unix monthname
    dayname now current_date current_time current_timestamp current_datetime localtime
    localtimestamp
    json_extract json_extract_scalar jsonb_extract jsonb_extract_scalar json_type json_valid
    json_array_length
    """.split()
)
"""Functions in their SQL names, lower case: sqlglot's and those that only a dialect has."""


def problems_of(
    query: str, database: Database, dialect: str, functions: Collection[str]
) -> list[str]:
    """Sentences on a query; none for one ``SELECT`` whose tables and columns exist.

    Args:
        query: its text.
        database: what exists.
        dialect: sqlglot's name of the SQL.
        functions: names beside :data:`FUNCTIONS` that it may call.
    """
    import sqlglot
    from sqlglot.errors import OptimizeError, SqlglotError
    from sqlglot.optimizer.qualify import qualify

    try:
        statements = [s for s in sqlglot.parse(query, read=dialect) if s is not None]
        if len(statements) != 1:
            return [f"It holds {len(statements)} statements; one is wanted."]
        (tree,) = statements
        found = (
            _no_reading(tree, sqlglot.exp)
            or _calls(tree, sqlglot.exp, functions)
            or _sources(tree, sqlglot.exp, database)
        )
        if not found:
            qualify(tree, schema=dict(database.tables), dialect=dialect)
        return found
    except RecursionError:
        return [_TOO_DEEP]
    except OptimizeError as why:
        return [f"{str(why).splitlines()[0].rstrip('.')}."]
    except SqlglotError as why:
        first = next((e["description"] for e in getattr(why, "errors", ())), why)
        return [f"It is no {dialect} SQL: {first}."]


def _no_reading(tree: Any, exp: Any) -> list[str]:
    """That it is something else than a query, or more."""
    more = tree.find(*(getattr(exp, name) for name in _MORE if hasattr(exp, name)))
    if type(tree).__name__ not in _STATEMENTS or more is not None:
        return [f"It is no query ({(more or tree).key.upper()}); only SELECT is allowed."]
    if not all(select.expressions for select in tree.find_all(exp.Select)):
        return ["It selects nothing."]
    return []


def _calls(tree: Any, exp: Any, more: Collection[str]) -> list[str]:
    """Functions that it may not call."""
    known = FUNCTIONS.union(name.lower() for name in more)
    strange = [
        _name(call, exp)
        for call in tree.find_all(exp.Func)
        # Behind a point it is another schema's, which may do anything.
        if isinstance(call.parent, exp.Dot) or not known.intersection(_names(call, exp))
    ]
    return [f"It calls {name}, which may do more than compute." for name in _first(strange)]


def _names(call: Any, exp: Any) -> list[str]:
    unknown = isinstance(call, exp.Anonymous | exp.AnonymousAggFunc)
    return [n.lower() for n in ([call.name] if unknown else call.sql_names())]


def _name(call: Any, exp: Any) -> str:
    name = _names(call, exp)[0]
    return f"{call.parent.this.sql()}.{name}" if isinstance(call.parent, exp.Dot) else name


def _sources(tree: Any, exp: Any, database: Database) -> list[str]:
    """Tables that do not exist, and what is no table."""
    from sqlglot.optimizer.scope import traverse_scope

    local = {
        id(table): {name.lower() for name in scope.cte_sources}
        for scope in traverse_scope(tree)
        for table in scope.tables
    }
    there = {name.lower(): [p.lower() for p in place] for name, place in database.places.items()}
    absent = []
    for table in tree.find_all(exp.Table):
        if not isinstance(table.this, exp.Identifier):
            absent.append(table.sql())
            continue
        *place, name = (part.name.lower() for part in table.parts)
        known = there.get(name, [])
        exists = name in there and place == known[len(known) - len(place) :]
        if not exists and (place or name not in local.get(id(table), ())):
            absent.append(".".join(part.name for part in table.parts))
    known_ones = ", ".join(map(database.source, database.tables))
    return [f"There is no table {name}; there are {known_ones}." for name in _first(absent)]


def _first(names: Iterable[str]) -> list[str]:
    return sorted(set(names))[:_MOST]
