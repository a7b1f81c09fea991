"""What compiled programs do to whole arrays."""

import re

import jax

# What a program may do with a whole array without touching more of it than some elements.
IN_PLACE = frozenset(
    {
        "parameter",
        "get-tuple-element",
        "tuple",
        "while",
        "call",
        "conditional",
        "fusion",
        "scatter",
        "dynamic-update-slice",
        "bitcast",
    }
)


def whole_array_operations(function, length, state, *arguments):
    """Opcodes that make an array of `length` rows in the program compiled for a donated state.

    Instructions inside fusions are listed too, so a fusion that is more than an update in place
    shows as the copy, broadcast or comparison it contains.
    """
    program = jax.jit(function, donate_argnums=0).lower(state, *arguments).compile()
    found = set()
    for line in program.as_text().splitlines():
        match = re.match(r"\s*(?:ROOT )?\S+ = (.+?) ([a-z][a-z-]*)\(", line)
        if match and re.search(rf"\[{length}[\],]", match.group(1)):
            found.add(match.group(2))
    assert "parameter" in found
    return found
