"""`python -I pattern_worker.py`: searches texts for a client's regular expression; needs only the standard library.

A separate process, because some expressions take for ever on some texts: the router then kills it. Writes "." when it
has started. Reads one JSON list, the pattern and the texts; answers with a list of what was found, null where nothing
was, or with the error in the pattern.
"""

import json
import re
import resource
import sys

_MEMORY_BYTES = 512 << 20


def main() -> None:
    """Run the process; see the module's docstring."""
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
