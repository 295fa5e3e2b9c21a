"""`python -I pattern_worker.py`: searches texts for a stranger's regular expression; stands on nothing but Python.

A process of its own, because some expressions take for ever on some texts: whoever started it kills it then. Says "."
when it has begun. Reads one JSON list, the pattern and the texts; answers with the list of what was found, null where
nothing was, or with what is wrong with the pattern.
"""

import json
import re
import resource
import sys

_MEMORY_BYTES = 512 << 20


def main() -> None:
    """See the module's docstring."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write(".")
    sys.stdout.flush()
    pattern, texts = json.load(sys.stdin)
    try:
        searched = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    found = [searched.search(text) for text in texts]
    answers = [None if one is None else one.group(1 if searched.groups else 0) for one in found]
    json.dump({"found": answers}, sys.stdout)


if __name__ == "__main__":
    main()
