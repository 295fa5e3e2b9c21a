"""`python -m samples write` prints what the code on the path says, `read` what it understands of its standard input.

So the version before, which has this folder in its archive, says and reads its own. Modules here import each other by
their places, since they have another name there, nothing else of the tests, and of Tandem only what needs no torch.
"""

import json
import sys

from .collection import read, spoken, written


def main(task: str) -> None:
    """As the module says; samples are hexadecimal."""
    if task == "write":
        messages = written()
        encoded = {name: data.hex() for name, data in messages.items()}
        print(json.dumps({"spoken": spoken(), "said": encoded, "read": read(messages)}))
    else:
        print(json.dumps(read({name: bytes.fromhex(data) for name, data in json.load(sys.stdin).items()})))


if __name__ == "__main__":
    main(sys.argv[1])
