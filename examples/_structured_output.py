"""Structured output of all three kinds, each checked: JSON schema, regular expression, EBNF.

    python examples/_structured_output.py
    python examples/_structured_output.py --model path/to/model --samples 20

Needs deepinfer-structured. Exits with 1 if a text that is called finished breaks its rule. Without
``--model`` it runs the demo model, SmolLM2-135M-Instruct, fetched once (93 MB).
"""

from __future__ import annotations

import argparse
import json
import re
import sys

import jsonschema
from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured import partial

TICKET = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "technical", "delivery", "other"]},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "summary": {"type": "string", "minLength": 5, "maxLength": 60},
    },
    "required": ["category", "priority", "summary"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
SUM = """
root ::= term (" " ("+" | "-") " " term){1,3}
term ::= [1-9] [0-9]{0,2} | "(" root ")"
"""


def is_ticket(text: str) -> bool:
    """By jsonschema, which knows nothing of grammars."""
    jsonschema.validate(json.loads(text), TICKET)
    return True


def is_date(text: str) -> bool:
    """By Python's own regular expressions."""
    return re.fullmatch(DATE, text) is not None


def is_sum(text: str) -> bool:
    """By Python's own arithmetic: numbers, brackets, plus and minus, nothing else."""
    compile(text, "sum", "eval")
    return re.fullmatch(r"[0-9()+\- ]+", text) is not None


CASES = (
    ("json", TICKET, "Ticket: My invoice of May was charged twice.\nJSON: ", is_ticket),
    ("regex", DATE, "The treaty was signed on the date (ISO) ", is_date),
    ("ebnf", SUM, "A sum for the first class: ", is_sum),
)


def parse_args() -> argparse.Namespace:
    """What a first look needs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="directory, GGUF file, hub id or demo")
    parser.add_argument("--samples", type=int, default=5, help="per kind, at temperature 1")
    parser.add_argument("--max-tokens", type=int, default=80)
    return parser.parse_args()


def main() -> int:
    """All kinds; 1 if a finished text is wrong."""
    args = parse_args()
    wrong = 0
    with LLM(args.model, max_model_len=512) as llm:
        for kind, rule, prompt, holds in CASES:
            params = SamplingParams(
                n=args.samples,
                temperature=1.0,
                seed=7,
                max_tokens=args.max_tokens,
                so_args={"schema_type": kind, "schema": rule},
            )
            (output,) = llm.generate(prompt, params)
            for one in output.outputs:
                if one.finish_reason == "length":
                    lacks = partial(one.text, rule).open if kind == "json" else "its end"
                    print(f"{kind:5} cut off: {one.text!r} lacks {lacks}")
                    continue
                fine = one.finish_reason == "stop" and holds(one.text)
                wrong += not fine
                print(f"{kind:5} {'valid' if fine else 'WRONG'}: {one.text!r}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
