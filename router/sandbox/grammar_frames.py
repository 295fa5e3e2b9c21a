"""What passes between a router and the process that compiles grammars for it."""

import struct

LENGTH = struct.Struct("!I")
"""Before every frame."""
FOLLOWED, REFUSED = b"+", b"-"
"""First byte of an answer."""
